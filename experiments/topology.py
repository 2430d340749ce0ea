"""Compiles the steps of a config for a TPU slice or for GPUs that are not there.

    python -m experiments.launch --config configs/pretrain.py:llama3_8b --topology=v5p:4x4x4

An experiment takes part by a function `lower_steps(config, mesh) -> {name: jax.stages.Lowered}`;
with `step_work(config) -> {name: analysis.Work}` beside it, the table also has operations a token.
The compilation runs in a process of its own, because the compiler is chosen by the environment that
jax is imported in. `topology.json` is all that is written.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from experiments import config_files, report
from experiments.errors import UsageError
from jaxllm.compilation import topology as topologies

FILE = "topology.json"
HOOK = "lower_steps"


def run(spec: str, overrides: Sequence[str], topology: str) -> dict[str, Any]:
    """Compiles in a new process, prints what it says and returns it.

    Args:
      spec: a config as the launcher takes it, `file[:variant]`.
      overrides: `key=value` for the config.
      topology: name of the slice.

    Raises:
      UsageError: a bad name, a missing compiler, an experiment without steps, or a config or mesh
        that does not fit.
    """
    resolved = config_files.resolve(spec, overrides)
    if not has_hook(resolved.file.experiment):
        able = [n for n, p in config_files.available().items() if _able(p)]
        raise UsageError(
            f"{resolved.file.name} names no steps to compile for a topology: it has no {HOOK}."
            f" Experiments that have: {', '.join(able) or 'none'}."
        )
    try:
        environment = topologies.environment(topologies.parse(topology), os.environ)
    except topologies.TopologyError as error:
        raise UsageError(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "experiments.topology", str(out), topology, spec]
        done = subprocess.run(
            [*command, *overrides],
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode == 2:
            raise UsageError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise RuntimeError(f"compiling for {topology} failed (status {done.returncode}).")
        return json.loads(out.read_text())


def write(workdir: pathlib.Path, result: dict[str, Any]) -> pathlib.Path:
    """Writes `topology.json` into the workdir, and nothing else."""
    path = workdir / FILE
    report.write_json(path, result)
    return path


def has_hook(module: str) -> bool:
    """Whether a module defines `lower_steps`, read without importing it."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(pathlib.Path(spec.origin).read_text(encoding="utf-8"))
    except (ModuleNotFoundError, AttributeError, OSError, SyntaxError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == HOOK for node in tree.body)


def _able(path: pathlib.Path) -> bool:
    try:
        return has_hook(config_files.describe(path).experiment)
    except UsageError:
        return False


def compile_config(spec: str, overrides: Sequence[str], name: str) -> dict[str, Any]:
    """Compiles all steps of a config; to be called in an environment made for the topology."""
    import jax

    from jaxllm.compilation import analysis
    from jaxllm.training import sharding

    topology = topologies.parse(name)
    resolved = config_files.resolve(spec, overrides)
    config, module = resolved.config, importlib.import_module(resolved.file.experiment)
    try:
        devices = topologies.devices(topology)
        sizes = config.mesh.to_dict() if "mesh" in config else {}
        mesh = sharding.create_mesh(sharding.MeshConfig(**sizes), devices)
        work = module.step_work(config) if hasattr(module, "step_work") else {}
        lowered = getattr(module, HOOK)(config, mesh)
    except (ValueError, NotImplementedError) as error:
        # The second: a mesh that no layout of the slice gives.
        raise UsageError(str(error)) from error
    steps = {}
    for step_name, program in lowered.items():
        print(
            f"compiling {step_name} for {topology.num_devices} x {topology.chip.name}", flush=True
        )
        step = analysis.compile_step(program, topology.chip)
        steps[step_name] = _step_json(step, work.get(step_name), topology)
    return {
        "experiment": resolved.file.name,
        "variant": resolved.variant,
        "overrides": list(overrides),
        "topology": topology.name,
        "devices": topology.num_devices,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "hbm_bytes": topology.chip.hbm_bytes,
        "jax": jax.__version__,
        "steps": steps,
    }


def _step_json(step: Any, work: Any, topology: topologies.Topology) -> dict[str, Any]:
    import dataclasses

    from jaxllm.compilation import analysis

    devices, memory = topology.num_devices, step.memory
    tokens = work.tokens / devices if work else None
    summary = step.summary
    return {
        "params": work.params if work else None,
        "tokens": work.tokens if work else None,
        "memory": dataclasses.asdict(memory) | {"fits": memory.fits, "spare": memory.spare},
        "flops_per_token": work.flops_per_token if work else None,
        "xla_flops_per_token": step.xla_flops / tokens if work and step.xla_flops else None,
        "hlo_flops_per_token": summary.flops / tokens if work and summary else None,
        "collectives": summary.by_kind() if summary else None,
        "loops_counted_once": summary.unknown_loops if summary else None,
        "xla_optimal_seconds": step.xla_optimal_seconds,
        "estimates": analysis.times(step, work, topology.chip, devices),
        "compile_seconds": step.compile_seconds,
        "advice": analysis.advice(memory, work, devices),
        "note": step.note,
    }


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    from jaxllm.compilation.analysis import gigabytes

    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items()) or "one device"
    lines = [
        f"{result['experiment']}:{result['variant']} on {result['topology']}"
        f" ({result['devices']} devices, {mesh}), jax {result['jax']}"
    ]
    for name, step in result["steps"].items():
        memory, estimates = step["memory"], step["estimates"]
        verdict = "fits" if memory["fits"] else "DOES NOT FIT"
        over = "spare" if memory["fits"] else "too much"
        rows = [
            ("parameters", _count(step["params"])),
            ("tokens a step", _count(step["tokens"])),
            ("arguments a device", gigabytes(memory["arguments"])),
            (
                "outputs a device",
                f"{gigabytes(memory['outputs'])} ({gigabytes(memory['aliased'])} in place)",
            ),
            ("temporaries a device", gigabytes(memory["temporaries"])),
            (
                "peak a device",
                f"{gigabytes(memory['needed'])} of {gigabytes(memory['available'])}: {verdict},"
                f" {gigabytes(abs(memory['spare']))} {over}",
            ),
            ("operations a token, of the method", _count(step["flops_per_token"])),
            ("  matrix products in the program", _count(step["hlo_flops_per_token"])),
            ("  XLA's count, loop bodies once", _count(step["xla_flops_per_token"])),
            ("compiled in", f"{step['compile_seconds']:.0f} s"),
            (
                "XLA's optimal time, loop bodies once",
                _seconds(step["xla_optimal_seconds"]),
            ),
            ("time at peak, all loops: products", _seconds(estimates["compute_seconds"])),
            ("  bytes sent", _seconds(estimates["collective_seconds"])),
            ("  XLA's cycles", _seconds(estimates["cycle_seconds"])),
            ("utilisation (MFU) at most", _percent(estimates["mfu_bound"])),
            ("  with XLA's cycles", _percent(estimates["mfu_estimate"])),
        ]
        lines += ["", f"{name}:"] + [f"  {label:38}{value}" for label, value in rows]
        if step["collectives"]:
            once = step["loops_counted_once"]
            lines.append("  collectives of a step" + (f" ({once} loops counted once)" * bool(once)))
            lines += [
                f"    {kind:36}{row['count']:>6} x, {gigabytes(row['bytes'])},"
                f" sent by a device {gigabytes(row['sent_bytes'])}"
                for kind, row in step["collectives"].items()
            ]
        lines += [f"  change: {text}" for text in step["advice"]]
        lines += [f"  note: {step['note']}"] * bool(step["note"])
    return "\n".join(lines)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def main(argv: Sequence[str]) -> int:
    """The process that compiles: OUT TOPOLOGY CONFIG [key=value ...]."""
    out, name, spec, *overrides = argv
    try:
        result = compile_config(spec, overrides, name)
    except UsageError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    report.write_json(pathlib.Path(out), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
