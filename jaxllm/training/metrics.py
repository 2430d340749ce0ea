"""Weighted means that merge exactly, as pytrees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics


@flax.struct.dataclass
class Mean(clu_metrics.Metric):
    """total / weight, kept apart so that parts of a batch (or several batches) merge exactly.

    Attributes:
      total: weighted sum of the values.
      weight: sum of the weights.
    """

    total: Any
    weight: Any

    @classmethod
    def of(cls, value: Any, weight: Any = 1.0) -> Mean:
        """The mean that computes to `value` and counts `weight` in merges."""
        return cls(total=value * weight, weight=jnp.asarray(weight, jnp.result_type(float)))

    @classmethod
    def empty(cls) -> Mean:
        """Merges with anything without changing it."""
        return cls(total=np.float64(0.0), weight=np.float64(0.0))

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def compute(self) -> Any:
        """total / weight; 0 where nothing was counted."""
        if isinstance(self.weight, jax.Array):
            return self.total / jnp.where(self.weight == 0, 1.0, self.weight)
        return float(self.total) / float(self.weight) if float(self.weight) else 0.0


Metrics = Mapping[str, Mean]


def merge(first: Metrics, second: Metrics) -> dict[str, Mean]:
    """Merges by name; a name that only one side has is kept."""
    merged = dict(first)
    for name, mean in second.items():
        merged[name] = merged[name].merge(mean) if name in merged else mean
    return merged


def to_host(metrics: Metrics) -> dict[str, Mean]:
    """Waits for the device; the means in float64, in which long sums stay exact enough."""
    fetched = jax.device_get(dict(metrics))
    return jax.tree.map(np.float64, fetched)


def compute(metrics: Metrics) -> dict[str, float]:
    """The value of every mean, as Python floats."""
    return {name: float(mean.compute()) for name, mean in metrics.items()}
