"""What grouped products and experts mean, in plain JAX around one product that may be replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Matmul = Callable[[Array, Array, Array], Array]


def ragged_dot(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """JAX's own product of groups of rows, accumulated in float32."""
    out = jax.lax.ragged_dot(x, weights, group_sizes, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    matmul: Matmul = ragged_dot,
) -> Float[Array, "M F"]:
    """`matmul`, with zeros in rows beyond the groups, of the result and of the gradients.

    Kernels leave such rows unwritten.
    """
    if x.shape[0] == 0:
        return jnp.zeros((0, weights.shape[2]), x.dtype)
    grouped = (jnp.arange(x.shape[0]) < group_sizes.sum())[:, None]
    out = matmul(jnp.where(grouped, x, 0), weights, group_sizes)
    return jnp.where(grouped, out, 0)


def expert_feedforward(
    x: Float[Array, "T D"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    ids: Int[Array, " E"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    gate: Float[Array, "E D F"] | None = None,
    *,
    num_experts: int,
    activation: Callable[[Array], Array],
    matmul: Matmul = ragged_dot,
) -> Float[Array, "T D"]:
    """The sum over the choices of those experts that are given.

    Args:
      x, experts, weights: tokens, the experts that they chose, and with what weights.
      ids: numbers of the given experts, one after the other.
      up, down, gate: their matrices.
      num_experts: of all devices together.
      activation: elementwise.
      matmul: of groups of rows.
    """
    tokens, per_token = experts.shape
    if tokens == 0 or per_token == 0:
        return jnp.zeros_like(x)
    # The given experts come first, so that their rows do too.
    local = (experts.reshape(-1) - ids[0]) % num_experts
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=num_experts)[: ids.size].astype(jnp.int32)
    rows = x[order // per_token]
    product = functools.partial(grouped_matmul, group_sizes=sizes, matmul=matmul)
    hidden = product(rows, up)
    hidden = activation(hidden) if gate is None else activation(product(rows, gate)) * hidden
    out = product(hidden, down)[jnp.argsort(order)].reshape(tokens, per_token, -1)
    weighted = out.astype(jnp.float32) * weights[..., None].astype(jnp.float32)
    return weighted.sum(axis=1).astype(x.dtype)
