"""The kernel for NVIDIA GPUs, in Triton.

Decoding has few rows and many tokens, so the tokens of a row are split among several programs
(Flash-Decoding), each with its own softmax; XLA merges what they return with the recent tokens. A
program unpacks tiles of tokens that share one scale, and folds that scale into its queries.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import Body, Unsupported
from pallas_kernels.quantized_kv_attention.layout import BLOCK
from pallas_kernels.quantized_kv_attention.reference import HIDDEN, visible_recent

_LEAST_TILE = 16  # Of a product of Triton, in each dimension.
_MOST_ROWS = 64
_PROGRAMS = 264  # Twice the multiprocessors of an H100 or H200.
_TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut.

    Attributes:
      splits: programs that share the tokens of a row.
      rows: queries times query heads of a key head, a power of two from 16.
    """

    splits: int
    rows: int


def plan(
    *,
    batch: int,
    slots: int,
    kv_heads: int,
    rows: int,
    width: int,
    value_width: int,
    key_bits: int,
    value_bits: int,
    group: int,
    value_group: int,
    blocks: Blocks | None = None,
) -> Blocks | Unsupported:
    """Sizes for these shapes.

    Rows are cut into powers of two up to 64, and tokens into as many parts as give each
    multiprocessor two programs, but no more than there are blocks of 128 tokens.

    Args:
      batch, slots, kv_heads, rows: B, S, K, T G.
      width, value_width: D, E.
      key_bits, value_bits: 2, 4 or 8.
      group, value_group: tokens that share a scale of keys, channels that share one of values.
      blocks: overrides the choice.

    Raises:
      ValueError: `blocks` are no such sizes.
    """
    contracted = width * key_bits // 8
    for name, size in (("width", contracted), ("group of values", value_group)):
        if size & (size - 1) or size < _LEAST_TILE:
            return Unsupported(f"{name}: {size} is no power of two from {_LEAST_TILE}")
    if group & (group - 1) or group < _LEAST_TILE:
        return Unsupported(f"groups of {group} tokens are no power of two from {_LEAST_TILE}")
    if blocks is not None:
        size = blocks.rows
        if blocks.splits < 1 or size & (size - 1) or size < _LEAST_TILE:
            raise ValueError(
                f"quantized_kv_attention: {blocks}: expected splits from 1 and rows a power of two "
                f"from {_LEAST_TILE}."
            )
        return blocks
    cut = _LEAST_TILE
    while cut < min(rows, _MOST_ROWS):
        cut *= 2
    programs = batch * kv_heads * -(-rows // cut)
    return Blocks(splits=min(slots // BLOCK, -(-_PROGRAMS // programs)), rows=cut)


def body(
    q,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    recent_k,
    recent_v,
    lengths,
    recent_positions,
    positions,
    *,
    scale: float,
    softcap: float | None,
    blocks: Blocks | None,
    interpret,
) -> Body:
    """The kernel for arguments of these shapes."""
    batch, time, kv_heads, queries, width = q.shape
    slots, value_width = key_codes.shape[-1], value_codes.shape[-1]
    if q.size == 0 or value_width == 0:
        return Unsupported("there are no queries")
    rows = time * queries
    sizes = plan(
        batch=batch,
        slots=slots,
        kv_heads=kv_heads,
        rows=rows,
        width=width,
        value_width=value_width,
        key_bits=key_codes.shape[-2] * 8 // width,
        value_bits=value_codes.shape[-2] * 8 // slots,
        group=slots // key_scales.shape[-2],
        value_group=value_width // value_scales.shape[-2],
        blocks=blocks,
    )
    if isinstance(sizes, Unsupported):
        return sizes

    def run(q, *arrays):
        packed, (recent_k, recent_v, lengths, recent_positions, positions) = arrays[:4], arrays[4:]
        flat = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows, width)
        padding = -rows % sizes.rows
        padded = jnp.pad(flat, [(0, 0), (0, 0), (0, padding), (0, 0)])
        padded = padded.astype(jnp.float32) * scale
        top, total, summed = _call(
            (lengths.astype(jnp.int32), padded, *packed), sizes, softcap, q.dtype, interpret
        )
        parts = [(top[:, :, :, :rows], total[:, :, :, :rows], summed[:, :, :, :rows])]
        if recent_k.shape[2]:
            seen = visible_recent(recent_positions, positions)
            seen = jnp.repeat(seen, queries, axis=1)[:, None]
            parts.append(_recent(flat, recent_k, recent_v, seen, scale, softcap))
        top, total, summed = (jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True))
        factor = jnp.exp(top - top.max(axis=2, keepdims=True))
        total = jnp.maximum((factor * total).sum(axis=2), _TINY)
        out = (factor[..., None] * summed).sum(axis=2) / total[..., None]
        out = out.astype(q.dtype).reshape(batch, kv_heads, time, queries, value_width)
        return out.transpose(0, 2, 1, 3, 4)

    return run


def _recent(q, k, v, seen, scale, softcap):
    """(top score, sum of weights, of weighted values) of the recent tokens, [B, K, 1, rows, ..]."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    score = product("bknd,bkwd->bknw", q, k.astype(q.dtype)) * scale
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    score = jnp.where(seen, score, HIDDEN)
    top = score.max(axis=-1)
    weight = jnp.where(seen, jnp.exp(score - top[..., None]), 0)
    summed = product("bknw,bkwe->bkne", weight.astype(q.dtype), v.astype(q.dtype))
    return top[:, :, None], weight.sum(axis=-1)[:, :, None], summed[:, :, None]


def _call(arguments, sizes: Blocks, softcap, dtype, interpret):
    _, q, key_codes, key_scales, value_codes, value_scales = arguments
    batch, kv_heads, rows, width = q.shape
    slots, value_width = key_codes.shape[-1], value_codes.shape[-1]
    cut, splits = sizes.rows, sizes.splits
    cuts = rows // cut

    def whole(x):
        return pl.BlockSpec(
            (None, None, *x.shape[2:]), lambda b, h, i: (b, h) + (0,) * (x.ndim - 2)
        )

    def part(*trailing):
        """Of the result, one block a split and cut."""
        return pl.BlockSpec(
            (None, None, None, cut, *trailing),
            lambda b, h, i: (
                (b, h, jax.lax.div(i, cuts), jax.lax.rem(i, cuts)) + (0,) * len(trailing)
            ),
        )

    lead = (batch, kv_heads, splits, rows)
    moved = sum(x.size * x.dtype.itemsize for x in arguments[2:]) * cuts
    kernel = functools.partial(
        _kernel,
        key_bits=key_codes.shape[-2] * 8 // width,
        value_bits=value_codes.shape[-2] * 8 // slots,
        splits=splits,
        cuts=cuts,
        softcap=softcap,
        # Sixteen bits hold stored numbers exactly; products of float32 queries stay float32.
        dtype=jnp.float32 if dtype == jnp.float32 else jnp.bfloat16,
    )
    return pl.pallas_call(
        kernel,
        grid=(batch, kv_heads, splits * cuts),
        in_specs=[
            pl.BlockSpec((None,), lambda b, h, i: (b,)),
            pl.BlockSpec((None, None, cut, width), lambda b, h, i: (b, h, jax.lax.rem(i, cuts), 0)),
            *(whole(x) for x in arguments[2:]),
        ],
        out_specs=(part(), part(), part(value_width)),
        out_shape=(
            jax.ShapeDtypeStruct(lead, jnp.float32),
            jax.ShapeDtypeStruct(lead, jnp.float32),
            jax.ShapeDtypeStruct((*lead, value_width), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * kv_heads * rows * slots * (width + value_width),
            bytes_accessed=moved + 4 * q.size + 4 * batch * kv_heads * splits * rows * value_width,
            transcendentals=batch * kv_heads * rows * slots,
        ),
        name="quantized_kv_attention_gpu",
        interpret=bool(interpret),
    )(*arguments)


def _kernel(
    length_ref,
    q_ref,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    top_ref,
    total_ref,
    sum_ref,
    *,
    key_bits: int,
    value_bits: int,
    splits: int,
    cuts: int,
    softcap: float | None,
    dtype,
):
    rows, (byte_rows, slots) = q_ref.shape[0], key_codes.shape
    group, groups = slots // key_scales.shape[1], value_scales.shape[1]
    share = value_codes.shape[-1] // groups
    packed_rows = BLOCK * value_bits // 8  # Bytes of a block of values, tokens of one plane.
    tile = min(packed_rows, group)
    length = length_ref[()]
    blocks = jax.lax.div(length + (BLOCK - 1), BLOCK)
    each = jax.lax.div(blocks + (splits - 1), splits)
    start = jax.lax.div(pl.program_id(2), cuts) * each
    queries = [q_ref[:, pl.ds(j * byte_rows, byte_rows)] for j in range(8 // key_bits)]
    dot = functools.partial(plgpu.dot, allow_tf32=False if dtype == jnp.float32 else None)

    def scores(token, number):
        stored = key_codes[:, pl.ds(token, tile)].astype(jnp.int32)
        score = jnp.zeros((rows, tile), jnp.float32)
        for j, q in enumerate(queries):
            at = pl.ds(j * byte_rows, byte_rows)
            scale = key_scales[0, number, at].astype(jnp.float32)
            low = key_scales[1, number, at].astype(jnp.float32)
            levels = _plane(stored, j, key_bits).astype(dtype)
            score += dot((q * scale[None]).astype(dtype), levels)
            score += (q * low[None]).sum(axis=1)[:, None]
        if softcap is not None:
            score = softcap * jnp.tanh(score / softcap)
        visible = token + jax.lax.iota(jnp.int32, tile) < length
        return jnp.where(visible[None], score, HIDDEN)

    def block(index, carry):
        for first in range(0, BLOCK, tile):
            top, total, sums = carry
            token = index * BLOCK + first
            score = scores(token, jax.lax.div(token, group))
            above = jnp.maximum(top, score.max(axis=1))
            weight, kept = jnp.exp(score - above[:, None]), jnp.exp(top - above)
            plane, row = divmod(first, packed_rows)
            for i in range(groups):
                at = (i, pl.ds(token, tile))
                scale = value_scales[0, *at].astype(jnp.float32)
                low = value_scales[1, *at].astype(jnp.float32)
                stored = value_codes[
                    pl.ds(index * packed_rows + row, tile), pl.ds(i * share, share)
                ].astype(jnp.int32)
                levels = _plane(stored, plane, value_bits).astype(dtype)
                summed = dot((weight * scale[None]).astype(dtype), levels)
                summed += (weight * low[None]).sum(axis=1)[:, None]
                sums = (*sums[:i], sums[i] * kept[:, None] + summed, *sums[i + 1 :])
            carry = above, total * kept + weight.sum(axis=1), sums
        return carry

    nothing = (
        jnp.full((rows,), HIDDEN, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, share), jnp.float32) for _ in range(groups)),
    )
    top, total, sums = jax.lax.fori_loop(start, jnp.minimum(start + each, blocks), block, nothing)
    top_ref[:], total_ref[:] = top, total
    for i in range(groups):
        sum_ref[:, pl.ds(i * share, share)] = sums[i]


def _plane(stored, plane, bits):
    if bits == 8:
        return stored
    return (stored >> (bits * plane)) & (2**bits - 1)
