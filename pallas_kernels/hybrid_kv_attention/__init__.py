"""Decoding over a cache of two kinds of heads: adaptive ones keep all tokens, consistent ones few.

CateKV (ICML 2025) finds heads whose attention is consistent from query to query, and keeps for
those only the tokens that they look at. Both kinds are stored as what they are, two rectangles of
different lengths, and one kernel goes through the blocks of both: its work is the sum of the heads'
lengths, not their number times the longest.

Letters: B batch, T queries, H query heads, A adaptive, C consistent key heads, G = H / (A + C), D,
E widths of keys and values, Sa, Sc slots of both kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.hybrid_kv_attention import tpu
from pallas_kernels.hybrid_kv_attention.reference import reference
from pallas_kernels.partition import Partition

__all__ = ["hybrid_kv_attention", "reference"]

_RULE = (
    "b t k g d, b t k g d, b k sa d, b k sa e, b k sc d, b k sc e, b k, b k -> b t k g e, b t k g e"
)


def hybrid_kv_attention(
    q: Float[Array, "B T H D"],
    adaptive_k: Float[Array, "B A Sa D"],
    adaptive_v: Float[Array, "B A Sa E"],
    consistent_k: Float[Array, "B C Sc D"],
    consistent_v: Float[Array, "B C Sc E"],
    adaptive_lengths: Int[Array, "B A"],
    consistent_lengths: Int[Array, "B C"],
    *,
    adaptive_heads: Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    blocks: tpu.Blocks | None = None,
    implementation: Implementation | None = None,
    interpret: bool | pltpu.InterpretParams = False,
    partition: Partition | None = None,
) -> Float[Array, "B T H E"]:
    """softmax(scale q.k, capped) v over the kept tokens of each head, with softmax in float32.

    The tokens of a head are in its first slots, in any order but for the last T, which are the
    queries' own: query t sees all but the T - 1 - t last. Queries that see nothing give zeros; what
    lies in hidden slots must be finite. There is no derivative.

    Args:
      q: key head j, in the model's order, serves the query heads jG .. jG + G - 1.
      adaptive_k, adaptive_v, consistent_k, consistent_v: heads of both kinds; A or C may be 0.
      adaptive_lengths, consistent_lengths: kept tokens of each head, the new ones included.
      adaptive_heads: numbers of the adaptive key heads in the order of `adaptive_k`; those left
        are consistent, in ascending order. None = the first A (free: nothing is reordered).
      scale: factor on q.k; None = D^-0.5.
      softcap: c of c tanh(x / c) on the scores.
      blocks: of the TPU kernel; None = `tpu.plan`'s choice.
      implementation, interpret: see `pallas_kernels.dispatch`; Pallas' interpreters.
      partition: mesh axes of "b" (batch) and "k" (key heads: those of each kind are cut alike, in
        this order), see `pallas_kernels.partition`.

    Raises:
      ValueError: shapes that do not fit together, heads that are not each named at most once.
    """
    _check(
        q,
        adaptive_k,
        adaptive_v,
        consistent_k,
        consistent_v,
        adaptive_lengths,
        consistent_lengths,
        softcap,
    )
    batch, time, heads, width = q.shape
    adaptive, kv_heads = adaptive_k.shape[1], adaptive_k.shape[1] + consistent_k.shape[1]
    order = _order(adaptive_heads, adaptive, kv_heads)
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, width)
    if order is not None:
        grouped = grouped[:, :, order]
    options: dict[str, Any] = {
        "scale": width**-0.5 if scale is None else scale,
        "softcap": softcap,
    }

    def kernels(*parts: Array) -> dispatch.Kernels:
        return dispatch.Kernels(
            tpu=tpu.body(*parts, blocks=blocks, interpret=interpret, **options),
            gpu=dispatch.Unsupported("it is written for TPUs only"),
        )

    parts = dispatch.call(
        "hybrid_kv_attention",
        grouped[:, :, :adaptive],
        grouped[:, :, adaptive:],
        adaptive_k,
        adaptive_v,
        consistent_k,
        consistent_v,
        adaptive_lengths,
        consistent_lengths,
        xla=functools.partial(reference, **options),
        kernels=kernels,
        rule=_RULE,
        whole=("t", "g", "d", "e", "sa", "sc"),
        implementation=implementation,
        partition=partition,
    )
    out = jnp.concatenate(parts, axis=2)
    if order is not None:
        out = out[:, :, np.argsort(order)]
    return out.reshape(batch, time, heads, adaptive_v.shape[-1])


def _order(adaptive_heads: Sequence[int] | None, adaptive: int, kv_heads: int) -> np.ndarray | None:
    """Key heads as they are stored; None = as they are."""
    if adaptive_heads is None:
        return None
    named = list(adaptive_heads)
    if (
        len(named) != adaptive
        or len(set(named)) != adaptive
        or not set(named) <= set(range(kv_heads))
    ):
        raise ValueError(
            f"hybrid_kv_attention: adaptive_heads={named}: expected {adaptive} different ones of "
            f"the {kv_heads} key heads."
        )
    order = np.array(named + [h for h in range(kv_heads) if h not in named], np.int32)
    return None if (order == np.arange(kv_heads)).all() else order


def _check(q, adaptive_k, adaptive_v, consistent_k, consistent_v, lengths_a, lengths_c, softcap):
    name = "hybrid_kv_attention"
    batch, _, heads, width = q.shape
    (adaptive, long), (consistent, short) = adaptive_k.shape[1:3], consistent_k.shape[1:3]
    value_width = adaptive_v.shape[-1]
    for key, found, wanted in (
        ("adaptive_k", adaptive_k.shape, (batch, adaptive, long, width)),
        ("adaptive_v", adaptive_v.shape, (batch, adaptive, long, value_width)),
        ("consistent_k", consistent_k.shape, (batch, consistent, short, width)),
        ("consistent_v", consistent_v.shape, (batch, consistent, short, value_width)),
        ("adaptive_lengths", lengths_a.shape, (batch, adaptive)),
        ("consistent_lengths", lengths_c.shape, (batch, consistent)),
    ):
        if tuple(found) != tuple(wanted):
            raise ValueError(f"{name}: {key} {tuple(found)}, expected {tuple(wanted)}.")
    kv_heads = adaptive + consistent
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads do not share {kv_heads} key heads.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap={softcap} must be positive.")
