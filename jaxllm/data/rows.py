"""Rows of training batches as a pure function of (seed, epoch, row).

    rows = PackedRows(cache.split("train"), row_length=256, packing="concat")
    batch = rows.take(seed, np.arange(8))      # rows 0..7 of the endless sequence

A source of rows is an endless sequence: the rows of epoch 0, then those of epoch 1, each in its
own order. `take` gathers any of them in one vectorised step. A language-model batch holds

    tokens        int32 [B, T]
    targets       int32 [B, T]    the token that follows in the same document
    weights     float32 [B, T]    loss weight of the target; 0 where there is none
    segment_ids   int32 [B, T]    1, 2, ... a document piece; 0 is padding
    positions     int32 [B, T]    0, 1, ... within each piece

Padding holds zeros throughout; find it by segment_ids, since token 0 may be a real one. A
document of n tokens gives n - 1 positions (see jaxllm.data.planning): with "concat" every token
but the first of a document is a target exactly once an epoch. A document that goes on in another
row begins there anew at position 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.data.cache import TokenSplit
from jaxllm.data.errors import DataError
from jaxllm.data.planning import PACKINGS, Pieces, Plan, fold_seed, make_plan

Batch = dict[str, Any]


class Rows:
    """Base class of row sources.

    Subclasses give `take`, `num_rows` and `fingerprint`, and `epochs` where they can.
    """

    row_length: int

    def take(self, seed: int, index: np.ndarray) -> Batch:
        """Rows of the endless sequence.

        Args:
          seed: of all permutations.
          index: int64 [B], each at least 0.
        """
        raise NotImplementedError

    def num_rows(self, seed: int, epoch: int = 0) -> int:
        """Rows of an epoch; with "first_fit" epochs differ."""
        raise NotImplementedError

    def epochs(self, seed: int, index: int) -> dict[str, float]:
        """How often the data behind each source has been seen before row `index`."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """JSON-safe description of what determines the rows beside the seed."""
        raise NotImplementedError


class _EpochRows(Rows):
    """Rows that come in epochs: subclasses give `num_rows` and `_gather` of one epoch's rows."""

    _cumulative: Callable[[int, int], tuple[int, ...]]
    _same_count = True
    name = "rows"

    def take(self, seed: int, index: np.ndarray) -> Batch:
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0:
            raise DataError(f"row indices must be a list of numbers from 0: {index}")
        epoch, row = self.locate(seed, index)
        if epoch[0] == epoch[-1] and (epoch == epoch[0]).all():
            return self._gather(seed, int(epoch[0]), row)
        batches = [
            (np.flatnonzero(epoch == e), self._gather(seed, int(e), row[epoch == e]))
            for e in np.unique(epoch)
        ]
        return scatter(batches, len(index))

    def locate(self, seed: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, row) of rows of the endless sequence, int64 [B] each."""
        if self._same_count:
            return np.divmod(index, self.num_rows(seed))
        bounds = [0]
        while bounds[-1] <= index.max():
            bounds.append(bounds[-1] + self.num_rows(seed, len(bounds) - 1))
        epoch = np.searchsorted(bounds, index, side="right") - 1
        return epoch, index - np.asarray(bounds)[epoch]

    def epochs(self, seed: int, index: int) -> dict[str, float]:
        epoch, row = self.locate(seed, np.asarray([index], np.int64))
        return {self.name: float(epoch[0] + row[0] / self.num_rows(seed, int(epoch[0])))}

    def _gather(self, seed: int, epoch: int, rows: np.ndarray) -> Batch:
        raise NotImplementedError


class PackedRows(_EpochRows):
    """Rows packed from the documents of one split.

    Args:
      split: documents with one part.
      row_length: positions a row, T.
      packing: "concat", "first_fit" or "pad"; see `planning.make_plan`.
      shuffle: permute documents and rows anew each epoch; off for evaluation.
    """

    def __init__(
        self, split: TokenSplit, row_length: int, packing: str = "concat", shuffle: bool = True
    ):
        _check(split, row_length, 1)
        if packing not in PACKINGS:
            raise DataError(f"packing is {packing!r}; expected {', '.join(PACKINGS)}")
        self.split = split
        self.name = split.name
        self.row_length = row_length
        self.packing = packing
        self.shuffle = shuffle
        self._same_count = packing != "first_fit" or not shuffle
        # Plans are looked up from prefetching threads: lru_cache is safe there, and a plan that two
        # threads happen to make at once is the same.
        self._plan = functools.lru_cache(maxsize=3)(self._make_plan)
        self._count = functools.lru_cache(maxsize=None)(self._count_rows)

    def num_rows(self, seed: int, epoch: int = 0) -> int:
        return self._count(seed, 0 if self._same_count else epoch)

    def statistics(self, seed: int = 0, epoch: int = 0) -> dict[str, float]:
        """Rows, positions used, share of padding, and truncated documents of an epoch."""
        plan = self._plan(seed, epoch)
        used = int(plan.lengths.sum())
        return {
            "rows": plan.num_rows,
            "positions": used,
            "padding": 1 - used / (plan.num_rows * self.row_length),
            "truncated_documents": plan.truncated,
        }

    def fingerprint(self) -> dict[str, Any]:
        return {
            "data": self.split.fingerprint,
            "row_length": self.row_length,
            "packing": self.packing,
            "shuffle": self.shuffle,
        }

    def _make_plan(self, seed: int, epoch: int) -> Plan:
        offsets = self.split.offsets
        return make_plan(offsets, self.row_length, self.packing, seed, epoch, self.shuffle)

    def _count_rows(self, seed: int, epoch: int) -> int:
        if self.packing == "first_fit":
            return self._plan(seed, epoch).num_rows
        lengths = np.diff(self.split.offsets) - 1
        return len(lengths) if self.packing == "pad" else -(-int(lengths.sum()) // self.row_length)

    def _gather(self, seed: int, epoch: int, rows: np.ndarray) -> Batch:
        pieces = self._plan(seed, epoch).pieces(rows)
        return fill(self.split, pieces, len(rows), self.row_length)


class PartRows(_EpochRows):
    """One example a row, for examples of several parts: {"chosen": {...}, "rejected": {...}}.

    Each part is a batch of its own, one document a row, cut to T positions at the end.

    Args:
      split: documents with two parts or more.
      row_length: positions a row, T.
      shuffle: permute the examples anew each epoch.
    """

    def __init__(self, split: TokenSplit, row_length: int, shuffle: bool = True):
        _check(split, row_length, 2)
        self.split = split
        self.name = split.name
        self.row_length = row_length
        self.shuffle = shuffle
        self._order = functools.lru_cache(maxsize=3)(self._make_order)

    def num_rows(self, seed: int, epoch: int = 0) -> int:
        return self.split.num_examples

    def statistics(self, seed: int = 0, epoch: int = 0) -> dict[str, float]:
        """Rows and truncated documents of an epoch."""
        lengths = np.diff(self.split.offsets) - 1
        truncated = int((lengths > self.row_length).sum())
        return {"rows": self.split.num_examples, "truncated_documents": truncated}

    def fingerprint(self) -> dict[str, Any]:
        return {
            "data": self.split.fingerprint,
            "row_length": self.row_length,
            "packing": "parts",
            "shuffle": self.shuffle,
        }

    def _make_order(self, seed: int, epoch: int) -> np.ndarray:
        count = self.split.num_examples
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([seed, epoch]).permutation(count)

    def _gather(self, seed: int, epoch: int, rows: np.ndarray) -> Batch:
        examples = self._order(seed, epoch)[rows]
        batch = {}
        for i, part in enumerate(self.split.parts):
            document = examples * len(self.split.parts) + i
            start = self.split.offsets[document]
            length = np.minimum(self.split.offsets[document + 1] - start - 1, self.row_length)
            pieces = Pieces(np.arange(len(rows)), start, length)
            batch[part] = fill(self.split, pieces, len(rows), self.row_length)
        return batch


class ZippedRows(Rows):
    """Rows of several sources side by side: {"forget": {...}, "retain": {...}}.

    Row i holds row i of each source's own endless sequence, each with a seed and epochs of its
    own: a small forget set comes round more often than the retain set beside it.

    Args:
      sources: by name.
      anchor: the source whose epoch counts as one of the whole; default the first.
    """

    def __init__(self, sources: Mapping[str, Rows], anchor: str | None = None):
        if not sources:
            raise DataError("ZippedRows needs at least one source")
        self.sources = dict(sources)
        self.anchor = anchor or next(iter(self.sources))
        if self.anchor not in self.sources:
            raise DataError(f"anchor {anchor!r} is none of {', '.join(self.sources)}")
        self.row_length = self.sources[self.anchor].row_length

    def take(self, seed: int, index: np.ndarray) -> Batch:
        return {
            name: rows.take(fold_seed(seed, name), index) for name, rows in self.sources.items()
        }

    def num_rows(self, seed: int, epoch: int = 0) -> int:
        return self.sources[self.anchor].num_rows(fold_seed(seed, self.anchor), epoch)

    def epochs(self, seed: int, index: int) -> dict[str, float]:
        return {
            f"{name}/{key}": value
            for name, rows in self.sources.items()
            for key, value in rows.epochs(fold_seed(seed, name), index).items()
        }

    def fingerprint(self) -> dict[str, Any]:
        described = {name: rows.fingerprint() for name, rows in self.sources.items()}
        return {"sources": described, "anchor": self.anchor, "row_length": self.row_length}


def fill(split: TokenSplit, pieces: Pieces, num_rows: int, row_length: int) -> Batch:
    """Gathers pieces into a batch, those of a row one after the other from its beginning."""
    length = pieces.length
    begin = np.cumsum(length) - length  # among all positions gathered
    count = int(length.sum())
    source = np.repeat(pieces.start - begin, length)
    source += _arange(count, np.int64)
    positions = np.repeat(begin.astype(np.int32), length)
    np.subtract(_arange(count, np.int32), positions, out=positions)
    new_row = np.flatnonzero(np.diff(pieces.row, prepend=-1))
    pieces_a_row = np.diff(new_row, append=len(length))
    segment = np.arange(1, len(length) + 1) - np.repeat(new_row, pieces_a_row)
    tokens = split.tokens[source].astype(np.int32)
    # Within a piece the target is the next input; at its end it is one token further.
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    targets[begin + length - 1] = split.tokens[pieces.start + length]
    if split.weights is None:
        weights = np.ones(count, np.float32)
    else:
        source += 1
        weights = split.weights[source]
    arrays = {
        "tokens": tokens,
        "targets": targets,
        "weights": weights,
        "segment_ids": np.repeat(segment.astype(np.int32), length),
        "positions": positions,
    }
    shape = (num_rows, row_length)
    if count == num_rows * row_length:
        return {name: array.reshape(shape) for name, array in arrays.items()}
    row_begin = np.repeat(begin[new_row], pieces_a_row)  # of each piece's row
    place = np.repeat(pieces.row * row_length - row_begin, length)
    place += _arange(count, np.int64)
    batch = {}
    for name, array in arrays.items():
        out = np.zeros(num_rows * row_length, array.dtype)
        out[place] = array
        batch[name] = out.reshape(shape)
    return batch


def scatter(batches: list[tuple[np.ndarray, Batch]], size: int) -> Batch:
    """Puts the rows of several batches at the given places of one batch of `size` rows."""
    result: Batch = {}
    for name, value in batches[0][1].items():
        if isinstance(value, dict):
            result[name] = scatter([(places, b[name]) for places, b in batches], size)
            continue
        result[name] = np.empty((size, *value.shape[1:]), value.dtype)
        for places, batch in batches:
            result[name][places] = batch[name]
    return result


@functools.lru_cache(maxsize=16)
def _arange(count: int, dtype: type) -> np.ndarray:
    result: np.ndarray = np.arange(count, dtype=dtype)
    result.flags.writeable = False
    return result


def _check(split: TokenSplit, row_length: int, parts: int) -> None:
    if row_length < 1:
        raise DataError(f"row_length is {row_length}; expected at least 1")
    if (len(split.parts) == 1) != (parts == 1):
        wanted = "PackedRows" if parts != 1 else "PartRows"
        raise DataError(f"the split {split.name!r} has the parts {split.parts}: use {wanted}")
    if int(np.diff(split.offsets).min()) < 2:
        raise DataError(f"the split {split.name!r} has a document of fewer than two tokens")
