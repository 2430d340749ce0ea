"""Splash attention of `jax.experimental.pallas.ops.tpu`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels.attention.scores import Scores
from pallas_kernels.blocks import largest_block
from pallas_kernels.dispatch import Body, Unsupported

_LANES = 128
_MOST = 512  # Four float32 blocks of scores and masks, with q, k and v, in the default VMEM.


def plan(q, k, v, *, how: Scores, block: int | None, interpret: bool) -> Body:
    """The kernel for arguments of these shapes; T is cut into the largest blocks up to 512."""
    time, width = q.shape[1], q.shape[-1]
    if q.size == 0:
        return Unsupported("there are no tokens")
    block = largest_block(time, _MOST, _LANES) if block is None else block
    if block is None or time % block or block % _LANES:
        return Unsupported(f"{time} tokens are no multiple of a block of {block or _LANES}")
    if width != v.shape[-1]:
        return Unsupported(f"keys of width {width} and values of width {v.shape[-1]}")

    def body(q, k, v, segment_ids):
        kernel = _kernel(q.shape[2] * q.shape[3], time, block, how, interpret)
        heads_first = (
            (q * jnp.asarray(how.scale, q.dtype))
            .reshape(*q.shape[:2], q.shape[2] * q.shape[3], width)
            .swapaxes(1, 2)
        )
        segments = splash.SegmentIds(q=segment_ids, kv=segment_ids)
        out = jax.vmap(kernel)(heads_first, k.swapaxes(1, 2), v.swapaxes(1, 2), segments)
        return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)

    return body


def _kernel(heads: int, time: int, block: int, how: Scores, interpret: bool) -> Any:
    shape = (time, time)
    if how.window is not None:
        visible: Any = masks.LocalMask(shape, (how.window - 1, 0), 0)
    else:
        visible = masks.CausalMask(shape) if how.causal else masks.FullMask(shape)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([visible] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        attn_logits_soft_cap=how.softcap,
        interpret=interpret,
    )
