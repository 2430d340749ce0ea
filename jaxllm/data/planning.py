"""Which pieces of which documents make up a row: arithmetic on lengths, no tokens touched.

A document of n tokens gives n - 1 positions: token i is the input and token i + 1 its target. The
last token (the end of text) is only ever a target, the first only an input, so nothing is
wasted where documents meet. A `Plan` lays the positions of one epoch out in rows of T.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jaxllm.data.errors import DataError
from jaxllm.data.files import canonical_json

PACKINGS = ("concat", "first_fit", "pad")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Consecutive positions of single documents, sorted by row.

    Attributes:
      row: int64 [pieces], which of the rows asked for.
      start: int64 [pieces], index of the first input in the flat token array.
      length: int64 [pieces], number of positions.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of one epoch.

    Attributes:
      num_rows: how many.
      starts: int64 [documents], where each document begins in the flat token array, in the order
        of this plan.
      bounds: int64 [documents + 1]. Concatenated: the position at which each document begins.
        Whole documents: the index of the first document of each row, [rows + 1].
      lengths: int64 [documents], positions of each document that are used.
      order: int64 [rows], the row of the layout that stands at each place.
      row_length: T.
      whole: whole documents a row, or a concatenation cut every T positions.
      truncated: documents of which some positions are left out.
    """

    num_rows: int
    starts: np.ndarray
    bounds: np.ndarray
    lengths: np.ndarray
    order: np.ndarray
    row_length: int
    whole: bool
    truncated: int = 0

    def pieces(self, rows: np.ndarray) -> Pieces:
        """Pieces of some rows, int64 [rows] of 0..num_rows-1; `Pieces.row` counts along `rows`."""
        rows = self.order[rows]
        if self.whole:
            first, last = self.bounds[rows], self.bounds[rows + 1]
            row, document = _ranges(first, last)
            return Pieces(row, self.starts[document], self.lengths[document])
        begin = rows * self.row_length
        end = np.minimum(begin + self.row_length, self.bounds[-1])
        first = np.searchsorted(self.bounds, begin, side="right") - 1
        last = np.searchsorted(self.bounds, end, side="left")
        row, document = _ranges(first, last)
        low = np.maximum(self.bounds[document], begin[row])
        high = np.minimum(self.bounds[document + 1], end[row])
        return Pieces(row, self.starts[document] + (low - self.bounds[document]), high - low)


def make_plan(
    offsets: np.ndarray, row_length: int, packing: str, seed: int, epoch: int, shuffle: bool
) -> Plan:
    """Plans an epoch; the same arguments give the same plan, on every machine.

    Args:
      offsets: int64 [documents + 1] of the flat token array; documents have two tokens or more.
      row_length: positions a row, T.
      packing: "concat" (documents one after the other, cut every T positions), "first_fit" (whole
        documents, each in the first row with room, cut to T positions), or "pad" (one document
        a row, cut to T).
      seed, epoch: of the permutations.
      shuffle: permute the documents, and then the rows, so that the rows cut from one long
        document do not follow each other. Otherwise both stay in the order of the cache.
    """
    if packing not in PACKINGS:
        raise DataError(f"packing is {packing!r}; expected {', '.join(PACKINGS)}")
    starts = offsets[:-1]
    lengths = np.diff(offsets) - 1
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(len(starts))
        starts, lengths = starts[order], lengths[order]
    truncated = 0
    if packing == "concat":
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        num_rows = -(-int(bounds[-1]) // row_length)
    else:
        truncated = int((lengths > row_length).sum())
        lengths = np.minimum(lengths, row_length)
        if packing == "first_fit":
            placed = first_fit(lengths, row_length)
            grouped = np.argsort(placed, kind="stable")
            starts, lengths = starts[grouped], lengths[grouped]
            counts = np.bincount(placed)
        else:
            counts = np.ones(len(starts), np.int64)
        num_rows = len(counts)
        bounds = np.concatenate([[0], np.cumsum(counts)])
    order = np.arange(num_rows)
    if shuffle and packing != "pad":
        order = np.random.default_rng([fold_seed(seed, "rows"), epoch]).permutation(num_rows)
    return Plan(
        num_rows, starts, bounds, lengths, order, row_length, packing != "concat", truncated
    )


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Places items in turn, each into the first bin with room.

    Args:
      lengths: int64 [items], each at most `capacity`.

    Returns:
      int64 [items], the bin of each.
    """
    # A tree of the largest room left below each node; leaf i is bin i. Bins not yet opened have
    # full room, so the first bin with room is found by one descent.
    size = 1 << max(len(lengths) - 1, 1).bit_length()
    room = [capacity] * (2 * size)
    placed = np.empty(len(lengths), np.int64)
    for item, length in enumerate(lengths.tolist()):
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        placed[item] = node - size
        room[node] -= length
        node //= 2
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
            node //= 2
    return placed


def fold_seed(seed: int, *purpose: int | str) -> int:
    """A seed for one purpose: 63 bits of a hash, so that nearby seeds are unrelated."""
    digest = hashlib.sha256(canonical_json([int(seed), *purpose]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each i the integers first[i]..last[i]-1: (i repeated, the integers)."""
    counts = last - first
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
