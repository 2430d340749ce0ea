"""Claims, tables and figures of the coverage experiment."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from experiments import report

TITLES = {
    "independent": ("one accuracy", "questions"),
    "clustered": ("clustered questions", "clusters"),
    "comparison": ("two models, different questions", "questions each"),
    "paired": ("two models, same questions", "questions"),
    "f1": ("F1", "items"),
}


def claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What the paper says, what was measured, and whether it holds here.

    Each: {"claim", "measured", "holds"}.
    """
    settings, alphas = results["settings"], np.array(results["alphas"])
    level = int(np.argmin(np.abs(alphas - 0.05)))
    single, cluster = settings["independent"], settings["clustered"]
    pairs = settings["paired"]
    found = []

    def claim(text: str, measured: str, holds: Any) -> None:
        found.append({"claim": text, "measured": measured, "holds": bool(holds)})

    def at(table: dict[str, Any], size: str, method: str, what: str = "coverage") -> float:
        return float(table[size][method][what][level])

    small = min(single, key=int)
    value, error = at(single, small, "CLT"), at(single, small, "CLT", "error")
    claim(
        f"With {small} questions, 95 % intervals of the central limit theorem cover below 55 %",
        f"{value:.3f} +- {error:.3f}",
        value < 0.55,
    )
    order = sorted(single, key=int)
    short = [at(single, size, "CLT") for size in order]
    claim(
        "The central limit theorem covers less than nominal at every size, and less the smaller it"
        " is",
        ", ".join(f"N={size}: {value:.3f}" for size, value in zip(order, short, strict=True)),
        max(short) < 0.95 and short == sorted(short),
    )
    for name, method, table in (
        ("The uniform-prior posterior is calibrated (within 3 standard errors)", "Bayes", single),
        (
            "The clustered posterior is calibrated (within 3 standard errors)",
            "clustered Bayes (grid)",
            cluster,
        ),
        ("The posterior of F1 is calibrated", "Bayes", settings["f1"]),
        ("The posterior of a difference is calibrated", "Bayes", settings["comparison"]),
        ("The paired posterior is calibrated", "Bayes paired", pairs),
    ):
        gaps = np.array(
            [
                (np.array(sizes[method]["coverage"]) - (1 - alphas))
                / np.array(sizes[method]["error"])
                for sizes in table.values()
            ]
        )
        worst = float(np.abs(gaps).max())
        claim(name, f"largest gap {worst:.1f} standard errors", worst <= 3)
    lowest = min(results["lowest_clopper_pearson"].values())
    claim(
        "Clopper-Pearson never covers less than nominal for any accuracy (exact sum)",
        f"smallest excess {lowest:+.4f}",
        lowest >= -1e-12,
    )
    largest = [at(sizes, str(size), "naive CLT") for sizes in (cluster,) for size in sizes]
    claim(
        "Ignoring clusters, 95 % intervals cover below 85 % whatever the number of clusters",
        f"at most {max(largest):.3f}",
        max(largest) < 0.85,
    )
    within = max(at(cluster, size, "bootstrap within") for size in cluster)
    claim(
        "Resampling inside clusters only covers below 60 %", f"at most {within:.3f}", within < 0.6
    )
    widths = {
        method: at(pairs, max(pairs, key=int), method, "width")
        for method in ("Bayes unpaired", "Bayes paired")
    }
    claim(
        "Using the pairing makes intervals narrower",
        ", ".join(f"{name} {value:.3f}" for name, value in widths.items()),
        widths["Bayes paired"] < widths["Bayes unpaired"],
    )
    return found


def write(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """report.md with the claims, four figures and a table a setting."""
    page = report.Report(workdir, "Error bars for small evaluations")
    page.table(
        ("claim", "measured", "holds"),
        [(c["claim"], c["measured"], "yes" if c["holds"] else "no") for c in results["claims"]],
    )
    figures(page, results)
    shown = range(min(6, len(results["alphas"])))
    levels = ", ".join(f"{1 - results['alphas'][i]:.1%}" for i in shown)
    for setting, table in results["settings"].items():
        title, unit = TITLES[setting]
        page.heading(f"Coverage: {title} (nominal {levels})")
        rows = [
            (method, *(_cell(table[size].get(method), shown) for size in table))
            for method in _methods(table)
        ]
        page.table(("method", *(f"{size} {unit}" for size in table)), rows)
    page.write()


def _cell(entry: dict[str, Any] | None, shown: range) -> str:
    return "-" if entry is None else " / ".join(f"{entry['coverage'][i]:.2f}" for i in shown)


def _methods(table: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(method for sizes in table.values() for method in sizes))


def figures(page: report.Report, results: dict[str, Any]) -> None:
    """Coverage and width at 95 % by size, coverage by level, and the mean error of coverage."""
    alphas = np.array(results["alphas"])
    level = int(np.argmin(np.abs(alphas - 0.05)))

    def error(entry: dict[str, Any]) -> tuple[float, float]:
        return float(np.abs(np.array(entry["coverage"]) - (1 - alphas)).mean()), 0.0

    panels = {
        "coverage": ("coverage at 95 %", lambda e: (e["coverage"][level], e["error"][level])),
        "width": ("mean width at 95 %", lambda e: (e["width"][level], 0.0)),
        "coverage_error": ("mean |coverage - level|", error),
    }
    for name, (label, value) in panels.items():
        figure, axes = report.new_figure(1, len(TITLES), width=4.2, height=4.6)
        for axis, (setting, table) in zip(axes, results["settings"].items(), strict=True):
            _by_size(axis, table, value)
            title, unit = TITLES[setting]
            axis.set(title=title, xlabel=unit, xscale="log", ylabel=label)
            axis.set_xticks([int(size) for size in table], list(table))
            axis.minorticks_off()
            if name == "coverage":
                axis.axhline(1 - alphas[level], color="black", linewidth=1, linestyle=":")
            axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
        page.figure(figure, name, f"{label}, by size")
    figure, axes = report.new_figure(1, len(TITLES), width=4.2, height=4.6)
    for axis, (setting, table) in zip(axes, results["settings"].items(), strict=True):
        size = sorted(table, key=int)[min(1, len(table) - 1)]
        order = np.argsort(alphas)
        for method, entry in table[size].items():
            axis.plot((1 - alphas)[order], np.array(entry["coverage"])[order], "o-", label=method)
        axis.plot([0.8, 1], [0.8, 1], ":", color="black", linewidth=1)
        title, unit = TITLES[setting]
        axis.set(title=f"{title}, {size} {unit}", xlabel="level", ylabel="coverage")
        axis.legend(fontsize=7)
    page.figure(figure, "levels", "coverage by level, at one size")


def _by_size(axis: Any, table: dict[str, Any], value: Any) -> None:
    for method in _methods(table):
        sizes = [size for size in table if method in table[size]]
        points, bars = zip(*(value(table[size][method]) for size in sizes), strict=True)
        axis.errorbar([int(s) for s in sizes], points, bars, marker="o", capsize=2, label=method)
