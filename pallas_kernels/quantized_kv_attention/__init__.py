"""Attention over a cache of keys and values in 2, 4 or 8 bits, with recent tokens as they are.

Decoding reads the whole cache for every token, and reading it is what decoding costs. The kernels
read the packed bytes and unpack them on the chip, so a cache of few bits is read in proportion to
its bits (KIVI, arXiv:2402.02750; KVTuner, arXiv:2502.04420, mixes widths of keys and values).

    keys 0 .. n - 1 of a row and their values are packed (`PackedKeys`, `PackedValues`)
    W recent tokens are exact, each with its position, in any order (a ring); empty places are -1
    query t sees all n packed tokens, and recent tokens at or before its own position

Letters: B batch, T queries, H query heads, K key heads, G = H / K, D, E widths of keys and values,
S packed slots, W recent slots.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.partition import Partition
from pallas_kernels.quantized_kv_attention import gpu, tpu
from pallas_kernels.quantized_kv_attention.layout import (
    BLOCK,
    WIDTHS,
    PackedKeys,
    PackedValues,
    empty_keys,
    empty_values,
    write_keys,
    write_values,
)
from pallas_kernels.quantized_kv_attention.reference import reference

__all__ = [
    "BLOCK",
    "PackedKeys",
    "PackedValues",
    "empty_keys",
    "empty_values",
    "quantized_kv_attention",
    "reference",
    "write_keys",
    "write_values",
]

_RULE = (
    "b t k g d, b k rk s, b k two gk d, b k rv e, b k two gv s, b k w d, b k w e, b, b w, b t"
    " -> b t k g e"
)


def quantized_kv_attention(
    q: Float[Array, "B T H D"],
    keys: PackedKeys,
    values: PackedValues,
    recent_k: Float[Array, "B K W D"],
    recent_v: Float[Array, "B K W E"],
    lengths: Int[Array, " B"],
    recent_positions: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    blocks: tpu.Blocks | gpu.Blocks | None = None,
    implementation: Implementation | None = None,
    interpret: bool | pltpu.InterpretParams = False,
    partition: Partition | None = None,
) -> Float[Array, "B T H E"]:
    """softmax(scale q.k, capped) v over packed and recent tokens, with the softmax in float32.

    What lies in hidden slots must be finite. Queries that see nothing give zeros. There is no
    derivative.

    Args:
      q: T = 1 in decoding, or a chunk of a prompt; key head j serves the queries' heads jG .. jG +
        G - 1.
      keys, values: packed tokens, at the slots of their positions.
      recent_k, recent_v: exact tokens; W may be 0.
      lengths: n, packed tokens of each row. All are visible to all queries.
      recent_positions: positions of the recent tokens, -1 = empty. Those with a packed twin (a
        position below n) must be -1.
      positions: of the queries.
      scale: factor on q.k; None = D^-0.5.
      softcap: c of c tanh(x / c) on the scores.
      blocks: of the kernel, `tpu.Blocks` or `gpu.Blocks`; None = `plan`'s choice. Blocks of one
        platform leave the other to its own choice.
      implementation, interpret: see `pallas_kernels.dispatch`; Pallas' interpreters.
      partition: mesh axes of "b" (batch) and "k" (key heads), see `pallas_kernels.partition`.

    Raises:
      ValueError: shapes or types that do not fit together.
    """
    _check(q, keys, values, recent_k, recent_v, lengths, recent_positions, positions)
    batch, time, heads, width = q.shape
    kv_heads = keys.codes.shape[1]
    options: dict[str, Any] = {
        "scale": width**-0.5 if scale is None else scale,
        "softcap": softcap,
    }
    if softcap is not None and softcap <= 0:
        raise ValueError(f"quantized_kv_attention: softcap={softcap} must be positive.")

    def kernels(*parts: Array) -> dispatch.Kernels:
        chosen = {"interpret": interpret, **options}
        return dispatch.Kernels(
            tpu=tpu.body(
                *parts, blocks=blocks if isinstance(blocks, tpu.Blocks) else None, **chosen
            ),
            gpu=gpu.body(
                *parts, blocks=blocks if isinstance(blocks, gpu.Blocks) else None, **chosen
            ),
        )

    out = dispatch.call(
        "quantized_kv_attention",
        q.reshape(batch, time, kv_heads, heads // kv_heads, width),
        keys.codes,
        keys.scales,
        values.codes,
        values.scales,
        recent_k,
        recent_v,
        lengths,
        recent_positions,
        positions,
        xla=functools.partial(reference, **options),
        kernels=kernels,
        rule=_RULE,
        whole=("t", "g", "d", "rk", "s", "two", "gk", "rv", "e", "gv", "w"),
        implementation=implementation,
        partition=partition,
    )
    return out.reshape(batch, time, heads, values.codes.shape[-1])


def _check(q, keys, values, recent_k, recent_v, lengths, recent_positions, positions) -> None:
    name = "quantized_kv_attention"
    if not isinstance(keys, PackedKeys) or not isinstance(values, PackedValues):
        raise ValueError(
            f"{name}: keys {type(keys).__name__}, values {type(values).__name__}: expected "
            "PackedKeys and PackedValues."
        )
    batch, time, heads, width = q.shape
    kv_heads, value_width = keys.codes.shape[1], values.codes.shape[-1]
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads do not share {kv_heads} key heads.")
    if keys.codes.size == 0:
        raise ValueError(f"{name}: keys.codes {keys.codes.shape} hold nothing.")
    lead, slots, recent = (batch, kv_heads), keys.tokens, recent_k.shape[-2]
    expected = {
        "keys.codes": (keys.codes.shape, (*lead, width * keys.bits // 8, slots)),
        "keys.scales": (keys.scales.shape, (*lead, 2, keys.scales.shape[-2], width)),
        "values.codes": (values.codes.shape, (*lead, slots * values.bits // 8, value_width)),
        "values.scales": (values.scales.shape, (*lead, 2, values.scales.shape[-2], slots)),
        "recent_k": (recent_k.shape, (*lead, recent, width)),
        "recent_v": (recent_v.shape, (*lead, recent, value_width)),
        "lengths": (lengths.shape, (batch,)),
        "recent_positions": (recent_positions.shape, (batch, recent)),
        "positions": (positions.shape, (batch, time)),
    }
    for key, (found, wanted) in expected.items():
        if tuple(found) != tuple(wanted):
            raise ValueError(f"{name}: {key} {tuple(found)}, expected {tuple(wanted)}.")
    for key, bits in (("keys", keys.bits), ("values", values.bits)):
        if bits not in WIDTHS:
            raise ValueError(f"{name}: {key} of {bits} bits, expected 2, 4 or 8.")
    for key, array in (("keys", keys.codes), ("values", values.codes)):
        if array.dtype != jnp.int8:
            raise ValueError(f"{name}: {key}.codes is {array.dtype}, expected int8.")
    if slots % BLOCK:
        raise ValueError(f"{name}: {slots} packed slots are no multiple of {BLOCK}.")
    if slots and slots % keys.scales.shape[-2]:
        raise ValueError(
            f"{name}: {keys.scales.shape[-2]} groups do not divide the {slots} slots of keys."
        )
    if value_width % values.scales.shape[-2]:
        raise ValueError(
            f"{name}: {values.scales.shape[-2]} groups do not divide the {value_width} channels "
            "of values."
        )
