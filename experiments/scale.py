"""Compiles a list of configs for their slices and records memory, collectives and estimates."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_collections

from experiments import report, topology
from experiments.errors import UsageError
from jaxllm.compilation import topology as topologies

# MaxText 0.2.5, `train_compile` for v5p:4x4x4: fsdp 64, one sequence of 4096 tokens a chip, full
# recomputation, float32 masters. Bytes a device, and XLA's estimate with loop bodies counted once.
MAXTEXT = {
    "pretrain:llama3_8b": {"arguments": 1.51e9, "temporaries": 4.51e9, "optimal_seconds": 0.058},
    "pretrain:mixtral_8x7b": {
        "arguments": 8.76e9,
        "temporaries": 10.12e9,
        "optimal_seconds": 0.067,
    },
}
COLUMNS = (
    "program",
    "slice",
    "mesh",
    "arguments",
    "temporaries",
    "peak of HBM",
    "fits",
    "operations a token (method / program)",
    "sent by a device",
    "XLA's optimal s (loops once)",
    "products / sent / cycles, s",
    "MFU at most / with cycles",
    "compiled, s",
)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Compiles what is not recorded in the workdir yet; writes scale.json, report.md, a figure."""
    path = workdir / "scale.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    programs = {" ".join(filter(None, program[1:])): program for program in config.programs}
    for key, (series, spec, name, overrides) in programs.items():
        if key in records:
            continue
        print(f"\n{key}", flush=True)
        try:
            result = topology.run(spec, overrides.split(), name)
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from error
        print(topology.table(result), flush=True)
        records[key] = {"series": series, "config": spec} | result
        report.write_json(path, records)
    records = {key: records[key] for key in programs}
    page = _report(workdir, records)
    if config.record:
        folder = pathlib.Path(config.record)
        report.write_json(folder / "scale.json", records)
        report.write_text(folder / "scale.md", page)
    return {"programs": len(records), "compared": compare(records)}


def compare(records: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Ours over MaxText's, on its mesh and batch: {config: {quantity: ratio}}."""
    ratios = {}
    for record in records.values():
        theirs = MAXTEXT.get(record["config"])
        step = next(iter(record["steps"].values()))
        memory = step["memory"]
        same = record["topology"] == "v5p:4x4x4" and record["mesh"] == {"fsdp": 64}
        same = same and step["tokens"] == 64 * 4096 and memory["temporaries"] is not None
        if theirs and same and "model.remat=full" in record["overrides"]:
            # A loop that runs as often as values say is most of a mixture's work, counted once.
            seconds = None if step["loops_counted_once"] else step["xla_optimal_seconds"]
            ratios[record["config"]] = {
                "arguments": memory["arguments"] / theirs["arguments"],
                "temporaries": memory["temporaries"] / theirs["temporaries"],
                "optimal_seconds": seconds and seconds / theirs["optimal_seconds"],
            }
    return ratios


def rows(records: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The table, a row a compiled step."""
    lines = []
    for record in records.values():
        mesh = " x ".join(f"{axis} {size}" for axis, size in record["mesh"].items())
        for step in record["steps"].values():
            memory, estimates = step["memory"], step["estimates"]
            sent, least = None, ">= " if step["loops_counted_once"] else ""
            if step["collectives"] is not None:
                sent = sum(row["sent_bytes"] for row in step["collectives"].values())
            lines.append(
                (
                    f"{record['config']} {' '.join(record['overrides'])}".strip(),
                    record["topology"],
                    mesh or "-",
                    _gigabytes(memory["arguments"]),
                    _gigabytes(memory["temporaries"]),
                    f"{_gigabytes(memory['needed'])} of {_gigabytes(memory['available'])}",
                    "yes" if memory["fits"] else "no: " + "; ".join(step["advice"]),
                    f"{_short(step['flops_per_token'])} / "
                    f"{least}{_short(step['hlo_flops_per_token'])}",
                    least + _gigabytes(sent),
                    _short(step["xla_optimal_seconds"]),
                    least
                    + " / ".join(_short(v) for k, v in estimates.items() if k.endswith("seconds")),
                    " / ".join(_percent(estimates[k]) for k in ("mfu_bound", "mfu_estimate")),
                    f"{step['compile_seconds']:.0f}",
                )
            )
    return lines


def _report(workdir: pathlib.Path, records: dict[str, Any]) -> str:
    page = report.Report(workdir, "Compiled ahead of time")
    page.text(
        "What the compilers say about one step on one device, sizes in 10^9 bytes; nothing ran."
        " Times: matrix products of the program at the bfloat16 peak, bytes sent at the bandwidth"
        " of all links together (both lower bounds), and the compiler's cycles for all that is no"
        " collective (TPU). Loops are multiplied in them and in the operations of the program,"
        " but those over blocks of tokens of experts, whose number depends on the tokens (>=);"
        " XLA's optimal seconds count every loop's body once. MFU is what the method needs over"
        " what the devices could do in the larger bound, and with the cycles: no measurement."
    )
    page.table(COLUMNS, rows(records))
    ratios = compare(records)
    if ratios:
        page.heading("Beside MaxText")
        page.text(
            "Ours over MaxText 0.2.5 (`train_compile`) on the same 64 chips of v5p: fsdp 64, one"
            " sequence of 4096 tokens a chip, everything recomputed, float32 masters."
        )
        page.table(
            ("config", "arguments", "temporaries", "optimal seconds"),
            [
                (name, *("-" if r is None else f"{r:.2f}" for r in row.values()))
                for name, row in ratios.items()
            ],
        )
    # What is recorded beside the code is the tables.
    text = page.write().read_text(encoding="utf-8")
    _figure(page, records)
    page.write()
    return text


def _figure(page: report.Report, records: dict[str, Any]) -> None:
    """Memory of a device over the number of devices."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for record in records.values():
        chip = record["topology"].partition(":")[0]
        step = next(iter(record["steps"].values()))
        point = (record["devices"], step["memory"]["needed"] / 1e9)
        series.setdefault((record["series"], chip), []).append(point)
    figure, axes = report.new_figure(width=8.4)
    for (name, chip), points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{name}, {chip}")
    for chip in dict.fromkeys(chip for _, chip in series):
        size = topologies.CHIPS[chip].hbm_bytes / 1e9
        axes.axhline(size, color="0.5", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"HBM of {chip}", (0.5, size), xycoords=("axes fraction", "data"), va="bottom"
        )
    counts = sorted({devices for points in series.values() for devices, _ in points})
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="GB a device, at most")
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    page.figure(figure, "memory", "Memory of one device against the number of devices.")


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
