"""How keys and values of few bits lie in memory, so that kernels read them without rearranging.

A number is x ~ stored * scale + low: `stored` is a byte's bits from 0 to 2^b - 1 for 2 and 4 bits,
and a signed byte for 8. Keys share scale and low along g tokens of a channel, values along g
channels of a token (KIVI, arXiv:2402.02750).

Matrix units multiply by a matrix whose rows are the dimension that is summed over. That is the
channels for keys and the tokens for values, so keys are stored as [D, S] and values as [S, E], and
numbers share a byte along the first axis. Rows are packed in planes, so that a shift and a mask of
whole words unpack them, and in blocks of D rows (keys) or 128 rows (values):

    bits b j .. b j + b - 1 of byte row r of a block of n rows hold row j (n b / 8) + r, j = 0, 1 ..

Both are appended to without touching other tokens: a group of keys is g columns, the value of a
token shares its bytes with up to three others of its block.

Letters: B batch, K key heads, S tokens, D, E widths of keys and values, g group, M new tokens.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

BLOCK = 128  # Tokens of values that are packed together.
WIDTHS = (2, 4, 8)


@flax.struct.dataclass
class PackedKeys:
    """Keys of few bits, scaled along tokens.

    Attributes:
      codes: bytes [B, K, D b / 8, S].
      scales: [B, K, 2, S / g, D]: scale, then low.
    """

    codes: Int8[Array, "*heads rows S"]
    scales: Float[Array, "*heads 2 groups D"]

    @property
    def bits(self) -> int:
        """b."""
        return self.codes.shape[-2] * 8 // self.scales.shape[-1]

    @property
    def tokens(self) -> int:
        """S."""
        return self.codes.shape[-1]

    @property
    def group(self) -> int:
        """Tokens that share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-2]

    def dequantize(self) -> Float[Array, "*heads S D"]:
        """The float32 keys that the bytes stand for."""
        stored = unpack_rows(self.codes, self.bits).swapaxes(-1, -2).astype(jnp.float32)
        scale, low = (
            jnp.repeat(self.scales[..., i, :, :].astype(jnp.float32), self.group, axis=-2)
            for i in range(2)
        )
        return stored * scale + low


@flax.struct.dataclass
class PackedValues:
    """Values of few bits, scaled along channels.

    Attributes:
      codes: bytes [B, K, S b / 8, E].
      scales: [B, K, 2, E / g, S]: scale, then low.
    """

    codes: Int8[Array, "*heads rows E"]
    scales: Float[Array, "*heads 2 groups S"]

    @property
    def bits(self) -> int:
        """b."""
        return self.codes.shape[-2] * 8 // self.scales.shape[-1]

    @property
    def tokens(self) -> int:
        """S."""
        return self.scales.shape[-1]

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-2]

    def dequantize(self) -> Float[Array, "*heads S E"]:
        """The float32 values that the bytes stand for."""
        blocks = self.codes.reshape(
            *self.codes.shape[:-2], -1, BLOCK * self.bits // 8, self.codes.shape[-1]
        )
        stored = unpack_rows(blocks, self.bits)
        stored = stored.reshape(*self.codes.shape[:-2], -1, self.codes.shape[-1])
        scale, low = (
            jnp.repeat(self.scales[..., i, :, :].swapaxes(-1, -2), self.group, axis=-1)
            for i in range(2)
        )
        return stored.astype(jnp.float32) * scale.astype(jnp.float32) + low.astype(jnp.float32)


def empty_keys(
    batch: int, heads: int, tokens: int, width: int, *, bits: int, group: int, dtype="float32"
) -> PackedKeys:
    """Keys to be written into; `dtype` is that of scales.

    Raises:
      ValueError: bits other than 2, 4, 8, a group that does not divide the tokens, a width that
        does not fill bytes.
    """
    _check_bits(bits)
    if group < 1 or tokens % group:
        raise ValueError(f"group={group} must divide the {tokens} tokens.")
    if width % (8 // bits):
        raise ValueError(f"width={width} does not fill bytes of {bits}-bit numbers.")
    return PackedKeys(
        codes=jnp.zeros((batch, heads, width * bits // 8, tokens), jnp.int8),
        scales=jnp.zeros((batch, heads, 2, tokens // group, width), dtype),
    )


def empty_values(
    batch: int, heads: int, tokens: int, width: int, *, bits: int, group: int, dtype="float32"
) -> PackedValues:
    """Values to be written into; `dtype` is that of scales.

    Raises:
      ValueError: bits other than 2, 4, 8, tokens that are no multiple of 128, a group that does not
        divide the width.
    """
    _check_bits(bits)
    if tokens % BLOCK:
        raise ValueError(f"{tokens} tokens are no multiple of {BLOCK}.")
    if group < 1 or width % group:
        raise ValueError(f"group={group} must divide the {width} channels.")
    return PackedValues(
        codes=jnp.zeros((batch, heads, tokens * bits // 8, width), jnp.int8),
        scales=jnp.zeros((batch, heads, 2, width // group, tokens), dtype),
    )


def write_keys(
    keys: PackedKeys,
    groups: Int[Array, "B m"],
    codes: Int8[Array, "B K m*g D"],
    scale: Float[Array, "B K m D"],
    zero: Float[Array, "B K m D"],
) -> PackedKeys:
    """Puts whole groups of tokens into their places.

    Args:
      keys: where to.
      groups: numbers of the groups, in units of g tokens; one beyond the last writes nothing.
      codes: signed, -2^(b-1) .. 2^(b-1) - 1, of the tokens of these groups in turn.
      scale, zero: x ~ (codes + zero) scale.
    """
    size = keys.group
    columns = pack_rows(_stored(codes, keys.bits).swapaxes(-1, -2), keys.bits)
    at = (groups[:, :, None] * size + jnp.arange(size)).reshape(len(groups), -1)
    pairs = _scale_and_low(scale, zero, keys.bits).astype(keys.scales.dtype)
    put = jax.vmap(lambda old, at, new: old.at[..., at].set(new, mode="drop"))
    put_rows = jax.vmap(lambda old, at, new: old.at[..., at, :].set(new, mode="drop"))
    return PackedKeys(put(keys.codes, at, columns), put_rows(keys.scales, groups, pairs))


def write_values(
    values: PackedValues,
    tokens: Int[Array, "B M"],
    codes: Int8[Array, "B K M E"],
    scale: Float[Array, "B K M groups"],
    zero: Float[Array, "B K M groups"],
) -> PackedValues:
    """Puts the values of single tokens into their places.

    Args:
      values: where to.
      tokens: their places, all different; one beyond the last writes nothing.
      codes: signed, -2^(b-1) .. 2^(b-1) - 1.
      scale, zero: x ~ (codes + zero) scale.
    """
    bits, planes, slots = values.bits, 8 // values.bits, values.tokens
    rows = BLOCK // planes
    within = tokens % BLOCK
    at = tokens // BLOCK * rows + within % rows
    plane = within // rows
    levels = _stored(codes, bits).astype(jnp.uint8)
    put = jax.vmap(lambda old, at, new: old.at[:, at].set(new, mode="drop"))
    take = jax.vmap(lambda old, at: old.at[:, at].get(mode="clip"))
    packed = jax.lax.bitcast_convert_type(values.codes, jnp.uint8)

    def merged(packed, plane, at):
        """Tokens of different bytes."""
        shift = (plane * bits).astype(jnp.uint8)[:, None, :, None]
        keep = ~(jnp.uint8(2**bits - 1) << shift)
        return put(packed, at, (take(packed, at) & keep) | (levels << shift))

    beyond = values.codes.shape[-2]
    at = jnp.where((tokens >= 0) & (tokens < slots), at, beyond)
    if tokens.shape[1] == 1 or planes == 1:
        packed = merged(packed, plane, at)
    else:  # Tokens of one plane never share a byte.
        for number in range(planes):
            packed = merged(packed, plane, jnp.where(plane == number, at, beyond))
    pairs = _scale_and_low(scale, zero, bits).swapaxes(-1, -2).astype(values.scales.dtype)
    scales = jax.vmap(lambda old, at, new: old.at[..., at].set(new, mode="drop"))(
        values.scales, jnp.where((tokens >= 0) & (tokens < slots), tokens, slots), pairs
    )
    return PackedValues(jax.lax.bitcast_convert_type(packed, jnp.int8), scales)


def pack_rows(stored: Int8[Array, "*blocks n L"], bits: int) -> Int8[Array, "*blocks bytes L"]:
    """Packs the n rows of blocks in planes."""
    planes = 8 // bits
    if planes == 1:
        return stored
    rows = stored.shape[-2] // planes
    levels = stored.astype(jnp.uint8).reshape(*stored.shape[:-2], planes, rows, stored.shape[-1])
    shifts = (jnp.arange(planes) * bits).astype(jnp.uint8)[:, None, None]
    packed = (levels << shifts).sum(axis=-3, dtype=jnp.uint8)
    return jax.lax.bitcast_convert_type(packed, jnp.int8)


def unpack_rows(packed: Int8[Array, "*blocks bytes L"], bits: int) -> Int8[Array, "*blocks n L"]:
    """The stored numbers of `pack_rows`."""
    planes = 8 // bits
    if planes == 1:
        return packed
    raw = jax.lax.bitcast_convert_type(packed, jnp.uint8)
    levels = [(raw >> jnp.uint8(bits * j)) & jnp.uint8(2**bits - 1) for j in range(planes)]
    return jnp.concatenate(levels, axis=-2).astype(jnp.int8)


def _stored(codes: Int8[Array, "*shape"], bits: int) -> Int8[Array, "*shape"]:
    return (
        codes.astype(jnp.int8) if bits == 8 else codes.astype(jnp.int8) + jnp.int8(2 ** (bits - 1))
    )


def _scale_and_low(scale: Array, zero: Array, bits: int) -> Array:
    shift = 0 if bits == 8 else 2 ** (bits - 1)
    low = (zero.astype(jnp.float32) - shift) * scale.astype(jnp.float32)
    return jnp.stack([scale.astype(jnp.float32), low], axis=2)


def _check_bits(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} cannot be packed: expected 2, 4 or 8.")
