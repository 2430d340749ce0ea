"""Timing of several sides that take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def take_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, by side; call each side once before, so that nothing compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds
