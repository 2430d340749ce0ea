"""The kernel for TPUs: blocks of packed tokens, read once for all queries of a key head.

A step of the grid holds a block of a few key heads; `tpu_kernel.py` says what is done with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Body, Unsupported
from pallas_kernels.quantized_kv_attention.layout import BLOCK
from pallas_kernels.quantized_kv_attention.reference import visible_recent
from pallas_kernels.quantized_kv_attention.tpu_kernel import kernel

_SUBLANES, _LANES = 8, 128
_MOST_ROWS, _MOST_TOKENS, _MOST_WIDTH = 64, 8192, 256
_UNROLLED = 16384  # Tokens times heads of a step of 8 rows: each 128 of them are code of their own.
_BLOCK_BYTES = 16 << 20  # Of both copies of all packed blocks.
_VMEM = 64 << 20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What one step of the grid holds.

    Attributes:
      tokens: packed tokens, all slots or a multiple of 128 and of eight groups that divides them.
      heads: key heads, a divisor of theirs.
      rows: queries times query heads of a key head, a multiple of 8 that divides all of them
        (rounded up to a multiple of 8).
    """

    tokens: int
    heads: int
    rows: int


def plan(
    *,
    slots: int,
    kv_heads: int,
    rows: int,
    width: int,
    value_width: int,
    group: int,
    bytes_per_token: float,
    blocks: Blocks | None = None,
) -> Blocks | Unsupported:
    """Sizes of blocks for these shapes.

    As many tokens as divide the slots, up to 8192, and then heads, up to four, so that the fixed
    part of a step (some 500 instruction bundles of scalar work and waiting, by the compiler's
    count) is spread over 16,384 tokens; less where there are more than 8 rows, for all tokens of a
    step are unrolled, or where bytes do not fit. Rows beyond 64 are cut: every cut reads the packed
    tokens again.

    Args:
      slots, kv_heads, rows: S, K, T G.
      width, value_width: D, E.
      group: tokens that share a scale of keys.
      bytes_per_token: of one key head, packed, with scales.
      blocks: overrides the choice.

    Raises:
      ValueError: `blocks` do not fit the shapes.
    """
    if width % 32 or value_width % 32 or (value_width > _LANES and value_width % _LANES):
        return Unsupported(f"it has no heads of width {width} with values of width {value_width}")
    if width > _MOST_WIDTH:
        return Unsupported(f"products of heads of width {width} may exceed 32 bits")
    if max(group, BLOCK) % min(group, BLOCK):
        return Unsupported(f"groups of {group} tokens do not fit blocks of {BLOCK}")
    # Blocks of scales are eight rows, or all of them.
    unit = math.lcm(BLOCK, group * _SUBLANES)
    padded = -(-rows // _SUBLANES) * _SUBLANES
    if blocks is not None:
        for name, size, whole, steps in (
            ("tokens", blocks.tokens, slots, slots if blocks.tokens == slots else unit),
            ("heads", blocks.heads, kv_heads, 1),
            ("rows", blocks.rows, padded, _SUBLANES),
        ):
            if size < 1 or whole % size or size % steps:
                raise ValueError(
                    f"quantized_kv_attention: blocks.{name}={size} must divide {whole}, in "
                    f"multiples of {steps}."
                )
        return blocks
    cut = _largest(padded, _MOST_ROWS, _SUBLANES)
    budget = min(_UNROLLED * _SUBLANES // cut, int(_BLOCK_BYTES / 2 / bytes_per_token))
    most = min(budget, _MOST_TOKENS)
    tokens = slots if slots <= most else _largest(slots, most, unit)
    if tokens is None:
        return Unsupported(f"{slots} slots are no multiple of {unit}, nor do they fit one block")
    heads = _largest(kv_heads, max(1, min(4, budget // tokens)), 1)
    return Blocks(tokens=tokens, heads=heads, rows=cut)


def _largest(whole: int, most: int, unit: int) -> int | None:
    """The largest multiple of unit up to `most` that divides `whole`."""
    for size in range(most // unit * unit, 0, -unit):
        if whole % size == 0:
            return size
    return None


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
    interpret: bool | pltpu.InterpretParams,
) -> Body:
    """The kernel for arguments of these shapes."""
    batch, time, kv_heads, queries, width = q.shape
    slots, value_width = key_codes.shape[-1], value_codes.shape[-1]
    if q.size == 0 or value_width == 0:
        return Unsupported("there are no queries")
    parts = (key_codes, key_scales, value_codes, value_scales)
    sizes = plan(
        slots=slots,
        kv_heads=kv_heads,
        rows=time * queries,
        width=width,
        value_width=value_width,
        group=slots // key_scales.shape[-2],
        bytes_per_token=sum(x.size * x.dtype.itemsize for x in parts) / (batch * kv_heads * slots),
        blocks=blocks,
    )
    if isinstance(sizes, Unsupported):
        return sizes

    def run(q, *arrays):
        rows = time * queries
        padding = -rows % _SUBLANES
        packed, (recent_k, recent_v, lengths, recent_positions, positions) = arrays[:4], arrays[4:]
        flat = q.astype(jnp.float32).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows, width)
        flat = jnp.pad(flat * scale, [(0, 0), (0, 0), (0, padding), (0, 0)])
        seen = visible_recent(recent_positions, positions).astype(jnp.int32)
        seen = jnp.pad(jnp.repeat(seen, queries, axis=1), [(0, 0), (0, padding), (0, 0)])
        if recent_k.shape[2] == 0:  # A block needs something to hold.
            recent_k, recent_v = (
                jnp.pad(x, [(0, 0)] * 2 + [(0, _SUBLANES), (0, 0)]) for x in (recent_k, recent_v)
            )
            seen = jnp.pad(seen, [(0, 0), (0, 0), (0, _SUBLANES)])
        arguments = (lengths.astype(jnp.int32), flat, *packed, recent_k, recent_v, seen)
        out = _call(arguments, sizes, softcap, q.dtype, interpret)
        out = out[:, :, :rows].reshape(batch, kv_heads, time, queries, value_width)
        return out.transpose(0, 2, 1, 3, 4)

    return run


def _call(arguments, sizes: Blocks, softcap, dtype, interpret):
    _, q, key_codes, key_scales, value_codes, value_scales, recent_k, recent_v, _ = arguments
    batch, kv_heads, rows, width = q.shape
    slots, value_width, recent = key_codes.shape[-1], value_codes.shape[-1], recent_k.shape[2]
    groups = key_scales.shape[-2] * sizes.tokens // slots
    value_groups = value_scales.shape[-2]
    key_rows, value_rows = key_codes.shape[-2], value_codes.shape[-2] * sizes.tokens // slots
    heads, cut, tokens = sizes.heads, sizes.rows, sizes.tokens
    digit_rows = value_groups * 4 * cut * -(-value_width // _LANES)

    def at(b, i, lengths):
        """The block of step i; where all tokens are hidden the last one before, still there."""
        live = jnp.clip(lengths[b] - 1, 0, slots - 1)
        return jnp.minimum(i, jax.lax.div(live, tokens))

    def spec(shape, index):
        return pl.BlockSpec(shape, index)

    grid = (batch, kv_heads // heads, rows // cut, slots // tokens)
    in_specs = [
        spec((1, heads, cut, width), lambda b, h, r, i, n: (b, h, r, 0)),
        spec((1, heads, key_rows, tokens), lambda b, h, r, i, n: (b, h, 0, at(b, i, n))),
        spec((1, heads, 2, groups, width), lambda b, h, r, i, n: (b, h, 0, at(b, i, n), 0)),
        spec((1, heads, value_rows, value_width), lambda b, h, r, i, n: (b, h, at(b, i, n), 0)),
        spec((1, heads, 2, value_groups, tokens), lambda b, h, r, i, n: (b, h, 0, 0, at(b, i, n))),
        spec((1, heads, recent, width), lambda b, h, r, i, n: (b, h, 0, 0)),
        spec((1, heads, recent, value_width), lambda b, h, r, i, n: (b, h, 0, 0)),
        spec((1, cut, recent), lambda b, h, r, i, n: (b, r, 0)),
    ]
    packed = (key_codes, key_scales, value_codes, value_scales, recent_k, recent_v)
    moved = sum(x.size * x.dtype.itemsize for x in packed) * grid[2]
    products = batch * kv_heads * rows * (slots + recent) * (width + value_width)
    step = functools.partial(
        kernel,
        key_bits=key_rows * 8 // width,
        value_bits=value_rows * 8 // tokens,
        softcap=softcap,
    )
    return pl.pallas_call(
        step,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=spec((1, heads, cut, value_width), lambda b, h, r, i, n: (b, h, r, 0)),
            scratch_shapes=[
                pltpu.VMEM((heads, cut, 1), jnp.float32),
                pltpu.VMEM((heads, cut, 1), jnp.float32),
                pltpu.VMEM((heads, cut, value_width), jnp.float32),
                pltpu.VMEM((heads * digit_rows, min(value_width, _LANES)), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, value_width), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM,
            # Block indices are clamped by construction; the checks are a tenth of a step.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products,
            bytes_accessed=moved + 2 * q.size * 4,
            transcendentals=batch * kv_heads * rows * (slots + recent),
        ),
        name="quantized_kv_attention_tpu",
        interpret=interpret,
    )(*arguments)
