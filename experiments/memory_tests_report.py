"""Claims, tables and figures of the memory tests."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from experiments import report
from experiments.memory_tests_toy import COPYING, TRACKING
from jaxllm.evaluation.statistics import report_mean

PASSED = 0.9


def claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What is expected, what was measured, and whether it holds: {"claim", "measured", "holds"}."""
    toy = results["toy"]
    trained, *_, longest = toy["ladder"]
    final = {task: report_mean(np.array(scores)) for task, scores in toy["ladder"][trained].items()}
    far = {task: report_mean(np.array(scores)) for task, scores in toy["ladder"][longest].items()}
    found = []

    def claim(text: str, measured: str, holds: Any) -> None:
        found.append({"claim": text, "measured": measured, "holds": bool(holds)})

    lowest = min(results["solvers"], key=lambda task: results["solvers"][task]["value"])
    value = results["solvers"][lowest]["value"]
    claim(
        "The exact solver of every task scores 1.0",
        f"{len(results['solvers'])} tasks, lowest {value:.3f} ({lowest})",
        value == 1,
    )
    passed = {task: _first_pass(toy, task) for task in (*COPYING, *TRACKING)}
    claim(
        f"Copying tasks pass {PASSED} before counting and state tracking",
        ", ".join(
            f"{task}: {'never' if step is None else f'step {step}'}"
            for task, step in passed.items()
        ),
        all(
            passed[first] is not None and (passed[second] is None or passed[first] < passed[second])
            for first in COPYING
            for second in TRACKING
        ),
    )
    for task in TRACKING:
        base = toy["majority"][task]
        claim(
            f"{task} stays near the rate of the most frequent answer (its interval reaches down to "
            "0.1 above it)",
            f"{final[task]}, most frequent answer {base:.3f}",
            final[task].lower <= base + 0.1,
        )
    lost = {task: final[task].value - far[task].value for task in final}
    claim(
        f"From {trained} to {longest} words search degrades gently (by at most half)",
        f"{final['key_value_search']} to {far['key_value_search']}",
        final["key_value_search"].value >= PASSED
        and lost["key_value_search"] <= final["key_value_search"].value / 2,
    )
    base = toy["majority"]["quantity_state"]
    claim(
        f"At {longest} words quantity_state has collapsed (its interval holds a share below the "
        "most frequent answer's plus 0.1)",
        f"{final['quantity_state']} to {far['quantity_state']}",
        far["quantity_state"].lower <= base + 0.1,
    )
    return found


def _first_pass(toy: dict[str, Any], task: str) -> int | None:
    """The first evaluation at which a task reaches PASSED."""
    pairs = zip(toy["steps"], toy["accuracy"][task], strict=True)
    return next((int(step) for step, value in pairs if value >= PASSED), None)


def write_tiny(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """report.md with the claims, learning curves and the ladder of lengths."""
    page = report.Report(workdir, "Memory tests: exact solvers and a small decoder")
    page.table(
        ("claim", "measured", "holds"),
        [(c["claim"], c["measured"], "yes" if c["holds"] else "no") for c in results["claims"]],
    )
    toy = results["toy"]
    figure, axes = report.new_figure()
    for task, values in toy["accuracy"].items():
        style = "-" if task in COPYING else "--"
        [line] = axes.plot(toy["steps"], values, style, marker="o", markersize=3, label=task)
        axes.axhline(toy["majority"][task], color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.axhline(PASSED, color="black", linewidth=0.8)
    axes.set(xlabel="step", ylabel="strict accuracy", ylim=(-0.03, 1.03))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    page.figure(
        figure,
        "learning",
        "Accuracy over training; dotted: always the most frequent answer; black: "
        f"{PASSED}, where a task counts as learnt",
    )
    lengths, tasks = list(toy["ladder"]), list(toy["accuracy"])
    means = np.array([[np.mean(toy["ladder"][length][t]) for length in lengths] for t in tasks])
    _heat_map(page, means, tasks, lengths, "words of context", "ladder")
    page.heading("Ladder of lengths")
    page.table(
        ("task", *(f"{length} words" for length in lengths)),
        [(t, *(report_mean(np.array(toy["ladder"][n][t])) for n in lengths)) for t in tasks],
    )
    page.heading("Exact solvers")
    page.table(
        ("task", "strict", "entries"),
        [(task, mean["value"], mean["size"]) for task, mean in results["solvers"].items()],
    )
    page.write()


def _heat_map(page, means, rows, columns, label, name) -> None:
    figure, axes = report.new_figure(height=0.5 * len(rows) + 1.6)
    axes.imshow(means, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=label)
    for i, j in np.ndindex(means.shape):
        color = "black" if means[i, j] > 0.6 else "white"
        axes.text(j, i, f"{means[i, j]:.2f}", ha="center", va="center", color=color)
    page.figure(figure, name, "Strict accuracy by task and length of context")


def write_model(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """report.md with scores by family, task and parameter."""
    page = report.Report(workdir, f"Memory tests: {results['model']}")
    families = results["families"]
    names = list(families)
    figure, axes = report.new_figure(height=0.4 * len(names) + 1.2)
    values = np.array([families[name]["value"] for name in names])
    ends = np.array([[families[n]["lower"], families[n]["upper"]] for n in names]).T
    axes.barh(names, values, alpha=0.8)
    # An interval need not hold its mean, where all answers are right or all wrong.
    axes.hlines(names, *ends, color="black", linewidth=1.5)
    axes.invert_yaxis()
    axes.set(xlabel="strict score", xlim=(0, 1))
    page.figure(figure, "families", "Mean strict score by family, with 95 % intervals")

    page.heading("Tasks")
    page.text("Means with 95 % intervals; published scores as the authors' programs compute them.")
    page.table(
        ("task", "entries", "strict", "published scores"),
        [
            (
                task,
                scores["strict"]["size"],
                _interval(scores["strict"]),
                ", ".join(
                    f"{metric} {mean['value']:.3f}"
                    for metric, mean in scores.items()
                    if metric != "strict" and not metric.endswith(("precision", "recall"))
                ),
            )
            for task, scores in results["tasks"].items()
        ],
    )
    page.heading("Settings")
    page.table(
        ("task", "parameter", "value", "strict"),
        [
            (row["task"], row["parameter"], row["value"], _interval(row["strict"]))
            for row in results["parameters"]
        ],
    )
    page.write()


def _interval(mean: dict[str, Any]) -> str:
    return f"{mean['value']:.3f} [{mean['lower']:.3f}, {mean['upper']:.3f}]"
