"""Layers as a sequence of segments: stacked runs of layers of equal structure.

The forward pass loops over segments and scans inside each. One segment is the scanned model;
segments of one layer are the unrolled one; mixed bit widths, pruned widths, dense layers before
mixtures fall out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _signature(layer: Any) -> tuple[Any, ...]:
    """What layers must share to be stacked: structure with static fields, shapes, dtypes."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _stack(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return np.stack(leaves)
    return jnp.stack(leaves)


def stack(layers: Sequence[Any]) -> Any:
    """Stacks layers of equal structure into one segment: every leaf gains a leading layer axis."""
    return jax.tree.map(_stack, *layers)


def restack(layers: Sequence[Any]) -> tuple[Any, ...]:
    """Groups consecutive layers of equal structure, shapes and dtypes into segments.

    Args:
      layers: one tree a layer, of arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      Segments in order, each a tree whose leaves have a leading layer axis.
    """
    if not layers:
        raise ValueError("restack needs at least one layer.")
    return tuple(stack(list(run)) for _, run in itertools.groupby(layers, key=_signature))


def segment_length(segment: Any) -> int:
    """Number of layers in a segment."""
    return jax.tree.leaves(segment)[0].shape[0]


def segment_layer(segment: Any, index: int) -> Any:
    """One layer of a segment."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        return leaf[index]

    return jax.tree.map(take, segment)


def unstack(segments: Sequence[Any]) -> list[Any]:
    """The layers of all segments, one tree each; undoes `restack`."""
    return [
        segment_layer(segment, index)
        for segment in segments
        for index in range(segment_length(segment))
    ]


def unroll(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters with every layer a segment of its own, so that nothing is scanned."""
    layers = unstack(params["layers"])
    return {**params, "layers": tuple(stack([layer]) for layer in layers)}


def cut(params: Mapping[str, Any], kinds: Sequence[Any]) -> dict[str, Any]:
    """The same parameters with segments cut wherever consecutive layers are of different kinds."""
    segments: list[Any] = []
    start = 0
    for segment in params["layers"]:
        length = segment_length(segment)
        inside = range(start + 1, start + length)
        edges = [0, *(i - start for i in inside if kinds[i] != kinds[i - 1]), length]
        whole = len(edges) == 2
        segments += (
            [segment] if whole else [_slice(segment, *piece) for piece in itertools.pairwise(edges)]
        )
        start += length
    return {**params, "layers": tuple(segments)}


def _slice(segment: Any, start: int, stop: int) -> Any:
    def take(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), leaf.dtype)
        return leaf[start:stop]

    return jax.tree.map(take, segment)


def map_layers(function: Callable[[int, Any], Any], params: dict[str, Any]) -> dict[str, Any]:
    """Applies function(layer index, layer tree) -> layer tree to every layer and restacks."""
    layers = [function(index, layer) for index, layer in enumerate(unstack(params["layers"]))]
    return {**params, "layers": restack(layers)}
