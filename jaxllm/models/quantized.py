"""Weights as int8 or int4 codes with float scales, per output channel or per group of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Axes
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.models.parameters import path_name
from jaxllm.models.weights import Weight


def pack_int4(codes: Int[Array, "... d_in d_out"]) -> UInt8[Array, "... half d_out"]:
    """Packs codes in [-8, 7] two to a byte along the input axis, row 2i in the low nibble.

    Raises:
      ValueError: the input axis is odd.
    """
    if codes.shape[-2] % 2:
        raise ValueError(f"int4 packs pairs of input rows: d_in={codes.shape[-2]} is odd.")
    nibbles = codes.astype(jnp.uint8) & 0xF
    return nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)


def unpack_int4(packed: UInt8[Array, "... half d_out"]) -> Int[Array, "... d_in d_out"]:
    """The int8 codes in [-8, 7] of `pack_int4`."""
    pair = jnp.stack([packed & 0xF, packed >> 4], axis=-2).astype(jnp.int8)
    signed = jnp.where(pair > 7, pair - 16, pair)
    *lead, half, _, d_out = signed.shape
    return signed.reshape(*lead, 2 * half, d_out)


@flax.struct.dataclass
class QuantizedWeight(Weight):
    """Symmetric integer weight: W[i, o] = codes[i, o] * scales[i // group, o].

    Attributes:
      codes: int8 [d_in, d_out], or uint8 [d_in / 2, d_out] with two int4 a byte (`pack_int4`).
      scales: float32 [groups, d_out]; one group = per output channel.
      bits: 8 or 4 (static).
    """

    codes: Array
    scales: Float[Array, "... groups d_out"]
    bits: Literal[4, 8] = flax.struct.field(pytree_node=False, default=8)

    def materialize(self) -> Float[Array, "... d_in d_out"]:
        codes = unpack_int4(self.codes) if self.bits == 4 else self.codes
        *lead, d_in, d_out = codes.shape
        grouped = codes.reshape(*lead, self.scales.shape[-2], -1, d_out).astype(jnp.float32)
        return (grouped * self.scales[..., None, :]).reshape(*lead, d_in, d_out)

    def axes(self, base: Axes) -> QuantizedWeight:
        return self.replace(codes=base, scales=base)


def quantize(
    weight: Float[Array, "... d_in d_out"], bits: Literal[4, 8] = 8, group_size: int | None = None
) -> QuantizedWeight:
    """Rounds a kernel to symmetric codes; the largest magnitude of a group maps to the last code.

    Args:
      weight: the (in, out) kernel; leading axes (layers, experts) are kept.
      bits: 8 or 4.
      group_size: input rows that share a scale; None = all of them.

    Raises:
      ValueError: bits or group size that do not fit.
    """
    d_in = weight.shape[-2]
    group_size = d_in if group_size is None else group_size
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} is not supported: expected 4 or 8.")
    if group_size <= 0 or d_in % group_size:
        raise ValueError(f"group_size={group_size} does not divide d_in={d_in}.")
    *lead, _, d_out = weight.shape
    grouped = weight.astype(jnp.float32).reshape(*lead, d_in // group_size, group_size, d_out)
    largest = 2 ** (bits - 1) - 1
    scales = jnp.abs(grouped).max(axis=-2) / largest
    scales = jnp.where(scales == 0, 1.0, scales)
    codes = jnp.round(grouped / scales[..., None, :]).astype(jnp.int8).reshape(weight.shape)
    return QuantizedWeight(codes=pack_int4(codes) if bits == 4 else codes, scales=scales, bits=bits)


def _in_layers(path: str) -> bool:
    return path.startswith("layers/") and "router" not in path


def quantize_params(
    params: dict[str, Any],
    bits: Literal[4, 8] = 8,
    group_size: int | None = None,
    select: Callable[[str], bool] = _in_layers,
) -> dict[str, Any]:
    """Round-to-nearest quantisation of every selected kernel; the result runs in the same decoder.

    Args:
      params: a parameter tree.
      bits, group_size: as for `quantize`.
      select: decides by path ("layers/0/attention/qkv/q/kernel"); default: all kernels of the
        layers but those of routers.
    """

    def convert(path: Any, leaf: Array) -> Any:
        name = path_name(path)
        if not name.endswith("/kernel") or not select(name):
            return leaf
        return quantize(leaf, bits, group_size)

    return jax.tree_util.tree_map_with_path(convert, params)
