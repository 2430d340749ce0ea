"""Rounding of groups of numbers to few bits: x ~ (code + zero) scale, and codes packed into bytes.

One quantiser for caches and weights. A group is the last axis; who wants groups along tokens,
channels or input rows moves that axis there.

Letters: g numbers of a group, n numbers to pack.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

Zero = Literal["int", "float"]
_SMALLEST_RANGE = 1e-5  # Of a group: constant groups must not divide by zero.


class Codes(NamedTuple):
    """x ~ (codes + zero) scale, with codes in [-2^(b-1), 2^(b-1) - 1]."""

    codes: Int[Array, "*groups g"]
    scale: Float[Array, "*groups"]
    zero: Float[Array, "*groups"]

    def dequantize(self) -> Float[Array, "*groups g"]:
        """The float32 numbers that the codes stand for."""
        codes = self.codes.astype(jnp.float32)
        return (codes + self.zero[..., None]) * self.scale[..., None]


def quantize(
    x: Float[Array, "*groups g"],
    bits: int | Int[Array, ""],
    *,
    symmetric: bool = False,
    zero: Zero = "int",
) -> Codes:
    """Rounds each group to 2^bits levels between its least and its greatest number.

    Args:
      x: groups.
      bits: 1 to 8; may be traced, so that several widths can be tried in one program.
      symmetric: levels around 0 up to the largest magnitude, without a zero point.
      zero: "int": the zero point is rounded to a level, so that 0 is one, and rounding what has
        been rounded changes nothing. "float": the least number is a level (KIVI, arXiv:2402.02750).

    Returns:
      int8 codes; float32 scale and zero point, one a group. No number is further from its code than
      half a scale (for "int" to float32 rounding at the ends of the range).
    """
    if zero not in ("int", "float"):
        raise ValueError(f"zero={zero!r} is unknown: expected 'int' or 'float'.")
    x = x.astype(jnp.float32)
    half = 2 ** (bits - 1)
    if symmetric:
        scale = jnp.maximum(jnp.abs(x).max(axis=-1), _SMALLEST_RANGE) / (half - 1)
        point = jnp.zeros_like(scale)
    else:
        low, high = x.min(axis=-1), x.max(axis=-1)
        scale = jnp.maximum(high - low, _SMALLEST_RANGE) / (2 * half - 1)
        point = low / scale + half
        if zero == "int":
            point = jnp.round(low / scale) + half
    codes = jnp.round(x / scale[..., None] - point[..., None])
    return Codes(jnp.clip(codes, -half, half - 1).astype(jnp.int8), scale, point)


def pack(codes: Int[Array, "*groups n"], bits: int) -> UInt8[Array, "*groups bytes"]:
    """Packs signed codes of 2, 4 or 8 bits, the first in the lowest bits; a last byte is filled up.

    Raises:
      ValueError: other widths.
    """
    each = _codes_per_byte(bits)
    levels = codes.astype(jnp.uint8) & (2**bits - 1)
    padding = -codes.shape[-1] % each
    levels = jnp.pad(levels, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    levels = levels.reshape(*codes.shape[:-1], -1, each)
    shifts = jnp.arange(each, dtype=jnp.uint8) * bits
    return (levels << shifts.astype(jnp.uint8)).sum(axis=-1, dtype=jnp.uint8)


def unpack(packed: UInt8[Array, "*groups bytes"], bits: int, size: int) -> Int[Array, "*groups n"]:
    """The int8 codes of `pack`; `size` is n."""
    each = _codes_per_byte(bits)
    shifts = (jnp.arange(each) * bits).astype(jnp.uint8)
    levels = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    levels = levels.reshape(*packed.shape[:-1], -1)[..., :size].astype(jnp.int32)
    return jnp.where(levels >= 2 ** (bits - 1), levels - 2**bits, levels).astype(jnp.int8)


def _codes_per_byte(bits: int) -> int:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits} cannot be packed: expected 2, 4 or 8.")
    return 8 // bits


@flax.struct.dataclass
class PackedGroups:
    """Groups as they are stored.

    Attributes:
      codes: uint8 [..., bytes of a group].
      scale, zero: float32 [...].
      bits, size: of a code; g (static).
    """

    codes: UInt8[Array, "*groups bytes"]
    scale: Float[Array, "*groups"]
    zero: Float[Array, "*groups"]
    bits: int = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)

    def dequantize(self) -> Float[Array, "*groups g"]:
        """The float32 numbers that the codes stand for."""
        return Codes(unpack(self.codes, self.bits, self.size), self.scale, self.zero).dequantize()


def quantize_packed(x: Float[Array, "*groups g"], bits: int, zero: Zero = "int") -> PackedGroups:
    """`quantize`, packed."""
    codes, scale, point = quantize(x, bits, zero=zero)
    return PackedGroups(pack(codes, bits), scale, point, bits, x.shape[-1])


def empty_groups(shape: tuple[int, ...], size: int, bits: int) -> PackedGroups:
    """Groups of zeros, to be written into."""
    width = -(-size // _codes_per_byte(bits))
    return PackedGroups(
        codes=jnp.zeros((*shape, width), jnp.uint8),
        scale=jnp.zeros(shape, jnp.float32),
        zero=jnp.zeros(shape, jnp.float32),
        bits=bits,
        size=size,
    )
