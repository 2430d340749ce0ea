"""Collectives for functions that run on each device's shard (`jax.shard_map`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
from jaxtyping import Array


def scatter_axis(x: Array, names: Sequence[str], axis: int, summed: Collection[str]) -> Array:
    """This device's shard of an array along one axis, summed over some of the mesh axes.

    Args:
      x: the whole along `axis`, which each device has its own part of the sum of.
      names: mesh axes that the shards lie on, the outermost first.
      axis: which is cut.
      summed: those mesh axes whose devices hold different parts; over the others they are equal.
    """
    for name in names:
        if name in summed:
            x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
        else:
            size = x.shape[axis] // jax.lax.axis_size(name)
            start = jax.lax.axis_index(name) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    return x
