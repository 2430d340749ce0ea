"""Runs the chosen benchmark suites and reports them with a figure."""

from __future__ import annotations

import importlib
import os
import pathlib
import platform
from typing import Any

import ml_collections

from experiments import report
from experiments.errors import UsageError

SUITES = {
    "training": "experiments.benchmarks.training",
    "decoding": "experiments.benchmarks.decoding",
    "engine": "experiments.benchmarks.engine",
    "moe": "experiments.benchmarks.moe",
    "scoring": "experiments.benchmarks.scoring",
    "pipeline": "experiments.benchmarks.pipeline",
    "startup": "experiments.benchmarks.startup",
    "loading": "experiments.benchmarks.loading",
}
# The model's appetite against which the pipeline is judged: a factor asked for by the design.
PIPELINE_FACTOR = 20
BUSY = (
    "the machine was busy before the measurement. Neither rates nor ratios hold then: threads that "
    "wait for each other (PyTorch's) lose more than others. Repeat on a quiet machine."
)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures, prints and reports; suites run one after the other in the order given."""
    unknown = [name for name in config.suites if name not in SUITES]
    if unknown or not config.suites:
        raise UsageError(f"suites={tuple(config.suites)}: expected some of {', '.join(SUITES)}.")
    results: dict[str, Any] = {"machine": machine()}
    if results["machine"]["busy"]:
        print(f"warning: {BUSY}")
    for name in config.suites:
        print(f"measuring {name}", flush=True)
        results[name] = importlib.import_module(SUITES[name]).measure(**config[name].to_dict())
    if "pipeline" in results:
        results["pipeline"] |= against_model(results, config)
    for name in config.suites:
        for key, value in results[name].items():
            if isinstance(value, int | float):
                print(f"  {name}.{key} = {value:.4g}")
    write(workdir, results)
    return results


def machine() -> dict[str, Any]:
    """What the numbers were taken on, and whether other work was going on before they were."""
    import jax

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "load_before": load,
        "busy": load > 0.5 * (os.cpu_count() or 1),
    }


def against_model(results: dict[str, Any], config: ml_collections.ConfigDict) -> dict[str, Any]:
    """How many times faster the pipeline serves tokens than the 15 M model consumes them."""
    if "training" in results:
        consumed = results["training"]["jaxllm"]["tokens_per_second"]
    else:
        from experiments.benchmarks import training

        options = config.training.to_dict() | {"compare": False, "rounds": 2, "steps": 1}
        consumed = training.measure(**options)["jaxllm"]["tokens_per_second"]
    factor = results["pipeline"]["concat_tokens_per_second"] / consumed
    return {
        "model_tokens_per_second": consumed,
        "times_model": factor,
        "fast_enough": bool(factor >= PIPELINE_FACTOR),
    }


def write(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """report.md: a table a suite, and the figure of the training suite."""
    page = report.Report(workdir, "Benchmarks")
    page.text("Measured on " + ", ".join(f"{k} {v}" for k, v in results["machine"].items()) + ".")
    if results["machine"]["busy"]:
        page.text(f"**Warning**: {BUSY}")
    for name, values in results.items():
        if name == "machine":
            continue
        page.heading(name.capitalize())
        rows = []
        for key, value in values.items():
            inner = value if isinstance(value, dict) else {"": value}
            rows += [[f"{key} {k}".strip(), v] for k, v in inner.items() if not _is_series(v)]
        page.table(["measure", "value"], rows)
        if name == "training":
            page.figure(*training_figure(values))
        if name == "decoding" and any("ratio" in v for v in values.values() if isinstance(v, dict)):
            page.figure(*decoding_figure(values))
        if name == "engine":
            page.figure(*engine_figure(values))
        if name == "moe":
            page.figure(*moe_figure(values))
    page.write()


def _is_series(value: Any) -> bool:
    return isinstance(value, list | tuple)


def training_figure(values: dict[str, Any]) -> tuple[Any, str, str]:
    """Tokens a second of every round, both sides."""
    figure, axes = report.new_figure()
    tokens = values["batch_size"] * values["length"]
    for name in ("jaxllm", "transformers"):
        if name in values:
            seconds = values[name]["seconds_per_step"]
            rounds = range(1, len(seconds) + 1)
            report.plot_curve(axes, rounds, [tokens / s for s in seconds], name, marker="o")
    axes.set(xlabel="round", ylabel="tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure, "training", "Training speed by round; the sides take turns in one process"


def decoding_figure(values: dict[str, Any]) -> tuple[Any, str, str]:
    """How many times faster than transformers, by model and batch size."""
    figure, axes = report.new_figure(width=7.2)
    measured = {k: v for k, v in values.items() if isinstance(v, dict) and "ratio" in v}
    names = list(measured)[::-1]
    axes.barh([name.replace("_", " ") for name in names], [measured[n]["ratio"] for n in names])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("tokens a second / tokens a second of transformers")
    return figure, "decoding", "Greedy decoding; above 1, jaxllm is faster"


def engine_figure(values: dict[str, Any]) -> tuple[Any, str, str]:
    """How long the answers are, and how many times faster continuous batching is by round."""
    figure, (left, right) = report.new_figure(columns=2, width=4.8)
    left.hist(values["lengths"], bins=24)
    left.set(xlabel="new tokens", ylabel="requests")
    ratios = values["ratio_by_round"]
    report.plot_curve(right, range(1, len(ratios) + 1), ratios, "measured", marker="o")
    right.axhline(values["ideal_ratio"], color="black", linewidth=0.8, label="decoding steps alone")
    right.set(xlabel="round", ylabel="time of static / time of continuous batching")
    right.set_ylim(bottom=0)
    right.legend()
    return figure, "engine", "Answers of skewed lengths; slots refilled against batches that wait"


def moe_figure(values: dict[str, Any]) -> tuple[Any, str, str]:
    """How many times faster grouped experts are, by shape."""
    figure, axes = report.new_figure(width=7.2)
    names = list(values)[::-1]
    ratios = [values[name]["ratio"] for name in names]
    axes.barh([name.replace("_", " ") for name in names], ratios)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time of every expert on every token / time of grouped experts")
    return figure, "moe", "Grouped experts against every expert; above 1, grouping is faster"
