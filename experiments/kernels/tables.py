"""What is made of compiled kernels: floors and estimates of their times, as rows and as bars."""

from __future__ import annotations

from typing import Any

from experiments import report
from jaxllm.compilation import topology as topologies

TPU_COLUMNS = (
    "kernel",
    "chip",
    "blocks",
    "grid",
    "MB needed",
    "MB of the program",
    "MB of XLA's",
    "10^9 operations",
    "VMEM, MB",
    "bundles x steps",
    "slots used",
    "floor, us",
    "kernel, us",
    "kernel / floor",
    "XLA, us",
)
GPU_COLUMNS = (
    "kernel",
    "blocks",
    "grid",
    "MB needed",
    "10^9 operations",
    "programs x threads",
    "registers",
    "spilled bytes",
    "shared memory, KB",
    "floor, us",
)


def times(record: dict[str, Any]) -> dict[str, float | None]:
    """Seconds of a case on its chip; none of them is a measurement.

    Returns:
      floor: the larger of needed bytes at the bandwidth and operations at the peak of their type.
      kernel: the larger of the kernel's bundles times steps at the clock (cores share the steps
        where they can) and the program's bytes at the bandwidth. None on a GPU.
      xla: the compiler's cycles for the reference, or its bytes at the bandwidth. None on a GPU.
    """
    chip = topologies.parse(record["topology"]).chip
    needed = record["needed_bytes"] / chip.hbm_bandwidth
    products = sum(n / chip.peak_flops[kind] for kind, n in record["operations"].items())
    found: dict[str, float | None] = {
        "floor": max(needed, products),
        "kernel": None,
        "xla": None,
    }
    if chip.clock_hz is None:
        return found
    bundles = sum(
        record["code"][call["name"]]["bundles"]
        * call["steps"]
        / (chip.cores if call["shared"] else 1)
        for call in record["calls"]
    )
    moved = max(record["kernel"]["bytes"], record["needed_bytes"])
    found["kernel"] = max(bundles / chip.clock_hz, moved / chip.hbm_bandwidth)
    if xla := record.get("xla"):
        found["xla"] = max(xla["cycles"] / chip.clock_hz, xla["bytes"] / chip.hbm_bandwidth)
    return found


def tpu_row(record: dict[str, Any]) -> tuple[Any, ...]:
    """Of TPU_COLUMNS."""
    estimates, calls, code = times(record), record["calls"], record["code"]
    xla = record.get("xla")
    return (
        f"{record['operation']}, {record['shape']}",
        record["topology"].partition(":")[0],
        _lines(_blocks(record, call) for call in calls),
        _lines(_sizes(call["grid"]) for call in calls),
        _mega(record["needed_bytes"]),
        _mega(record["kernel"]["bytes"]),
        _mega(xla and xla["bytes"]),
        f"{sum(record['operations'].values()) / 1e9:.3g}",
        _lines(_mega(call["block_bytes"]) for call in calls),
        _lines(f"{code[call['name']]['bundles']} x {call['steps']}" for call in calls),
        _lines(_slots(code[call["name"]]["slots"]) for call in calls),
        _micro(estimates["floor"]),
        _micro(estimates["kernel"]),
        f"{estimates['kernel'] / estimates['floor']:.2f}",
        _micro(estimates["xla"]),
    )


def gpu_row(record: dict[str, Any]) -> tuple[Any, ...]:
    """Of GPU_COLUMNS."""
    calls = record["calls"]
    code = [record["code"][call["name"]] for call in calls]
    return (
        f"{record['operation']}, {record['shape']}",
        _lines(_blocks(record, call) for call in calls),
        _lines(_sizes(call["grid"]) for call in calls),
        _mega(record["needed_bytes"]),
        f"{sum(record['operations'].values()) / 1e9:.3g}",
        _lines(f"{item['programs']} x {item['threads']}" for item in code),
        _lines("-" if item["registers"] is None else str(item["registers"]) for item in code),
        _lines(
            "-" if item["spilled_bytes"] is None else str(item["spilled_bytes"]) for item in code
        ),
        _lines(f"{item['shared_bytes'] / 1e3:.1f}" for item in code),
        _micro(times(record)["floor"]),
    )


def draw(page: report.Report, records: list[dict[str, Any]]) -> None:
    """Bars of kernel and XLA over the floor, a panel a chip."""
    chips = list(dict.fromkeys(record["topology"] for record in records))
    names = list(dict.fromkeys(f"{r['operation']}\n{r['shape']}" for r in records))
    figure, panels = report.new_figure(
        1, len(chips), width=4.2 if len(chips) > 1 else 7.0, height=1.0 + 0.42 * len(names)
    )
    for chip, axes in zip(chips, [panels] if len(chips) == 1 else panels, strict=True):
        for record in records:
            if record["topology"] != chip:
                continue
            row, estimates = names.index(f"{record['operation']}\n{record['shape']}"), times(record)
            for key, shift, color in (("kernel", -0.2, "C0"), ("xla", 0.2, "C1")):
                if estimates[key] is not None:
                    axes.barh(row + shift, estimates[key] / estimates["floor"], 0.4, color=color)
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        axes.set(xscale="log", title=chip.partition(":")[0], xlabel="estimate / floor")
        axes.set_yticks(range(len(names)), names if axes.get_subplotspec().is_first_col() else [])
        axes.tick_params(axis="y", labelsize=7)
        axes.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(
        handles=[figure_patch("kernel", "C0"), figure_patch("XLA's reference", "C1")],
        loc="outside lower center",
        ncols=2,
    )
    page.figure(
        figure, "kernels", "Estimated times over the floor of the chip, kernel and reference."
    )


def figure_patch(label: str, color: str) -> Any:
    """An entry of a legend."""
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _blocks(record: dict[str, Any], call: dict[str, Any]) -> str:
    return record["blocks"] or ", ".join(_sizes(block) for block in call["blocks"] if block)


def _slots(slots: dict[str, float]) -> str:
    """Those of the matrix unit, and the two fullest others."""
    matrix = {name: part for name, part in slots.items() if name.startswith("MAT")}
    others = sorted((name for name in slots if name not in matrix), key=lambda n: -slots[n])[:2]
    return ", ".join(f"{name} {100 * slots[name]:.0f} %" for name in [*matrix, *others])


def _sizes(sizes: Any) -> str:
    return "x".join(str(size) for size in sizes) or "1"


def _lines(parts: Any) -> str:
    return "; ".join(parts)


def _mega(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.3g}"


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
