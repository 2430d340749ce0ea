"""The meaning: plain attention, group by group."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Finite, so that queries which see nothing do not become NaN.
HIDDEN = -1e30


def reference(
    adaptive_q: Float[Array, "B T A G D"],
    consistent_q: Float[Array, "B T C G D"],
    adaptive_k: Float[Array, "B A Sa D"],
    adaptive_v: Float[Array, "B A Sa E"],
    consistent_k: Float[Array, "B C Sc D"],
    consistent_v: Float[Array, "B C Sc E"],
    adaptive_lengths: Int[Array, "B A"],
    consistent_lengths: Int[Array, "B C"],
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "B T A G E"], Float[Array, "B T C G E"]]:
    """Attention in plain JAX of both groups; scores and softmax in float32."""
    adaptive = _attend(adaptive_q, adaptive_k, adaptive_v, adaptive_lengths, scale, softcap)
    return adaptive, _attend(
        consistent_q, consistent_k, consistent_v, consistent_lengths, scale, softcap
    )


def _attend(q, k, v, lengths, scale, softcap):
    if q.size == 0 or k.size == 0:
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    time, slots = q.shape[1], k.shape[2]
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.einsum("btkgd,bksd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # The last T tokens of a head are the queries' own.
    end = lengths[:, :, None] - time + 1 + jnp.arange(time)
    seen = (jnp.arange(slots) < end[..., None])[:, :, None]
    scores = jnp.where(seen, scores, HIDDEN)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    weights = (weights / total).astype(q.dtype)
    out = jnp.einsum("bkgts,bkse->btkge", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
