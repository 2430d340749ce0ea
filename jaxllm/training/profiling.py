"""Traces of chosen training steps, for TensorBoard or xprof."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class _Wanted:
    first: int
    stop: int
    folder: pathlib.Path


_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("wanted", default=None)


@contextlib.contextmanager
def steps(first: int, stop: int, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Training loops inside trace steps first .. stop - 1 (counted from 0) into a folder.

    After the last of them a profile of the device memory (`memory.prof`, read by pprof) is written
    beside the trace.

    Raises:
      ValueError: no step lies between the two.
    """
    if not 0 <= first < stop:
        raise ValueError(f"profile steps {first}:{stop}: expected 0 <= first < stop.")
    token = _wanted.set(_Wanted(first, stop, pathlib.Path(folder)))
    try:
        yield
    finally:
        _wanted.reset(token)


class Tracer:
    """Starts and stops the trace between the steps of one loop."""

    def __init__(self) -> None:
        self._wanted = _wanted.get()
        self._running = False

    def before(self, step: int) -> None:
        """To be called before step `step` starts."""
        wanted = self._wanted
        if wanted is not None and not self._running and wanted.first <= step < wanted.stop:
            wanted.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(wanted.folder)
            self._running = True

    def after(self, done: int, results: object) -> None:
        """To be called with the number of finished steps, and what the last one computes."""
        if self._running and self._wanted is not None and done >= self._wanted.stop:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, as at the end of the loop."""
        if self._running and self._wanted is not None:
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._wanted.folder / "memory.prof"))
            self._running = False
