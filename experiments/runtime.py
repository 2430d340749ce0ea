"""What the launcher sets up around an experiment: compilation cache, logs, a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Iterator

from experiments.errors import UsageError

CACHE = ".jax_cache"


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Settings that act on the process and not on what is computed.

    Attributes:
      compile_cache: keep compiled programs in `.jax_cache` beside the workdir, for the next start.
      log_compiles: log every compilation.
      profile_steps: (first, stop): trace these training steps into `workdir/profile`.
    """

    compile_cache: bool = True
    log_compiles: bool = False
    profile_steps: tuple[int, int] | None = None


def parse_steps(text: str) -> tuple[int, int]:
    """Steps of `--profile_steps=START:STOP`.

    Raises:
      UsageError: not two whole numbers, or none between them.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise UsageError(
            f"--profile_steps={text}: expected START:STOP with START below STOP, as in 10:13."
        )
    return int(found[1]), int(found[2])


def configure(runtime: Runtime, workdir: pathlib.Path) -> None:
    """Acts on jax, before any device is used. An unwritable cache is a warning, no error."""
    import jax

    if runtime.log_compiles:
        jax.config.update("jax_log_compiles", True)
    # Whoever named a folder themselves keeps theirs.
    if runtime.compile_cache and not jax.config.values["jax_compilation_cache_dir"]:
        folder = workdir.absolute().parent / CACHE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} is not writable")
        except OSError as error:
            print(f"warning: no compilation cache: {error}", file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))


@contextlib.contextmanager
def profiling(runtime: Runtime, workdir: pathlib.Path) -> Iterator[None]:
    """Makes training loops inside trace the chosen steps into `workdir/profile`."""
    if runtime.profile_steps is None:
        yield
        return
    from jaxllm.training import profiling as profiler

    with profiler.steps(*runtime.profile_steps, workdir / "profile"):
        yield
