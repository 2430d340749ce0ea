"""results.json and report.md of pre-training: losses over steps, samples, and a baseline."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from experiments import report
from experiments.text_data import Prepared


def unigram_bits_per_byte(data: Prepared) -> float:
    """Validation bits per byte of token frequencies alone, counted on the training split.

    Frequencies are smoothed by adding one. Counted are the targets: all but the first token of
    each document, by their weights.
    """
    counts = np.bincount(data.train.tokens, minlength=data.vocab_size) + 1.0
    bits = -np.log2(counts / counts.sum())[data.valid.tokens]
    if data.valid.weights is not None:
        bits = bits * data.valid.weights
    bits[data.valid.offsets[:-1]] = 0
    return float(bits.sum() / data.valid_bytes)


def results(
    workdir: pathlib.Path,
    evaluation: dict[str, float],
    num_params: int,
    baseline: float,
    samples: list[tuple[str, str]],
) -> dict[str, Any]:
    """What the run found; all but the speed depends only on the config and the data."""
    metrics = report.read_metrics(workdir / "metrics.jsonl")
    speed = metrics.get("train/tokens_per_second")
    return {
        "claim": "the network predicts held-out text better than token frequencies do",
        "holds": bool(evaluation["bits_per_byte"] < baseline),
        "validation": evaluation,
        "frequencies_bits_per_byte": baseline,
        "train": {
            "steps": int(metrics["train/loss"][0][-1]) if "train/loss" in metrics else 0,
            "loss": float(metrics["train/loss"][1][-1]) if "train/loss" in metrics else None,
        },
        "parameters": num_params,
        "tokens_per_second": float(np.median(speed[1])) if speed else None,
        "samples": [{"prompt": prompt, "continuation": text} for prompt, text in samples],
    }


def write(workdir: pathlib.Path, found: dict[str, Any]) -> None:
    """Draws the curves and writes report.md."""
    metrics = report.read_metrics(workdir / "metrics.jsonl")
    page = report.Report(workdir, "Pre-training")
    valid = found["validation"]
    page.text(
        f"{found['parameters'] / 1e6:.2f} M parameters after {found['train']['steps']} steps: "
        f"**{valid['bits_per_byte']:.3f} bits per byte** on {valid['tokens']:.0f} held-out tokens "
        f"(perplexity {valid['perplexity']:.1f} a token). Token frequencies alone give "
        f"{found['frequencies_bits_per_byte']:.3f} bits per byte."
    )
    figure, axes = report.new_figure(1, 2, width=4.8)
    for name, label in (("train/loss", "training"), ("eval/cross_entropy", "validation")):
        if name in metrics:
            marker = "o" if name.startswith("eval") else None
            report.plot_curve(axes[0], *metrics[name], label, marker=marker, markersize=3)
    axes[0].set(xlabel="step", ylabel="loss (nats a token)")
    axes[0].legend()
    if "eval/bits_per_byte" in metrics:
        report.plot_curve(
            axes[1], *metrics["eval/bits_per_byte"], "network", marker="o", markersize=3
        )
    axes[1].axhline(
        found["frequencies_bits_per_byte"], color="gray", linestyle="--", label="token frequencies"
    )
    axes[1].set(xlabel="step", ylabel="validation bits per byte")
    axes[1].legend()
    page.figure(figure, "loss", "Loss, and bits per byte on held-out text, over training steps")
    rows = [["speed (tokens a second)", found["tokens_per_second"]]]
    rows += [[f"validation {name}", value] for name, value in valid.items()]
    rows += [["training loss", found["train"]["loss"]]]
    page.table(["measure", "value"], rows)
    page.heading("Samples")
    for entry in found["samples"]:
        page.code(entry["prompt"] + entry["continuation"])
    page.write()
