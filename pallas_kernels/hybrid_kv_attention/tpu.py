"""The kernel for TPUs: one walk over the blocks of all heads, long ones and short ones.

The grid is the list of all blocks of a row: those of the adaptive heads, then of the consistent
ones. Prefetched tables say which head a step belongs to. While a step is of one kind, the block of
the other stays where it is and is not read again; nor is anything behind the end of a head.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Body, Unsupported
from pallas_kernels.hybrid_kv_attention.reference import HIDDEN

_SUBLANES, _LANES = 8, 128
_MOST_ROWS, _MOST_TOKENS = 64, 8192
_BLOCK_BYTES = 32 << 20  # Of both copies of all blocks of keys and values.
_VMEM = 64 << 20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tokens of a step.

    Attributes:
      adaptive, consistent: of heads of either kind, all slots or a multiple of 128.
    """

    adaptive: int
    consistent: int


def plan(
    *,
    adaptive_slots: int,
    consistent_slots: int,
    rows: int,
    token_bytes: int,
    blocks: Blocks | None = None,
) -> Blocks | Unsupported:
    """Sizes of blocks for these shapes.

    All slots of a head up to 8192, else 8192 (the last block may be partly empty), or less where
    two copies of the blocks of both kinds do not fit 32 MiB, or rows are many (their scores are
    held too).

    Args:
      adaptive_slots, consistent_slots: Sa, Sc; 0 where there is no head of the kind.
      rows: T G, queries of a key head.
      token_bytes: of a key and a value.
      blocks: overrides the choice.

    Raises:
      ValueError: `blocks` do not fit the shapes.
    """
    if rows > _MOST_ROWS:
        return Unsupported(f"{rows} queries of one key head are more than {_MOST_ROWS}")
    if blocks is not None:
        for name, size, slots in (
            ("adaptive", blocks.adaptive, adaptive_slots),
            ("consistent", blocks.consistent, consistent_slots),
        ):
            if slots and size != slots and (size < 1 or size % _LANES or size > slots):
                raise ValueError(
                    f"hybrid_kv_attention: blocks.{name}={size} must be {slots}, or a multiple of "
                    f"{_LANES} below it."
                )
        return blocks
    padded = -(-rows // _SUBLANES) * _SUBLANES
    most = min(_MOST_TOKENS, _BLOCK_BYTES // 4 // token_bytes, _MOST_TOKENS * 16 // padded)
    most = most // _LANES * _LANES
    return Blocks(adaptive=min(adaptive_slots, most), consistent=min(consistent_slots, most))


def body(
    adaptive_q,
    consistent_q,
    adaptive_k,
    adaptive_v,
    consistent_k,
    consistent_v,
    adaptive_lengths,
    consistent_lengths,
    *,
    scale: float,
    softcap: float | None,
    blocks: Blocks | None,
    interpret: bool | pltpu.InterpretParams,
) -> Body:
    """The kernel for arguments of these shapes."""
    batch, time, _, queries, width = adaptive_q.shape
    counts = (adaptive_k.shape[1], consistent_k.shape[1])
    slots = [
        k.shape[2] if n else 0 for k, n in zip((adaptive_k, consistent_k), counts, strict=True)
    ]
    value_width, rows = adaptive_v.shape[-1], time * queries
    if batch * rows * width * value_width == 0:
        return Unsupported("there are no queries")
    for count, size, name in zip(counts, slots, ("adaptive", "consistent"), strict=True):
        if count and not size:
            return Unsupported(f"{name} heads have no slots")
    sizes = plan(
        adaptive_slots=slots[0],
        consistent_slots=slots[1],
        rows=rows,
        token_bytes=width * adaptive_k.dtype.itemsize + value_width * adaptive_v.dtype.itemsize,
        blocks=blocks,
    )
    if isinstance(sizes, Unsupported):
        return sizes

    def run(adaptive_q, consistent_q, *arrays):
        caches, lengths = arrays[:4], jnp.concatenate(arrays[4:], axis=1).astype(jnp.int32)
        q = jnp.concatenate([adaptive_q, consistent_q], axis=2).astype(jnp.float32) * scale
        q = q.transpose(0, 2, 1, 3, 4).reshape(batch, sum(counts), rows, width)
        q = jnp.pad(q, [(0, 0), (0, 0), (0, -rows % _SUBLANES), (0, 0)])
        groups = [
            _Group(*caches[2 * i : 2 * i + 2], sum(counts[:i]), size)
            for i, size in enumerate((sizes.adaptive, sizes.consistent))
            if counts[i]
        ]
        out = _call(lengths, q, groups, time, queries, softcap, adaptive_q.dtype, interpret)
        out = out[:, :, :rows].reshape(batch, sum(counts), time, queries, value_width)
        out = out.transpose(0, 2, 1, 3, 4)
        return out[:, :, : counts[0]], out[:, :, counts[0] :]

    return run


@dataclasses.dataclass(frozen=True)
class _Group:
    """Heads of one kind: their cache, the number of the first one, tokens of a block."""

    k: jax.Array
    v: jax.Array
    start: int
    tokens: int

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    @property
    def steps(self) -> int:
        return -(-self.slots // self.tokens)


def _call(lengths, q, groups: list[_Group], time, queries, softcap, dtype, interpret):
    batch, heads, rows, width = q.shape
    value_width = groups[0].v.shape[-1]
    walk = [(g.start + h, i) for g in groups for h in range(g.heads) for i in range(g.steps)]
    head_of, block_of = (np.array(x, np.int32) for x in zip(*walk, strict=True))

    def at(group, b, s, lengths, head_of, block_of):
        """The block of this kind that lies ready at a step."""
        head = head_of[s]
        own = jnp.clip(head - group.start, 0, group.heads - 1)
        live = jnp.clip(lengths[b, group.start + own] - 1, 0, group.slots - 1)
        last = jax.lax.div(live, group.tokens)
        block = jnp.where(head >= group.start + group.heads, last, jnp.minimum(block_of[s], last))
        return b, own, jnp.where(head < group.start, 0, block), 0

    def of_head(b, s, lengths, head_of, block_of):
        return b, head_of[s], 0, 0

    in_specs = [pl.BlockSpec((1, 1, rows, width), of_head)]
    for group in groups:
        index = functools.partial(at, group)
        in_specs.append(pl.BlockSpec((1, 1, group.tokens, width), index))
        in_specs.append(pl.BlockSpec((1, 1, group.tokens, value_width), index))
    caches = [x for group in groups for x in (group.k, group.v)]
    products = batch * rows * sum(g.heads * g.slots for g in groups)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            groups=[(g.start, g.heads, g.slots) for g in groups],
            time=time,
            queries=queries,
            softcap=softcap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, len(walk)),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, 1, rows, value_width), of_head),
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, value_width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, value_width), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM,
            # Block indices are clamped by construction.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * (width + value_width),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in caches) + 2 * q.size * 4,
            transcendentals=products,
        ),
        name="hybrid_kv_attention_tpu",
        interpret=interpret,
    )(lengths, jnp.asarray(head_of), jnp.asarray(block_of), q, *caches)


def _kernel(lengths, head_of, block_of, q_ref, *refs, groups, time, queries, softcap):
    *caches, out_ref, top_ref, total_ref, sum_ref = refs
    row, step = pl.program_id(0), pl.program_id(1)
    head, block = head_of[step], block_of[step]
    length = lengths[row, head]
    for number, (start, heads, slots) in enumerate(groups):
        k_ref, v_ref = caches[2 * number : 2 * number + 2]
        left = length - block * k_ref.shape[2]

        @pl.when((head >= start) & (head < start + heads) & ((block == 0) | (left > 0)))
        def _(k_ref=k_ref, v_ref=v_ref, left=left, slots=slots):
            partial = slots % k_ref.shape[2] != 0
            top, total, summed = _attend(
                q_ref[0, 0],
                k_ref[0, 0],
                v_ref[0, 0],
                left,
                slots - block * k_ref.shape[2] if partial else None,
                time,
                queries,
                softcap,
            )
            first = block == 0
            before = jnp.where(first, HIDDEN, top_ref[...])
            above = jnp.maximum(before, top)
            kept, new = jnp.where(first, 0.0, jnp.exp(before - above)), jnp.exp(top - above)
            total = jnp.where(first, 0.0, total_ref[...] * kept) + total * new
            summed = jnp.where(first, 0.0, sum_ref[...] * kept) + summed * new
            top_ref[...], total_ref[...], sum_ref[...] = above, total, summed
            # Where everything is hidden, all weights are of equal size.
            out = jnp.where(above > HIDDEN / 2, summed / total, 0)
            out_ref[0, 0] = out.astype(out_ref.dtype)


def _attend(q, k, v, left, stored, time, queries, softcap):
    """(top score, sum of weights, of weighted values) of a block with `left` visible tokens.

    Behind `stored` tokens, if that is given, lies anything, even NaN.
    """
    exact = k.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else None
    score = jax.lax.dot_general(
        q.astype(k.dtype),
        k,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if softcap is not None:
        score = softcap * jnp.tanh(score * (1 / softcap))
    # Row t G + g is of query t, which does not see the T - 1 - t last tokens.
    row = jax.lax.broadcasted_iota(jnp.int32, (score.shape[0], 1), 0)
    end = left - (time - 1) + sum((row >= t * queries).astype(jnp.int32) for t in range(1, time))
    score = jnp.where(jax.lax.broadcasted_iota(jnp.int32, score.shape, 1) < end, score, HIDDEN)
    top = score.max(axis=1, keepdims=True)
    weight = jnp.exp(score - top)
    if stored is not None:
        v = jnp.where(jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < stored, v, 0)
    exact = v.dtype == jnp.float32
    summed = jnp.dot(
        weight.astype(v.dtype),
        v,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    return top, weight.sum(axis=1, keepdims=True), summed
