"""Notices that the process is asked to end, so that a run can save before it does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """Whether SIGTERM has come. All processes of a run get the same answer for the same step."""

    def __init__(self) -> None:
        self._raised = threading.Event()

    def request(self) -> None:
        """Acts as if the signal had come (single process)."""
        self._raised.set()

    def reached(self, step: int) -> bool:
        """Whether to stop before `step`.

        With several processes JAX's preemption service, which listens for SIGTERM, agrees on a
        step.
        """
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._raised.is_set()


@contextlib.contextmanager
def listening() -> Iterator[Interrupt]:
    """Catches SIGTERM inside; the handler of before comes back afterwards.

    Outside the main thread, where Python does not allow it, and with several processes, where JAX
    listens, no handler is set.
    """
    interrupt = Interrupt()
    main = threading.current_thread() is threading.main_thread()
    if not main or jax.process_count() > 1:
        yield interrupt
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: interrupt.request())
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
