"""Levels 1 and 2: the front functions through which every matrix product of the model goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.models.context import Context
from jaxllm.models.placement import on_one_device
from jaxllm.models.weights import Group, Weight


def matmul(
    x: Float[Array, "... d_in"], weight: Any, context: Context | None = None
) -> Float[Array, "... d_out"]:
    """x @ weight, where weight is an (in, out) array or a `Weight`.

    Raises:
      TypeError: weight is neither.
      ValueError: the inner dimensions differ.
    """
    if isinstance(weight, Weight):
        return weight.matmul(x, context)
    if not isinstance(weight, jax.Array | np.ndarray):
        raise TypeError(f"a weight must be an array or a Weight, got {type(weight).__name__}.")
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"cannot multiply x {x.shape} by a weight of shape {weight.shape}.")
    weight = weight.astype(x.dtype)
    if x.ndim > 2 and on_one_device():
        # One row axis: XLA's CPU compiler copies operands to contract over two of them, as the
        # gradient of the weight does. On a mesh the axes may be sharded apart, and stay apart.
        return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)
    return x @ weight


def linear(
    x: Float[Array, "... d_in"], node: Mapping[str, Any], context: Context | None = None
) -> Float[Array, "... d_out"]:
    """x @ node["kernel"] (+ node["bias"])."""
    if not isinstance(node, Mapping):
        raise TypeError(
            f"a linear must be a mapping with 'kernel' (and 'bias'), got {type(node).__name__}."
        )
    y = matmul(x, node["kernel"], context)
    return y + node["bias"].astype(y.dtype) if "bias" in node else y


def project(
    x: Float[Array, "... d_in"], node: Any, context: Context
) -> dict[str, Float[Array, "... d_out"]]:
    """Applies every linear of a group to the same input, by name."""
    if isinstance(node, Group):
        return node.project(x, context)
    if not isinstance(node, Mapping):
        raise TypeError(
            f"a group must be a mapping of linears or a Group, got {type(node).__name__}."
        )
    return {name: linear(x, member, context) for name, member in node.items()}


def dense(weight: Any) -> Float[Array, "... d_in d_out"]:
    """The (in, out) array that a weight stands for."""
    return weight.materialize() if isinstance(weight, Weight) else jnp.asarray(weight)
