"""The meaning: plain attention over what the bytes stand for."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.quantized_kv_attention.layout import PackedKeys, PackedValues

# Finite, so that queries which see nothing do not become NaN.
HIDDEN = -1e30


def reference(
    q: Float[Array, "B T K G D"],
    key_codes: Int8[Array, "B K rows S"],
    key_scales: Float[Array, "B K 2 groups D"],
    value_codes: Int8[Array, "B K rows E"],
    value_scales: Float[Array, "B K 2 groups S"],
    recent_k: Float[Array, "B K W D"],
    recent_v: Float[Array, "B K W E"],
    lengths: Int[Array, " B"],
    recent_positions: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T K G E"]:
    """Attention in plain JAX, products in the type of q, softmax in float32."""
    keys = PackedKeys(key_codes, key_scales).dequantize().astype(q.dtype)
    values = PackedValues(value_codes, value_scales).dequantize().astype(q.dtype)
    slots = keys.shape[2]
    keys = jnp.concatenate([keys, recent_k.astype(q.dtype)], axis=2)
    values = jnp.concatenate([values, recent_v.astype(q.dtype)], axis=2)
    packed = jnp.arange(slots) < lengths[:, None]
    recent = visible_recent(recent_positions, positions)
    packed = jnp.broadcast_to(packed[:, None], (*recent.shape[:2], slots))
    seen = jnp.concatenate([packed, recent], axis=-1)[:, None, None]
    scores = jnp.einsum("btkgd,bksd->bkgts", q, keys, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, HIDDEN)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    weights = (weights / total).astype(q.dtype)
    out = jnp.einsum("bkgts,bkse->btkge", weights, values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def visible_recent(
    recent_positions: Int[Array, "B W"], positions: Int[Array, "B T"]
) -> Int[Array, "B T W"]:
    """Which recent tokens a query sees: those that are there, at or before it."""
    at = recent_positions[:, None, :]
    return (at >= 0) & (at <= positions[:, :, None])
