"""KIVI: keys and values of a cache in 2, 4 or 8 bits (Liu et al., 2024, arXiv:2402.02750).

Keys have a few channels of large magnitude, values have none. So keys are rounded per channel, in
groups of g tokens, and values per token, in groups of g channels; each group has a scale and a zero
point. A group of tokens must be complete before it can be rounded: the last tokens stay as they
are.

    n tokens:  keys    0 .. floor(n / R) R - 1 are codes, the rest (fewer than R) is exact
               values  0 .. n - R - 1 are codes, the last R are exact

New tokens are exact in the pass that brings them. A whole prompt therefore attends to itself as
without KIVI; in chunks, later ones see the codes of those before. Codes are never touched again.
Rows are of any lengths: everything follows from the position of a row's new tokens. A row cannot
take tokens back.

Letters: B batch, T new tokens, S slots, R residual, K key heads, D, E head widths, g group.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.kv_cache import (
    CachePolicy,
    KVCache,
    cache_attention,
    cache_widths,
    new_tokens,
    visible,
    write_slots,
)
from jaxllm.quantization.affine import PackedGroups, Zero, empty_groups, quantize_packed


def _static(default: Any) -> Any:
    return flax.struct.field(pytree_node=False, default=default)


@flax.struct.dataclass
class KIVICache(KVCache):
    """Codes of the past, and the last R tokens as they are.

    Attributes:
      k: groups [B, K, S / g, D] of g tokens.
      v: groups [B, K, S, E / g] of g channels.
      recent_k, recent_v: [B, K, R, D] and [B, K, R, E]; the token of position p is at p mod R.
      zero: kind of zero point (static).
    """

    k: PackedGroups
    v: PackedGroups
    recent_k: Float[Array, "B K R D"]
    recent_v: Float[Array, "B K R E"]
    zero: Zero = _static("int")

    def attend(self, q, k, v, context):
        positions, real = context.shared.positions, new_tokens(context)
        k, v = (x.swapaxes(1, 2).astype(self.recent_k.dtype) for x in (k, v))
        begin = positions[:, :1]
        end = begin + real.sum(axis=1, keepdims=True)
        keys, values = self._dense(begin)
        slots = keys.shape[2]
        target = jnp.where(real, positions, slots)
        keys, values = write_slots(keys, target, k), write_slots(values, target, v)
        mask = visible(positions, jnp.arange(slots)[None], context.window)
        out = cache_attention(q, keys, values, mask, context)

        residual = self.recent_k.shape[2]
        last = jnp.where(real & (positions >= end - residual), positions % residual, residual)
        return out, self.replace(
            k=self._round_keys(keys, begin, end, q.shape[1]),
            v=self._round_values(values, begin, end, q.shape[1]),
            recent_k=write_slots(self.recent_k, last, k),
            recent_v=write_slots(self.recent_v, last, v),
        )

    def _dense(self, length: Int[Array, "B 1"]) -> tuple[Array, Array]:
        """Keys and values [B, K, S, width] by position of rows of these lengths, as they are seen.

        Behind the end of a row lies anything.
        """
        dtype, residual = self.recent_k.dtype, self.recent_k.shape[2]
        keys = self.k.dequantize().swapaxes(-1, -2).astype(dtype)
        keys = keys.reshape(*keys.shape[:2], -1, keys.shape[-1])
        values = self.v.dequantize().astype(dtype)
        values = values.reshape(*values.shape[:3], -1)
        slots = keys.shape[2]
        at = length - 1 - (length - 1 - jnp.arange(residual)) % residual
        coded = length // residual * residual
        keys = write_slots(keys, jnp.where(at >= coded, at, slots), self.recent_k)
        return keys, write_slots(values, jnp.where(at >= 0, at, slots), self.recent_v)

    def _round_keys(self, keys, begin, end, time) -> PackedGroups:
        """Codes with the blocks of R tokens that are complete now."""
        residual, group = self.recent_k.shape[2], self.k.size
        groups = (time + residual - 1) // residual * (residual // group)
        number = begin // residual * (residual // group) + jnp.arange(groups)

        def rounded() -> PackedGroups:
            tokens = (number[:, :, None] * group + jnp.arange(group)).reshape(len(keys), -1)
            exact = _take_slots(keys, tokens).reshape(*keys.shape[:2], groups, group, -1)
            return quantize_packed(exact.swapaxes(-1, -2), self.k.bits, self.zero)

        def nothing() -> PackedGroups:
            shape = (*keys.shape[:2], groups, keys.shape[-1])
            return empty_groups(shape, group, self.k.bits)

        # Few decoding steps complete a block.
        complete = end // residual > begin // residual
        new = jax.lax.cond(complete.any(), rounded, nothing)
        done = number < end // residual * (residual // group)
        return _write_groups(self.k, jnp.where(done, number, self.k.scale.shape[2]), new)

    def _round_values(self, values, begin, end, time) -> PackedGroups:
        """Codes with the values that are among the last R no longer."""
        residual, slots = self.recent_v.shape[2], values.shape[2]
        leaving = begin - residual + jnp.arange(time)
        exact = _take_slots(values, leaving)
        new = quantize_packed(
            exact.reshape(*exact.shape[:3], -1, self.v.size), self.v.bits, self.zero
        )
        gone = (leaving >= 0) & (leaving < end - residual)
        return _write_groups(self.v, jnp.where(gone, leaving, slots), new)


def _take_slots(x: Float[Array, "B K S D"], slots: Int[Array, "B M"]) -> Float[Array, "B K M D"]:
    return jax.vmap(lambda row, index: row.at[:, index].get(mode="clip"))(x, slots)


def _write_groups(groups: PackedGroups, slots: Int[Array, "B M"], new: PackedGroups):
    return jax.tree.map(lambda old, fresh: write_slots(old, slots, fresh), groups, new)


@flax.struct.dataclass
class KIVIPolicy(CachePolicy):
    """KIVI in every layer.

    Attributes:
      key_bits, value_bits: 2, 4 or 8.
      key_group: tokens that share the scale of a channel.
      value_group: channels that share the scale of a token; None = the whole head.
      residual: R, a multiple of `key_group` (the paper's 128).
      zero: kind of zero point, see `affine.quantize`.
      dtype: of the exact tokens; None = the compute type.
    """

    key_bits: int = _static(2)
    value_bits: int = _static(2)
    key_group: int = _static(32)
    value_group: int | None = _static(32)
    residual: int = _static(128)
    zero: Zero = _static("int")
    dtype: str | None = _static(None)

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) not in (2, 4, 8):
                raise ValueError(f"{name}={getattr(self, name)} must be 2, 4 or 8.")
        if self.key_group < 1 or self.residual < 1 or self.residual % self.key_group:
            raise ValueError(
                f"residual={self.residual} must be a positive multiple of "
                f"key_group={self.key_group}."
            )

    def init_layer(self, config, layer, batch_size, num_slots):
        key_dim, value_dim = cache_widths(config)
        value_group = value_dim if self.value_group is None else self.value_group
        if value_group < 1 or value_dim % value_group:
            raise ValueError(f"value_group={value_group} does not divide the {value_dim} channels.")
        heads = (batch_size, config.num_kv_heads)
        slots = -(-num_slots // self.residual) * self.residual
        dtype = config.compute_dtype if self.dtype is None else self.dtype
        return KIVICache(
            k=empty_groups(
                (*heads, slots // self.key_group, key_dim), self.key_group, self.key_bits
            ),
            v=empty_groups((*heads, slots, value_dim // value_group), value_group, self.value_bits),
            recent_k=jnp.zeros((*heads, self.residual, key_dim), dtype),
            recent_v=jnp.zeros((*heads, self.residual, value_dim), dtype),
            zero=self.zero,
        )
