"""Starts an experiment from a config.

    python -m experiments.launch --list
    python -m experiments.launch --config configs/pretrain.py
    python -m experiments.launch --config pretrain:tiny --config.train.steps=50 --workdir runs/short
    python -m experiments.launch --config pretrain:llama3_8b --topology=v5p:4x4x4
    python -m experiments.launch --config pretrain:llama3_8b --distributed

Writes `config.json` into the workdir, then calls `run(config, workdir)` of the experiment and
stores what it returns in `results.json`. The same command again continues an interrupted run. With
`--topology` nothing runs: the steps are compiled for that slice, and the table of memory,
operations and collectives is printed and stored in `topology.json`.

On several hosts start the same command on each: with `--distributed` the processes find each other
on TPU VMs and GKE, in SLURM steps, Kubernetes jobs and under Open MPI; elsewhere give each
`--coordinator=HOST:PORT --num_processes=N --process_id=I`. All of them must see the workdir. The
first process prints and writes; the others print errors and warnings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxllm
from experiments import config_files, report, runtime, topology
from experiments.errors import Interrupted, UsageError, suggest
from jaxllm.compilation import topology as topologies

OPTIONS = (
    "--config",
    "--workdir",
    "--list",
    "--topology",
    "--profile_steps",
    "--log_compiles",
    "--no_compile_cache",
    "--distributed",
    "--coordinator",
    "--num_processes",
    "--process_id",
    "--peer_timeout",
    "--help",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message[0].upper() + message[1:] + ".")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for a usage error.

    A run that was asked to end (SIGTERM: preemption) and has saved ends with 0.
    """
    try:
        _main(sys.argv[1:] if argv is None else list(argv))
        return 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except Interrupted as notice:
        print(f"interrupted: {notice}", file=sys.stderr)
        return 0
    except BaseException:
        if not runtime.joined():
            raise
        traceback.print_exc()
        status = 1
    runtime.leave(status)
    return status


def _main(argv: list[str]) -> None:
    parser = _Parser(
        prog="experiments.launch",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE[:VARIANT]", help="a config file or its name")
    parser.add_argument("--workdir", help="where to write (default: runs/NAME-VARIANT)")
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")
    parser.add_argument(
        "--topology",
        metavar="CHIP:SHAPE",
        help=f"compile only, for hardware that is not there ({topologies.EXAMPLES})",
    )
    parser.add_argument(
        "--profile_steps",
        metavar="START:STOP",
        help="trace these training steps into WORKDIR/profile (for TensorBoard or xprof)",
    )
    parser.add_argument("--log_compiles", action="store_true", help="log every compilation")
    parser.add_argument(
        "--no_compile_cache",
        action="store_true",
        help=f"keep no compiled programs (default: {runtime.CACHE} beside the workdir)",
    )
    parser.add_argument(
        "--distributed", action="store_true", help="one of several processes, found by JAX"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the first of the processes")
    parser.add_argument("--num_processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process_id", type=int, metavar="I", help="this one's place, from 0")
    parser.add_argument(
        "--peer_timeout",
        type=int,
        metavar="SECONDS",
        help="without a sign of life, after which a process is dead and ends the others",
    )
    argv, overrides = _split_overrides(argv)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        raise UsageError(f"unknown argument {unknown[0]!r}.{suggest(name, OPTIONS)}")
    if options.list:
        print(listing())
        return
    if not options.config:
        raise UsageError("give --config FILE[:VARIANT], or --list to see what there is.")
    resolved = config_files.resolve(options.config, overrides)
    name = f"{resolved.file.name}-{resolved.variant}"
    workdir = pathlib.Path(options.workdir or pathlib.Path("runs") / name)
    if options.topology:
        compiled = topology.run(options.config, overrides, options.topology)
        print(topology.table(compiled))
        print(f"wrote {topology.write(workdir, compiled)}")
        return
    settings = runtime.Runtime(
        compile_cache=not options.no_compile_cache,
        log_compiles=options.log_compiles,
        profile_steps=runtime.parse_steps(options.profile_steps) if options.profile_steps else None,
        processes=runtime.Processes(
            options.distributed,
            options.coordinator,
            options.num_processes,
            options.process_id,
            options.peer_timeout,
        ),
    )
    if settings.processes.several and not resolved.file.multi_process:
        raise UsageError(f"{resolved.file.name} runs on one process only.")
    runtime.join(settings.processes)
    runtime.configure(settings, workdir)
    prepare_workdir(workdir, resolved)
    print(f"{resolved.file.name}:{resolved.variant} -> {workdir}", flush=True)
    with runtime.profiling(settings, workdir):
        results = _run(resolved, workdir)
    if runtime.is_first():
        report.write_results(workdir, results)
        print(f"wrote {workdir / 'results.json'}")


def _split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Takes `--config.key=value` and `--config.key value` out of the arguments."""
    rest: list[str] = []
    overrides: list[str] = []
    for token in argv:
        if token.startswith("--config."):
            overrides.append(token.removeprefix("--config."))
        elif overrides and "=" not in overrides[-1] and not token.startswith("--"):
            overrides[-1] += f"={token}"
        else:
            rest.append(token)
    return rest, overrides


def listing() -> str:
    """A table of the experiments: name, variant, what it is."""
    rows = []
    for path in config_files.available().values():
        file = config_files.describe(path)
        paper = f" ({file.paper})" if file.paper else ""
        rows.append((file.name, "", file.summary + paper))
        rows += [("", variant, text) for variant, text in file.variants.items()]
    widths = [max(len(row[i]) for row in rows + [("experiment", "variant")]) for i in (0, 1)]
    lines = [("experiment", "variant", "what"), ("-" * widths[0], "-" * widths[1], "----"), *rows]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in lines)


def prepare_workdir(workdir: pathlib.Path, resolved: config_files.Resolved) -> None:
    """Writes config.json, or checks that the one there is the same.

    It is overwritten where nothing else is there yet, by one-shot experiments, and where only the
    mesh differs: a run may go on on other devices. With several processes the first does this, for
    all that were started with the same config and see the same workdir.

    Raises:
      UsageError: the workdir holds a run of another config, or a process was started with another
        one than the first (the message names the keys), or they do not share the workdir.
    """
    wanted = {
        "experiment": resolved.file.name,
        "variant": resolved.variant,
        "config": config_files.to_json(resolved.config),
    }
    for process, other in enumerate(every := runtime.gather(wanted)):
        if differ := _differences(every[0], other):
            raise UsageError(
                f"process {process} was started with another config than process 0: {differ}."
            )
    written = runtime.on_first(lambda: _claim(workdir, resolved, wanted))
    path = workdir / "config.json"
    deadline = time.monotonic() + 30  # network file systems show new files late
    while not (seen := _holds(path, written)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if blind := [process for process, sees in enumerate(runtime.gather(seen)) if not sees]:
        raise UsageError(
            f"process {blind[0]} does not see {path} as process 0 has written it: --workdir must "
            "lie on a file system that all processes share."
        )


def _holds(path: pathlib.Path, value: dict[str, Any]) -> bool:
    return path.exists() and json.loads(path.read_text(encoding="utf-8")) == value


def _claim(
    workdir: pathlib.Path, resolved: config_files.Resolved, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Writes config.json or refuses to; returns what it holds."""
    path = workdir / "config.json"
    begun = path.exists() and any(
        entry.name not in (path.name, topology.FILE) for entry in workdir.iterdir()
    )
    if begun and not resolved.file.one_shot:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON: {error}.") from error
        if differ := _differences(found, wanted, ignore=("config.mesh.",)):
            raise UsageError(
                f"{workdir} holds a run of another config: {differ}. "
                "Give another --workdir, or remove that folder."
            )
        if not _differences(found, wanted):
            return found
    written = wanted | {"jaxllm": jaxllm.__version__}
    report.write_json(path, written)
    return written


def _differences(
    found: dict[str, Any], wanted: dict[str, Any], ignore: tuple[str, ...] = ()
) -> str:
    """The keys that differ, with both values; "" if none does."""
    there = config_files.flatten({k: found.get(k) for k in wanted})
    here = config_files.flatten(wanted)
    differ = [
        f"{key.removeprefix('config.')} ({there.get(key, 'absent')!r} there,"
        f" {here.get(key, 'absent')!r} here)"
        for key in sorted(set(there) | set(here))
        if there.get(key, "absent") != here.get(key, "absent") and not key.startswith(ignore)
    ]
    more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
    return "; ".join(differ[:5]) + more


def _run(resolved: config_files.Resolved, workdir: pathlib.Path) -> dict[str, Any]:
    # Libraries with absl flags (grain's workers) refuse to start before flags are parsed.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    module = importlib.import_module(resolved.file.experiment)
    start = time.monotonic()
    results = module.run(resolved.config, workdir)
    print(f"took {time.monotonic() - start:.0f} s")
    return results


if __name__ == "__main__":
    sys.exit(main())
