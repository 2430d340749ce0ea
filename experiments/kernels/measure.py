"""Times of kernels on the GPU of this machine, beside XLA's version of the reference."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np

from experiments import report
from experiments.errors import UsageError
from experiments.kernels.cases import Case

COLUMNS = ("kernel", "kernel, us", "XLA, us", "XLA / kernel", "GB/s", "TFLOP/s")
# Operands are rotated so that a run does not find them in the cache of the run before.
_ROTATED_BYTES = 512e6
_ITERATIONS = 20


def run(cases: dict[str, Case], workdir: pathlib.Path, record: str | None) -> dict[str, Any]:
    """Measures what the workdir does not hold yet; writes measured.json, a table, a figure.

    Raises:
      UsageError: there is no GPU.
    """
    import jax

    if jax.default_backend() != "gpu":
        raise UsageError(
            f"there is no GPU to measure on: JAX runs on {jax.default_backend()!r} here. Install "
            "the extra `gpu` on a machine with one, or take the variant `chips`."
        )
    device = jax.devices()[0].device_kind
    path = workdir / "measured.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    for index, (name, case) in enumerate(cases.items()):
        if name not in records:
            print(f"[{index + 1}/{len(cases)}] {name}", flush=True)
            records[name] = measure(case) | {"device": device, "jax": jax.__version__}
            report.write_json(path, records)
    page = report.Report(workdir, f"Kernels, measured on one {device}")
    page.text(
        f"Median of {_ITERATIONS} runs, time on the device only; operands are rotated through"
        f" copies of {_ROTATED_BYTES / 1e6:.0f} MB in all, so that no run finds its own in the"
        " cache. GB/s and TFLOP/s of what the task needs."
    )
    page.table(COLUMNS, [row(name, records[name]) for name in cases])
    text = page.write().read_text(encoding="utf-8")
    _draw(page, {name: records[name] for name in cases})
    page.write()
    if record:
        report.write_json(pathlib.Path(record) / "measured.json", records)
        report.write_text(pathlib.Path(record) / "measured.md", text)
    return {"measured": len(records)}


def measure(case: Case) -> dict[str, Any]:
    """Seconds of the kernel and of XLA's version of the reference, on the default device."""
    import jax

    result: dict[str, Any] = {}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(case.arguments))
    copies = [arguments(case, seed) for seed in range(int(min(_ROTATED_BYTES // size, 7)) + 1)]
    for implementation in ("gpu", "xla"):
        function = jax.jit(functools.partial(case.function, implementation=implementation))
        try:
            result[implementation] = _seconds(function, copies)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            result[implementation] = None
            result[f"{implementation}_error"] = str(error).splitlines()[0][:300]
    results = jax.eval_shape(functools.partial(case.function, implementation="xla"), *copies[0])
    needed = size + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(results))
    result["needed_bytes"] = needed if case.needed_bytes is None else case.needed_bytes
    return result | {"operations": case.operations}


def arguments(case: Case, seed: int) -> tuple[Any, ...]:
    """Arrays of the case's shapes: standard normal numbers, random bytes; given arrays as given."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            limits = jnp.iinfo(leaf.dtype)
            drawn = rng.integers(limits.min, limits.max, leaf.shape, leaf.dtype, endpoint=True)
            return jnp.asarray(drawn)
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32), leaf.dtype)

    return jax.tree.map(fill, case.arguments)


def row(name: str, record: dict[str, Any]) -> tuple[Any, ...]:
    """Of COLUMNS."""
    kernel, xla = record["gpu"], record["xla"]
    if kernel is None:
        return name, record["gpu_error"], _micro(xla), "-", "-", "-"
    return (
        name,
        _micro(kernel),
        _micro(xla),
        "-" if xla is None else f"{xla / kernel:.2f}",
        f"{record['needed_bytes'] / kernel / 1e9:.0f}",
        f"{sum(record['operations'].values()) / kernel / 1e12:.1f}",
    )


def _seconds(function: Any, copies: list[Any]) -> float:
    from jax.experimental.mosaic.gpu import profiler

    for values in copies:  # Compiles, and brings the clock up.
        function(*values)[0].block_until_ready()
    timed = profiler.measure(function)
    runs = [timed(*copies[i % len(copies)])[1] for i in range(_ITERATIONS)]
    return float(np.median(runs)) / 1e3


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _draw(page: report.Report, records: dict[str, Any]) -> None:
    done = {name: r["xla"] / r["gpu"] for name, r in records.items() if r["gpu"] and r["xla"]}
    figure, axes = report.new_figure(width=7.5, height=1.0 + 0.3 * max(len(done), 1))
    axes.barh(range(len(done)), list(done.values()))
    axes.set_yticks(range(len(done)), list(done))
    axes.tick_params(axis="y", labelsize=7)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="time of XLA / time of the kernel")
    page.figure(figure, "measured", "How many times faster than the reference by XLA.")
