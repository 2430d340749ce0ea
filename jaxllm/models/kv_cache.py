"""Keys and values as a value: `attend(cache, q, k, v) -> (out, cache)`.

A `KVCache` belongs to one layer. Given the queries, keys and values of the new tokens it returns
what they attend to and the cache that holds them. Whatever a method does to keys, values and
queries after the rotary embedding (transforming, quantising, evicting) is an implementation of this
class.

Letters: B batch, T new tokens, S visible keys, H query heads, K key heads, G = H / K, D, E head
  widths.
"""

from __future__ import annotations

import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models import context_parallel
from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context
from jaxllm.models.placement import on_one_device


class KVCache:
    """Base of all caches; subclasses are `flax.struct.dataclass`es."""

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K E"],
        context: Context,
    ) -> tuple[Float[Array, "B T H E"], KVCache]:
        """What the new tokens attend to, and the cache with them in it."""
        raise NotImplementedError

    def compact(self) -> KVCache:
        """What decoding goes on with after the prompt; the same unless a method drops or packs."""
        return self


def visible(
    query_index: Int[Array, "... T"],
    key_index: Int[Array, "... S"],
    window: Int[Array, ""] | int | None,
) -> Bool[Array, "... T S"]:
    """Causal mask: keys at or before the query, and within `window` tokens, itself included."""
    distance = query_index[..., :, None] - key_index[..., None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def dot_product_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
    context: Context | None = None,
) -> Float[Array, "B T H E"]:
    """Grouped-query attention, softmax in float32; key head j serves queries jG .. jG + G - 1."""
    batch, time, heads, width = q.shape
    kv_heads, slots, value_width = k.shape[2], k.shape[1], v.shape[-1]
    # One product a key head: the queries of its group lie one after the other along time.
    q = (q * scale).reshape(batch, time, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, -1, width)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    logits = jnp.einsum("bknd,bksd->bkns", q, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, kv_heads, -1, time, slots)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    # A finite minimum: rows of padding see nothing, and must not become NaN.
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    # The product is divided by the sum, not the weights: a pass over [T, S] less in each direction.
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    if context is not None and context.taps.wants("attention_probs"):
        context.tap("attention_probs", (weights / total).reshape(batch, heads, time, slots))
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, -1, slots)
    out = jnp.einsum("bkns,bksd->bknd", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, -1, time, value_width) / total
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, value_width)
    return out.astype(v.dtype)


def attention_scale(config: ModelConfig) -> float:
    """Factor on q.k: the config's, or head_dim^-0.5."""
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


@flax.struct.dataclass
class NoCache(KVCache):
    """Keeps nothing: the new tokens are the whole sequence (training, perplexity, calibration)."""

    def attend(self, q, k, v, context):
        if context_parallel.applies(q, k, context):
            return context_parallel.attend(
                q, k, v, context, scale=attention_scale(context.config)
            ), self
        time = q.shape[1]
        whole = context.taps.wants("attention_probs") or not on_one_device()
        blocks = 1 if whole else min(_QUERY_BLOCKS, max(1, time // _MIN_QUERY_BLOCK))
        edges = [time * block // blocks for block in range(blocks + 1)]
        parts = [
            self._attend_block(q, k, v, context, start, stop)
            for start, stop in itertools.pairwise(edges)
        ]
        return jnp.concatenate(parts, axis=1) if blocks > 1 else parts[0], self

    def _attend_block(self, q, k, v, context, start, stop):
        """Queries start .. stop - 1 over the keys that any of them can see."""
        window = context.window
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        mask = visible(jnp.arange(start, stop)[None], jnp.arange(first, stop)[None], window)
        segment_ids = context.shared.segment_ids
        if segment_ids is not None:
            queries, keys = segment_ids[:, start:stop], segment_ids[:, first:stop]
            mask = mask & (queries[:, :, None] == keys[:, None, :])
        return dot_product_attention(
            q[:, start:stop],
            k[:, first:stop],
            v[:, first:stop],
            mask,
            scale=attention_scale(context.config),
            softcap=context.config.attention_softcap,
            context=context,
        )


# Causal attention wastes half of its work on what is masked. Cutting the queries into n blocks,
# each over the keys before its end, leaves (n + 1) / 2n of it.
_QUERY_BLOCKS = 4
_MIN_QUERY_BLOCK = 32


@flax.struct.dataclass
class DenseCache(KVCache):
    """Keeps every key and value at the slot of its position.

    Prompts of different lengths are padded on the right: the slots of padding are overwritten
      before any
    query may see them. Segment ids have no meaning here.

    Attributes:
      k, v: [B, K, S, D] and [B, K, S, E]; heads before slots, so that a decoding step writes
        contiguously.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S E"]

    def attend(self, q, k, v, context):
        positions = context.shared.positions
        write = jax.vmap(
            lambda buffer, slots, new: buffer.at[:, slots].set(
                new.swapaxes(0, 1).astype(buffer.dtype), mode="drop"
            )
        )
        cache = self.replace(k=write(self.k, positions, k), v=write(self.v, positions, v))
        mask = visible(positions, jnp.arange(self.k.shape[2])[None], context.window)
        config = context.config
        out = dot_product_attention(
            q,
            cache.k.swapaxes(1, 2).astype(q.dtype),
            cache.v.swapaxes(1, 2).astype(q.dtype),
            mask,
            scale=attention_scale(config),
            softcap=config.attention_softcap,
            context=context,
        )
        return out, cache


def init_dense_cache(
    config: ModelConfig, params: Any, batch_size: int, num_slots: int, dtype: Any = None
) -> tuple[DenseCache, ...]:
    """Empty dense caches for a model, one stacked cache for every segment of `params`.

    Args:
      config: the model's.
      params: its parameters; only the lengths of the segments are read.
      batch_size, num_slots: B and S, the longest sequence that fits.
      dtype: of keys and values; None = the compute type.
    """
    key_dim = config.head_dim
    value_dim = key_dim if config.mla is None else config.mla.value_dim
    dtype = config.compute_dtype if dtype is None else dtype

    def empty(segment: Any) -> DenseCache:
        layers = jax.tree.leaves(segment)[0].shape[0]
        shape = (layers, batch_size, config.num_kv_heads, num_slots)
        return DenseCache(
            k=jnp.zeros((*shape, key_dim), dtype), v=jnp.zeros((*shape, value_dim), dtype)
        )

    return tuple(empty(segment) for segment in params["layers"])
