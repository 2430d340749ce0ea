"""Arrays of the devices, whole, on the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def to_host(x: Any) -> np.ndarray:
    """The whole of an array. With several processes all must call this, in the same order."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
