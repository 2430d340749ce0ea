"""Blocks for JAX's grouped product on TPUs, megablox."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.moe.reference import Matmul

_SUBLANES, _LANES = 16, 128
_MOST_ROWS, _MOST_WIDTH = 512, 1024


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks of a product; the widths need not divide those of the matrices.

    Attributes:
      rows: a multiple of 16.
      d_in, d_out: rows and columns of a matrix, multiples of 128.
    """

    rows: int
    d_in: int
    d_out: int


def plan(rows: int, groups: int, d_in: int, d_out: int) -> Blocks:
    """Sizes of blocks for these shapes.

    A block of rows that lies in two groups is multiplied twice, so it is no larger than a group is
    on average (a power of two from 64 to 512, no more than there are); blocks of matrices are up to
    1024 x 1024, as large as both copies fit into the memory that a TPU gives a kernel by itself.
    """
    average = max(rows // groups, 64)
    block = min(1 << (average.bit_length() - 1), _MOST_ROWS)
    block = min(block, -(-rows // _SUBLANES) * _SUBLANES)

    def width(size: int) -> int:
        return min(_MOST_WIDTH, -(-size // _LANES) * _LANES)

    return Blocks(block, width(d_in), width(d_out))


def matmul(
    x: jax.Array | jax.ShapeDtypeStruct,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    blocks: Blocks | None,
    interpret: bool,
) -> Matmul | Unsupported:
    """The product for arguments like these; also for others (the way back of a feed-forward).

    Raises:
      ValueError: `blocks` that no kernel has.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return Unsupported(f"it multiplies bfloat16 and float32, not {x.dtype}")
    if weights.size == 0:
        return Unsupported("there is nothing to multiply")
    if blocks is not None:
        for name, size, unit in (
            ("rows", blocks.rows, _SUBLANES),
            ("d_in", blocks.d_in, _LANES),
            ("d_out", blocks.d_out, _LANES),
        ):
            if size < unit or size % unit:
                raise ValueError(f"grouped_matmul: blocks.{name}={size}: no multiple of {unit}.")

    def run(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        rows = x.shape[0]
        sizes = blocks or plan(rows, *weights.shape)
        padded = jnp.pad(x, [(0, -rows % sizes.rows), (0, 0)])
        tiling = (sizes.rows, sizes.d_in, sizes.d_out)
        # By position: a function with its own derivative takes these no other way.
        out = gmm(padded, weights, group_sizes, x.dtype, tiling, None, None, False, interpret)
        return out[:rows]

    return run
