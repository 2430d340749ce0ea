"""Mixtures: one endless sequence of rows drawn from several sources at fixed rates.

Rates count packed rows, not documents or examples: at equal rates every source gives as many
positions to each batch, however long its documents are. (A seqio mixture counts examples.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.data.errors import DataError
from jaxllm.data.planning import fold_seed
from jaxllm.data.rows import Batch, Rows, scatter

_BLOCK = 1000


class Mixture(Rows):
    """Rows of several sources at given rates, a pure function of (seed, row).

    Every block of 1000 rows holds each source's share exactly (rounded to whole rows, at least
    one), in an order drawn from the seed; a source that ends begins its next epoch.

    Args:
      sources: by name; equal row lengths, batches of equal form.
      rates: positive, by the same names; only their ratios count.

    Attributes:
      rates: the shares after rounding, summing to one.
    """

    def __init__(self, sources: Mapping[str, Rows], rates: Mapping[str, float]):
        if not sources or set(sources) != set(rates):
            raise DataError(
                f"a mixture needs one rate a source: sources {sorted(sources)}, rates "
                f"{sorted(rates)}"
            )
        for name, rate in rates.items():
            if not np.isfinite(rate) or rate <= 0:
                raise DataError(f"the rate of {name!r} is {rate}; expected a positive number")
        if len(sources) > _BLOCK:
            raise DataError(f"a mixture of {len(sources)} sources; expected at most {_BLOCK}")
        lengths = {name: rows.row_length for name, rows in sources.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"the sources of a mixture have different row lengths: {lengths}")
        self.sources = dict(sources)
        self.row_length = next(iter(lengths.values()))
        self._quota = _round_shares(np.array([rates[name] for name in self.sources], float))
        self.rates = {
            name: int(n) / _BLOCK for name, n in zip(self.sources, self._quota, strict=True)
        }
        self._pattern = functools.lru_cache(maxsize=16)(self._make_pattern)

    def take(self, seed: int, index: np.ndarray) -> Batch:
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0:
            raise DataError(f"row indices must be a list of numbers from 0: {index}")
        which, local = self.locate(seed, index)
        batches = []
        for i, (name, rows) in enumerate(self.sources.items()):
            places = np.flatnonzero(which == i)
            if len(places):
                batches.append((places, rows.take(fold_seed(seed, name), local[places])))
        return scatter(batches, len(index))

    def locate(self, seed: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of the source of each row, and the row of that source, int64 [B] each."""
        block, within = np.divmod(index, _BLOCK)
        which = np.empty(len(index), np.int64)
        local = np.empty(len(index), np.int64)
        for b in np.unique(block):
            here = block == b
            pattern, rank = self._pattern(seed, int(b))
            which[here] = pattern[within[here]]
            local[here] = b * self._quota[which[here]] + rank[within[here]]
        return which, local

    def num_rows(self, seed: int, epoch: int = 0) -> int:
        raise DataError("a mixture has no epochs of its own; evaluate its sources one by one")

    def epochs(self, seed: int, index: int) -> dict[str, float]:
        result = {}
        block, within = divmod(index, _BLOCK)
        pattern, _ = self._pattern(seed, block)
        for i, (name, rows) in enumerate(self.sources.items()):
            seen = block * int(self._quota[i]) + int((pattern[:within] == i).sum())
            for key, value in rows.epochs(fold_seed(seed, name), seen).items():
                result[f"{name}/{key}"] = value
        return result

    def fingerprint(self) -> dict[str, Any]:
        described = {name: rows.fingerprint() for name, rows in self.sources.items()}
        return {"sources": described, "rates": self.rates, "row_length": self.row_length}

    def _make_pattern(self, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each row of a block, and how many of that source stand before it."""
        pattern = np.repeat(np.arange(len(self._quota)), self._quota)
        pattern = np.random.default_rng([fold_seed(seed, "mixture"), block]).permutation(pattern)
        order = np.argsort(pattern, kind="stable")
        rank = np.empty(_BLOCK, np.int64)
        rank[order] = np.arange(_BLOCK) - np.repeat(
            np.cumsum(self._quota) - self._quota, self._quota
        )
        return pattern, rank


def _round_shares(rates: np.ndarray) -> np.ndarray:
    """Whole rows of a block: largest remainders, at least one each."""
    exact = rates / rates.sum() * _BLOCK
    quota = np.maximum(np.floor(exact).astype(np.int64), 1)
    while quota.sum() != _BLOCK:
        step = 1 if quota.sum() < _BLOCK else -1
        gap = (exact - quota) * step
        gap[quota + step < 1] = -np.inf
        quota[np.argmax(gap)] += step
    return quota
