"""Compiles kernels for chips that need not be there and sets them against the chips' limits."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections

from experiments import report
from experiments.errors import UsageError
from experiments.kernels import cases, compile, measure, tables


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Compiles (or measures) what the workdir does not hold yet; writes kernels.json, a report.

    Raises:
      UsageError: no case has `only` in its name; a compiler is missing; nothing to measure on.
    """
    chosen = {name: case for name, case in cases.cases().items() if config.only in name}
    if not chosen:
        raise UsageError(f"only={config.only!r} is in no case: {', '.join(cases.cases())}.")
    if config.measure:
        return measure.run(chosen, workdir, config.record)
    path = workdir / "kernels.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    wanted = list(_wanted(config, chosen))
    for index, (key, case, topology, blocks) in enumerate(wanted):
        if key in records and "error" not in records[key]:
            continue
        print(f"[{index + 1}/{len(wanted)}] {key}", flush=True)
        records[key] = compile.compile_case(case, topology, blocks)
        if error := records[key].get("error"):
            print(f"    {error}", flush=True)
        report.write_json(path, records)
    records = {key: records[key] for key, *_ in wanted}
    page = _report(workdir, records)
    if config.record:
        folder = pathlib.Path(config.record)
        report.write_json(folder / "kernels.json", records)
        report.write_text(folder / "kernels.md", page)
    failed = [key for key, record in records.items() if "error" in record]
    return {"compiled": len(records) - len(failed), "failed": failed}


def _wanted(
    config: ml_collections.ConfigDict, chosen: dict[str, cases.Case]
) -> Iterator[tuple[str, str, str, int | None]]:
    """(key, case, topology, blocks) of all that is to be compiled."""
    for name, case in chosen.items():
        for topology in config.topologies:
            yield f"{name}; {topology}", name, topology, None
            for index in range(len(case.blocks) if config.rank else 0):
                yield f"{name}; {topology}; {case.blocks[index]}", name, topology, index


def _report(workdir: pathlib.Path, records: dict[str, Any]) -> str:
    page = report.Report(workdir, "Kernels, compiled ahead of time")
    page.text(
        "What the compilers say; nothing ran. Floor: bytes that must be read and written at the"
        " chip's bandwidth, or operations at the peak of their type, whichever is longer. Kernel:"
        " bundles of instructions times steps of the grid at the clock, or the bytes of the whole"
        " program at the bandwidth; it knows no waiting for memory, and counts both arms of a"
        " condition. XLA: the compiler's cycles, or bytes, for the plain JAX reference."
    )
    done = [record for record in records.values() if "error" not in record]
    on_tpu = [record for record in done if record["topology"] != "h200"]
    on_gpu = [record for record in done if record["topology"] == "h200"]
    if on_tpu:
        page.heading("TPU")
        # The ones of a case beside each other, the fastest first.
        order = {(r["operation"], r["shape"], r["topology"]): i for i, r in enumerate(on_tpu)}
        on_tpu.sort(
            key=lambda r: (
                order[r["operation"], r["shape"], r["topology"]],
                tables.times(r)["kernel"],
            )
        )
        page.table(tables.TPU_COLUMNS, map(tables.tpu_row, on_tpu))
    if on_gpu:
        page.heading("H200")
        page.table(tables.GPU_COLUMNS, map(tables.gpu_row, on_gpu))
    failed = [(key, r["error"]) for key, r in records.items() if "error" in r]
    if failed:
        page.heading("Refused by the compiler")
        page.table(("case", "why"), failed)
    # What is recorded beside the code is the tables.
    text = page.write().read_text(encoding="utf-8")
    chosen = [record for record in on_tpu if record["blocks"] is None]
    if chosen:
        tables.draw(page, chosen)
        page.write()
    return text
