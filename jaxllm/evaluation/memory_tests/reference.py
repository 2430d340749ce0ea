"""The deterministic core of the tasks: positions, edits and groups of a list of items."""

from __future__ import annotations

from collections.abc import Sequence


def depth_index(length: int, depth: float) -> int:
    """Position at a relative depth in [0, 1]; depth 1 is the last item."""
    if length < 1 or not 0 <= depth <= 1:
        raise ValueError(f"length={length}, depth={depth}: expected length >= 1, depth in [0, 1].")
    return min(int(length * depth), length - 1)


def spread(length: int, count: int) -> list[int]:
    """`count` >= 2 positions spread over the list, the last forced to its end."""
    return [*(int(length / (count - 1) * i) for i in range(count - 1)), length - 1]


def overwrite_nth(items: Sequence[str], nth: int, word: str) -> list[str]:
    """The 1-based positions nth, 2 nth, ... become `word`."""
    return [word if i % nth == 0 else item for i, item in enumerate(items, 1)]


def skip_nth(items: Sequence[str], nth: int) -> list[str]:
    """Without the 1-based positions nth, 2 nth, ..."""
    return [item for i, item in enumerate(items, 1) if i % nth]


def functional_update(numbers: Sequence[int], operation: str) -> list[int]:
    """Every number plus 3 ("add"), minus 1 ("subtract") or times 2 ("multiply")."""
    updates = {"add": lambda x: x + 3, "subtract": lambda x: x - 1, "multiply": lambda x: x * 2}
    if operation not in updates:
        raise ValueError(f"operation={operation!r}: expected one of {tuple(updates)}.")
    return [updates[operation](number) for number in numbers]


def deal(items: Sequence[str], groups: int) -> list[list[str]]:
    """List i gets the items i, i + groups, i + 2 groups, ..."""
    return [list(items[i::groups]) for i in range(groups)]


def role_segments(items: Sequence[str], roles: int, turns: int) -> list[list[list[str]]]:
    """[role][turn] -> words: equal contiguous blocks of roles, each cut into equal turns."""
    block = len(items) // roles
    size = block // turns
    if not size:
        raise ValueError(f"{len(items)} words are too few for {roles} roles in {turns} turns.")
    return [
        [list(items[r * block + t * size : r * block + (t + 1) * size]) for t in range(turns)]
        for r in range(roles)
    ]


def compared_words(items: Sequence[str], first: float, second: float) -> tuple[str, str, bool]:
    """Words at two depths and whether the first precedes; equal depths take neighbours."""
    i, j = depth_index(len(items), first), depth_index(len(items), second)
    if i == j:
        j = i + 1
        if j == len(items):
            i, j = i - 1, i
    return items[i], items[j], i < j


def patch(pattern: Sequence[str], repeats: int, start: float, nth: int) -> tuple[list[str], str]:
    """A repeated pattern with a partial one after it, and the nth word that would follow.

    Args:
      start: 0 = one word of the partial pattern, 0.5 = its first half, 1 = none.
      nth: counted from 1.
    """
    extra = {0: 1, 0.5: len(pattern) // 2, 1: 0}[start]
    context = [*pattern] * repeats + [*pattern[:extra]]
    return context, pattern[(extra + nth - 1) % len(pattern)]
