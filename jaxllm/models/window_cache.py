"""Caches of constant size: the last tokens in a ring, and optionally the first ones for good.

Letters: B batch, T new tokens, C slots, W window, N sinks, H query heads, K key heads, D, E head
widths.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context
from jaxllm.models.kv_cache import (
    CachePolicy,
    DensePolicy,
    KVCache,
    attend_logits,
    attention_logits,
    attention_scale,
    cache_widths,
    new_tokens,
    visible,
    write_slots,
)
from jaxllm.models.positions import RopeSets, rope_sets, rope_tables, rotate


@flax.struct.dataclass
class WindowCache(KVCache):
    """Keeps the first N tokens of a row and at least its last W.

    A token sees the sinks, itself and the W - 1 tokens before it. New tokens attend to what was
    there and to each other before they are written: those at the front of a chunk need keys that
    those at its end replace.

    Attributes:
      k, v: [B, K, C, D] and [B, K, C, E]; slots 0 .. N - 1 hold the sinks, the token of position
        p >= N lies at N + (p - N) mod (C - N).
      positions: [B, C] of the token in each slot; -1 = empty.
      window, num_sinks: W, N (static).
      renumber: rotate queries as if the tokens in the cache were numbered 0, 1, 2, ... (static).
    """

    k: Float[Array, "B K C D"]
    v: Float[Array, "B K C E"]
    positions: Int[Array, "B C"]
    window: int = flax.struct.field(pytree_node=False)
    num_sinks: int = flax.struct.field(pytree_node=False, default=0)
    renumber: bool = flax.struct.field(pytree_node=False, default=False)

    def attend(self, q, k, v, context):
        if context.inputs.per_layer.window is not None:
            raise ValueError("inputs.per_layer.window does not reach a WindowCache: its size is W.")
        positions, real = context.shared.positions, new_tokens(context)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        written = self._write(k, v, positions, real)
        ring = self.positions.shape[1] - self.num_sinks
        seen_last = ring < self.window or q.shape[1] + self.window - 1 <= ring
        if seen_last:
            # Nothing that these tokens see is replaced by them (a short ring never comes round).
            keys, values, key_positions = written.k, written.v, written.positions
        else:
            # What lies at or behind the new tokens is a leftover that they replace.
            old = jnp.where(self.positions < positions[:, :1], self.positions, -1)
            key_positions = jnp.concatenate([old, jnp.where(real, positions, -1)], axis=1)
            keys = jnp.concatenate([self.k, k.astype(self.k.dtype)], axis=2)
            values = jnp.concatenate([self.v, v.astype(self.v.dtype)], axis=2)
        mask = self._mask(positions, key_positions)
        keys, values = (x.swapaxes(1, 2).astype(q.dtype) for x in (keys, values))
        scale, softcap = attention_scale(context.config), context.config.attention_softcap
        logits = attention_logits(q, keys, scale)
        if self.renumber:
            evicted = jnp.maximum(positions + 1 - self.num_sinks - self.window, 0)
            back, end = rotate_back(q, evicted, context), self.num_sinks if seen_last else None
            nearer = attention_logits(back, keys[:, :end], scale)
            sink = (key_positions[:, :end] < self.num_sinks)[:, None, None, None]
            nearer = jnp.where(sink, nearer, logits[..., :end])
            logits = logits.at[..., :end].set(nearer)
        out = attend_logits(logits, values, mask, softcap=softcap, context=context)
        return out, written

    def _mask(
        self, positions: Int[Array, "B T"], key_positions: Int[Array, "B S"]
    ) -> Bool[Array, "B T S"]:
        mask = visible(positions, key_positions, self.window)
        if self.num_sinks:
            sink = (key_positions < self.num_sinks)[:, None]
            mask |= sink & visible(positions, key_positions, None)
        return mask & (key_positions >= 0)[:, None]

    def _write(self, k, v, positions, real) -> WindowCache:
        slots, sinks = self.positions.shape[1], self.num_sinks
        target = positions
        if slots > sinks:
            ring = slots - sinks
            target = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % ring)
            # Of several tokens for one slot only the last may be written.
            last = jnp.where(real, positions, -1).max(axis=1, keepdims=True)
            real = real & ((positions < sinks) | (positions > last - ring))
        target = jnp.where(real, target, slots)
        return self.replace(
            k=write_slots(self.k, target, k),
            v=write_slots(self.v, target, v),
            positions=write_slots(self.positions[:, None], target, positions[:, None])[:, 0],
        )


def rotate_back(
    q: Float[Array, "B T H D"], distance: Int[Array, "B T"], context: Context
) -> Float[Array, "B T H D"]:
    """Rotated queries as they would be `distance` positions earlier.

    A key is unaffected: the product of two rotated vectors depends on the difference of their
    positions, so moving all other keys towards the sinks is moving the query towards them.

    Raises:
      ValueError: rotary frequencies that depend on the position.
    """
    config, inputs = context.config, context.inputs
    if config.positions != "rope":
        return q
    if config.rope.type == "dynamic" or (
        config.rope.type == "longrope" and inputs.rope_set is None
    ):
        raise ValueError(
            f"rope.type={config.rope.type!r} has other frequencies at other lengths: keys cannot "
            "be renumbered (for longrope give inputs.rope_set)."
        )
    sets = rope_sets(config.rope, config.rotary_dim) if inputs.rope is None else inputs.rope
    # q carries the temperature of the set already.
    turn = RopeSets(inv_freq=sets.inv_freq, scale=jnp.ones_like(sets.scale))
    cos, sin = rope_tables(config, -distance, rope_set=inputs.rope_set, sets=turn)
    if config.mla is None:
        return rotate(q, cos, sin)
    plain, rotary = jnp.split(q, [config.mla.nope_dim], axis=-1)
    return jnp.concatenate([plain, rotate(rotary, cos, sin)], axis=-1)


def init_window_cache(
    config: ModelConfig,
    batch_size: int,
    num_slots: int,
    *,
    window: int,
    num_sinks: int = 0,
    slack: int = 0,
    renumber: bool = False,
    dtype: str | None = None,
) -> WindowCache:
    """The empty cache of one layer: N + W + slack slots, fewer where no row is that long."""
    key_dim, value_dim = cache_widths(config)
    dtype = config.compute_dtype if dtype is None else dtype
    slots = min(num_slots, num_sinks + window + slack)
    shape = (batch_size, config.num_kv_heads, slots)
    return WindowCache(
        k=jnp.zeros((*shape, key_dim), dtype),
        v=jnp.zeros((*shape, value_dim), dtype),
        positions=jnp.full((batch_size, slots), -1, jnp.int32),
        window=window,
        num_sinks=min(num_sinks, slots),
        renumber=renumber,
    )


@flax.struct.dataclass
class SlidingWindowPolicy(CachePolicy):
    """Layers with a window keep a ring of it; the others keep everything. Equal to dense caches.

    Attributes:
      slack: further slots of a ring: how many tokens at its end a row may take back and write again
        (speculative decoding).
      dtype: of keys and values; None = the compute type.
    """

    slack: int = flax.struct.field(pytree_node=False, default=0)
    dtype: str | None = flax.struct.field(pytree_node=False, default=None)

    def init_layer(self, config, layer, batch_size, num_slots):
        window = None if config.windows is None else config.windows[layer]
        if window is None:
            return DensePolicy(self.dtype).init_layer(config, layer, batch_size, num_slots)
        return init_window_cache(
            config, batch_size, num_slots, window=window, slack=self.slack, dtype=self.dtype
        )
