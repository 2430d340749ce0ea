"""Starts an experiment from a config.

    python -m experiments.launch --list
    python -m experiments.launch --config configs/pretrain.py
    python -m experiments.launch --config pretrain:tiny --config.train.steps=50 --workdir runs/short
    python -m experiments.launch --config pretrain:llama3_8b --topology=v5p:4x4x4

Writes `config.json` into the workdir, then calls `run(config, workdir)` of the experiment and
stores what it returns in `results.json`. The same command again continues an interrupted run. With
`--topology` nothing runs: the steps are compiled for that slice, and the table of memory,
operations and collectives is printed and stored in `topology.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import time
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
        return _main(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as notice:
        print(f"interrupted: {notice}", file=sys.stderr)
        return 0


def _main(argv: list[str]) -> int:
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
    argv, overrides = _split_overrides(argv)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        raise UsageError(f"unknown argument {unknown[0]!r}.{suggest(name, OPTIONS)}")
    if options.list:
        print(listing())
        return 0
    if not options.config:
        raise UsageError("give --config FILE[:VARIANT], or --list to see what there is.")
    resolved = config_files.resolve(options.config, overrides)
    name = f"{resolved.file.name}-{resolved.variant}"
    workdir = pathlib.Path(options.workdir or pathlib.Path("runs") / name)
    if options.topology:
        compiled = topology.run(options.config, overrides, options.topology)
        print(topology.table(compiled))
        print(f"wrote {topology.write(workdir, compiled)}")
        return 0
    settings = runtime.Runtime(
        compile_cache=not options.no_compile_cache,
        log_compiles=options.log_compiles,
        profile_steps=runtime.parse_steps(options.profile_steps) if options.profile_steps else None,
    )
    prepare_workdir(workdir, resolved)
    runtime.configure(settings, workdir)
    print(f"{resolved.file.name}:{resolved.variant} -> {workdir}", flush=True)
    with runtime.profiling(settings, workdir):
        results = _run(resolved, workdir)
    report.write_results(workdir, results)
    print(f"wrote {workdir / 'results.json'}")
    return 0


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

    It is overwritten where nothing else is there yet, and by one-shot experiments.

    Raises:
      UsageError: the workdir holds a run of another config; the message names the keys.
    """
    path = workdir / "config.json"
    wanted = {
        "experiment": resolved.file.name,
        "variant": resolved.variant,
        "config": config_files.to_json(resolved.config),
    }
    begun = path.exists() and any(
        entry.name not in (path.name, topology.FILE) for entry in workdir.iterdir()
    )
    if begun and not resolved.file.one_shot:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON: {error}.") from error
        there = config_files.flatten({k: found.get(k) for k in wanted})
        here = config_files.flatten(wanted)
        differ = [
            f"{key.removeprefix('config.')} ({there.get(key, 'absent')!r} there,"
            f" {here.get(key, 'absent')!r} here)"
            for key in sorted(set(there) | set(here))
            if there.get(key, "absent") != here.get(key, "absent")
        ]
        if differ:
            more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
            raise UsageError(
                f"{workdir} holds a run of another config: {'; '.join(differ[:5])}{more}. "
                "Give another --workdir, or remove that folder."
            )
        return
    report.write_json(path, wanted | {"jaxllm": jaxllm.__version__})


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
