"""The meaning: all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.scores import Scores


def reference(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K E"],
    segment_ids: Int[Array, "B T"],
    *,
    how: Scores,
) -> Float[Array, "B T K G E"]:
    """Attention in plain JAX; scores and softmax in float32."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * how.scale
    if how.softcap is not None:
        scores = how.softcap * jnp.tanh(scores / how.softcap)
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    at = jnp.arange(q.shape[1])
    distance = at[:, None] - at[None, :]
    if how.causal:
        visible = visible & (distance >= 0)
    if how.window is not None:
        visible = visible & (distance < how.window)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bske->btkge", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
