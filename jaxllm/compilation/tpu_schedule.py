"""Schedules of kernels, as the compiler of a TPU writes them down.

The code of a kernel's step is packed into bundles of instructions, of which about one is issued in
a cycle. Bundles times steps is a floor of the kernel's time on a core. It knows nothing of waiting
for memory, counts both branches of a condition, and a loop inside of the step once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np

# Of "final_bundles" the count would be too low: waiting is folded into other instructions there.
_SCHEDULE = re.compile(r"(\d+-(.+?)(?:\.\d+)?-)\d+-schedule-analysis_packed-bundles-post-ra\.txt")
_SLOTS = "*-final_hlo-static-per-bundle-utilization.txt"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The code of one step.

    Attributes:
      bundles: of instructions.
      slots: {unit: part of the bundles' slots that is used}, "MATMUL", "VALU", "VLOAD" and so on.
    """

    bundles: int
    slots: dict[str, float]


def dump_flags(folder: pathlib.Path) -> str:
    """For LIBTPU_INIT_ARGS, before jax is imported: what `schedules` reads is written there."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def schedules(folder: pathlib.Path) -> dict[str, Schedule]:
    """By name, of all kernels (and other fusions) that were compiled with `dump_flags(folder)`."""
    found = {}
    for path in sorted(folder.iterdir()):
        if not (match := _SCHEDULE.fullmatch(path.name)):
            continue
        bundles = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
        if bundles:
            written = [p for p in folder.glob(_SLOTS) if p.name.startswith(match.group(1))]
            slots = _slots(written[0].read_text()) if written else {}
            found[match.group(2)] = Schedule(int(bundles.group(1)), slots)
    return found


def _slots(text: str) -> dict[str, float]:
    """Of a table: names, how many slots a bundle has, then how many are used, a line a bundle."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    capacity = np.array(lines[2].split(), float)
    used = np.array([line.split() for line in lines[4:] if line.strip()], float)
    return dict(zip(names, (used.mean(axis=0) / capacity).tolist(), strict=True))
