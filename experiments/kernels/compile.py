"""Compiles one case of the kernel report for one chip; run in an environment made for it.

python -m experiments.kernels.compile OUT TOPOLOGY CASE BLOCKS    BLOCKS: a number, or "" = chosen
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from experiments.errors import UsageError
from jaxllm.compilation import topology as topologies
from jaxllm.compilation import tpu_schedule


def compile_case(case: str, topology: str, blocks: int | None = None) -> dict[str, Any]:
    """Compiles the kernel and XLA's version of the reference in a new process.

    Args:
      case: its name.
      topology: name of one device.
      blocks: which of the case's own sizes of blocks; None = those that the kernel chooses.

    Returns:
      A record; where the compiler refuses, only {"error": why}.

    Raises:
      UsageError: an unknown topology, or its compiler is missing.
    """
    try:
        parsed = topologies.parse(topology)
        environment = topologies.environment(parsed, os.environ)
    except topologies.TopologyError as error:
        raise UsageError(str(error)) from error
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        schedules = folder / "schedules"
        schedules.mkdir()
        flags = [environment.get("LIBTPU_INIT_ARGS", ""), tpu_schedule.dump_flags(schedules)]
        command = [sys.executable, "-m", "experiments.kernels.compile", name, topology, case]
        done = subprocess.run(
            [*command, "" if blocks is None else str(blocks)],
            env=environment
            | {
                "LIBTPU_INIT_ARGS": " ".join(filter(None, flags)),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
        )
        written = folder / "record.json"
        if done.returncode or not written.exists():
            return {"error": _reason(done.stderr)}
        return json.loads(written.read_text())


def _reason(text: str) -> str:
    """The last line of a traceback that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "EXHAUSTED" in line or "Oom" in line]
    return ((said or lines or ["it ended without a word"])[-1])[:300]


def _compile(folder: pathlib.Path, topology: str, name: str, blocks: int | None) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from experiments.kernels import cases
    from jaxllm.compilation import analysis, gpu_resources, kernels

    parsed = topologies.parse(topology)
    chip = parsed.chip
    devices = topologies.devices(parsed)[: chip.devices_per_chip]
    mesh = Mesh(np.array(devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec())
    case = cases.cases()[name]
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), case.arguments
    )
    platform = "tpu" if chip.platform == "tpu" else "gpu"
    options = {} if blocks is None else {"blocks": case.blocks[blocks]}
    kernel = functools.partial(case.function, implementation=platform, **options)
    with jax.set_mesh(mesh):
        traced, results = jax.make_jaxpr(kernel)(*arguments), jax.eval_shape(kernel, *arguments)
        (folder / "kernel").mkdir()
        steps = {
            "kernel": analysis.compile_step(_lower(kernel, arguments), chip, folder / "kernel")
        }
        if blocks is None:
            reference = functools.partial(case.function, implementation="xla")
            steps["xla"] = analysis.compile_step(_lower(reference, arguments), chip)
    calls = kernels.calls(traced)
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments, results)))
    record = {
        "operation": case.operation,
        "shape": case.shape,
        "topology": topology,
        "blocks": None if blocks is None else str(case.blocks[blocks]),
        "jax": jax.__version__,
        "operations": case.operations,
        "needed_bytes": needed if case.needed_bytes is None else case.needed_bytes,
        "calls": [dataclasses.asdict(call) | {"steps": call.steps} for call in calls],
    }
    for name, step in steps.items():
        record[name] = {
            "fits": step.memory.fits,
            "bytes": step.xla_bytes,
            "temporaries": step.memory.temporaries,
            "cycles": step.summary.cycles if step.summary else None,
            "compile_seconds": step.compile_seconds,
        }
    found: dict[str, Any] = (
        tpu_schedule.schedules(folder / "schedules")
        if platform == "tpu"
        else gpu_resources.resources(folder / "kernel")
    )
    return record | {"code": {call.name: dataclasses.asdict(found[call.name]) for call in calls}}


def _lower(function: Callable[..., Any], arguments: Any) -> Any:
    import jax

    return jax.jit(function).lower(*arguments)


if __name__ == "__main__":
    _out, _topology, _case, _blocks = sys.argv[1:]
    _record = _compile(pathlib.Path(_out), _topology, _case, int(_blocks) if _blocks else None)
    (pathlib.Path(_out) / "record.json").write_text(json.dumps(_record))
