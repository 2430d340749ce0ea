"""The Triton flash attention of `jax.experimental.pallas.ops.gpu`."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as triton

from pallas_kernels.attention.scores import Scores
from pallas_kernels.blocks import largest_block
from pallas_kernels.dispatch import Body, Unsupported

_MOST, _LEAST = 64, 16


def plan(q, k, v, *, how: Scores, block: int | None, interpret: bool) -> Body:
    """The kernel for arguments of these shapes; T is cut into the largest blocks up to 64."""
    time, width = q.shape[1], q.shape[-1]
    if q.size == 0:
        return Unsupported("there are no tokens")
    if how.window is not None or how.softcap is not None:
        return Unsupported("it has no window and no soft cap")
    if width != v.shape[-1]:
        return Unsupported(f"keys of width {width} and values of width {v.shape[-1]}")
    block = largest_block(time, _MOST, _LEAST) if block is None else block
    if block is None or time % block or block & (block - 1) or block < _LEAST:
        return Unsupported(f"{time} tokens are no multiple of a block of {block or _LEAST}")
    sizes = triton.BlockSizes(
        block_q=block,
        block_k=block,
        block_q_dkv=min(block, 32),
        block_kv_dkv=min(block, 32),
        block_q_dq=min(block, 32),
        block_kv_dq=min(block, 32),
    )

    def body(q, k, v, segment_ids):
        group = q.shape[3]
        # The kernel knows no shared key heads.
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        out = triton.mha(
            q.reshape(*q.shape[:2], -1, width),
            k,
            v,
            segment_ids,
            sm_scale=how.scale,
            causal=how.causal,
            block_sizes=sizes,
            interpret=interpret,
        )
        return out.reshape(q.shape)

    return body
