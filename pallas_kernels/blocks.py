"""Sizes of blocks."""

from __future__ import annotations


def largest_block(size: int, most: int, least: int) -> int | None:
    """The largest `most` / 2^i, not below `least`, that divides `size`; None = there is none."""
    block = most
    while block >= least:
        if size % block == 0:
            return block
        block //= 2
    return None
