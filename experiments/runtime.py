"""What the launcher sets up around an experiment: processes, compilation cache, logs, a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar

from experiments.errors import UsageError

T = TypeVar("T")

CACHE = ".jax_cache"


@dataclasses.dataclass(frozen=True)
class Processes:
    """Where this process finds the others of its run; the defaults: there are none.

    Attributes:
      detect: JAX finds them by itself.
      coordinator, num_processes, process_id: or all three are given; see
        `jaxllm.training.distributed.initialize`.
      peer_timeout: seconds without a sign of life after which a process is dead; None = the
        default.
    """

    detect: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    peer_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.detect and self._given:
            raise UsageError(
                "--distributed finds the processes by itself: leave out --coordinator, "
                "--num_processes and --process_id, or leave out --distributed."
            )
        if self.peer_timeout is not None and (self.peer_timeout < 1 or not self.several):
            raise UsageError(
                f"--peer_timeout={self.peer_timeout}: expected a positive number of seconds, for a "
                "run of several processes."
            )

    @property
    def several(self) -> bool:
        return self.detect or self._given

    @property
    def _given(self) -> bool:
        return (self.coordinator, self.num_processes, self.process_id) != (None, None, None)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Settings that act on the process and not on what is computed.

    Attributes:
      compile_cache: keep compiled programs in `.jax_cache` beside the workdir, for the next start.
      log_compiles: log every compilation.
      profile_steps: (first, stop): trace these training steps into `workdir/profile`.
      processes: the others of the run.
    """

    compile_cache: bool = True
    log_compiles: bool = False
    profile_steps: tuple[int, int] | None = None
    processes: Processes = Processes()


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


def join(processes: Processes) -> None:
    """Joins the processes of a run, if there are several, before any device is used.

    From then on only the first prints; the others write to stderr, with their number before every
    line.

    Raises:
      UsageError: they cannot be joined.
    """
    if not processes.several:
        return
    import jax

    from jaxllm.training import distributed

    if processes.process_id == 0:
        print(f"waiting for {processes.num_processes} processes", flush=True)
    try:
        distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            peer_timeout=processes.peer_timeout or distributed.PEER_TIMEOUT,
        )
    except distributed.ClusterError as error:
        raise UsageError(str(error)) from error
    if jax.process_index() != 0:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = _Prefixed(sys.stderr, f"process {jax.process_index()}: ")  # type: ignore


class _Prefixed:
    """A stream with a prefix before every line."""

    def __init__(self, stream: TextIO, prefix: str):
        self._stream, self._prefix, self._fresh = stream, prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(self._prefix + line if self._fresh else line)
            self._fresh = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


def joined() -> bool:
    """Whether this is one of several processes."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    if not joined():
        return True
    import jax

    return jax.process_index() == 0


def on_first(function: Callable[[], Any]) -> Any:
    """The JSON value of a function that only the first process calls, on all.

    Raises:
      UsageError: on the others, where it raised on the first.
    """
    if not joined():
        return function()
    from jaxllm.training import distributed

    try:
        return distributed.on_first(function)
    except distributed.FirstProcessError as error:
        raise UsageError(str(error)) from error


def gather(value: Any) -> list[Any]:
    """A JSON value of every process, on all."""
    if not joined():
        return [value]
    from jaxllm.training import distributed

    return distributed.gather(value)


def first_then_all(function: Callable[[], T]) -> T:
    """Calls a function on the first process, and when it is done there on the others.

    For what leaves files that the next call finds, such as a token cache.

    Raises:
      UsageError: on the others, where it raised on the first.
    """
    mine: list[T] = []
    on_first(lambda: mine.append(function()))
    return mine[0] if mine else function()


def leave(status: int) -> None:
    """Ends a failed process of several without waiting for those that go on."""
    if joined():
        from jaxllm.training import distributed

        distributed.leave(status)


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
    """Makes training loops inside (of the first process) trace the chosen steps into
    `workdir/profile`.
    """
    if runtime.profile_steps is None or not is_first():
        yield
        return
    from jaxllm.training import profiling as profiler

    with profiler.steps(*runtime.profile_steps, workdir / "profile"):
        yield
