"""The meaning: all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.masks import Mask


def reference(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K E"],
    segment_ids: Int[Array, "B T"],
    *,
    scale: float,
    mask: Mask,
) -> Float[Array, "B T K G E"]:
    """Attention in plain JAX; scores and softmax in float32."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    if mask.softcap is not None:
        scores = mask.softcap * jnp.tanh(scores / mask.softcap)
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    at = jnp.arange(q.shape[1])
    distance = at[:, None] - at[None, :]
    if mask.causal:
        visible = visible & (distance >= 0)
    if mask.window is not None:
        visible = visible & (distance < mask.window)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bske->btkge", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
