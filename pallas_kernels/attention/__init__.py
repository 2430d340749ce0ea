"""Attention of a sequence to itself whose memory does not grow with the square of its length.

The kernels are JAX's own: splash attention on TPUs, the Triton flash attention on GPUs. They hold
the scores of one block at a time (FlashAttention, arXiv:2205.14135) and skip blocks that the mask
hides. This is their one front: grouped heads, windows, packed sequences, soft caps, and the
reference for everything that a kernel does not do.

Letters: B batch, T tokens, H query heads, K key heads, G = H / K, D, E widths of keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention import gpu, tpu
from pallas_kernels.attention.reference import reference
from pallas_kernels.attention.scores import Scores
from pallas_kernels.dispatch import Implementation
from pallas_kernels.partition import Partition

__all__ = ["attention"]

_RULE = "b t k g d, b t k d, b t k e, b t -> b t k g e"
_GRADIENT_RULE = "b t k g d, b t k d, b t k e, b t, b t k g e -> b t k g d, b t k d, b t k e"


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K E"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    partition: Partition | None = None,
) -> Float[Array, "B T H E"]:
    """softmax(scale q.k, capped, where the mask shows it) v, per head, with the softmax in float32.

    The first derivative is one in reverse mode; the backward pass runs the forward kernel once
    more, so that only q, k and v are kept.

    Args:
      q, k, v: key head j serves the query heads jG .. jG + G - 1.
      segment_ids: tokens see those of their own segment only; None = one segment.
      scale: factor on q.k; None = D^-0.5.
      causal: tokens see none that come later.
      window: tokens see so many, themselves included, backwards (causal only).
      softcap: c of c tanh(x / c) on the scores.
      block: tokens of queries and keys that are held at once; None = the largest power of two up to
        512 (TPU) or 64 (GPU) that divides T.
      implementation, interpret: see `pallas_kernels.dispatch`; Pallas' interpreter.
      partition: mesh axes of "b" (batch) and "k" (key heads), see `pallas_kernels.partition`.

    Raises:
      ValueError: shapes that do not fit together, a window without a causal mask.
    """
    batch, time, heads, width = q.shape
    kv_heads = k.shape[2]
    if k.shape != (batch, time, kv_heads, width) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape}: expected [B, T, H, D], "
            "[B, T, K, D], [B, T, K, E]."
        )
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not share {kv_heads} key heads.")
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    elif segment_ids.shape != (batch, time):
        raise ValueError(f"attention: segment_ids {segment_ids.shape}, expected {(batch, time)}.")
    scale = width**-0.5 if scale is None else scale
    call = _Call(
        Scores(scale, causal, window, softcap),
        block,
        implementation,
        interpret,
        None if partition is None else tuple(sorted(partition.items())),
    )
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, width)
    out = _attention(call, grouped, k, v, segment_ids)
    return out.reshape(batch, time, heads, v.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static facts of one call."""

    how: Scores
    block: int | None
    implementation: Implementation | None
    interpret: bool
    partition: tuple[tuple[str, Any], ...] | None

    def bodies(self) -> tuple[Any, Any]:
        """(reference, planner of the kernels) of (q, k, v, segment ids)."""

        def kernels(q, k, v, *_):
            options = {"how": self.how, "block": self.block, "interpret": self.interpret}
            return dispatch.Kernels(
                tpu=tpu.plan(q, k, v, **options), gpu=gpu.plan(q, k, v, **options)
            )

        return functools.partial(reference, how=self.how), kernels

    def run(self, rule: str, xla: Any, kernels: Any, *arguments: Array) -> Any:
        return dispatch.call(
            "attention",
            *arguments,
            xla=xla,
            kernels=kernels,
            rule=rule,
            whole=("t", "g", "d", "e"),
            implementation=self.implementation,
            partition=None if self.partition is None else dict(self.partition),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, q, k, v, segment_ids):
    return call.run(_RULE, *call.bodies(), q, k, v, segment_ids)


def _forward(call: _Call, q, k, v, segment_ids):
    return _attention(call, q, k, v, segment_ids), (q, k, v, segment_ids)


def _backward(call: _Call, residuals, gradient):
    xla, kernels = call.bodies()

    def planned(*arguments):
        bodies = kernels(*arguments)
        return dispatch.Kernels(tpu=_gradient(bodies.tpu), gpu=_gradient(bodies.gpu))

    return *call.run(_GRADIENT_RULE, _gradient(xla), planned, *residuals, gradient), None


def _gradient(body: dispatch.Body) -> dispatch.Body:
    """(dq, dk, dv) of (q, k, v, segment ids, gradient) by the body's own derivative."""
    if isinstance(body, dispatch.Unsupported):
        return body

    def run(q, k, v, segment_ids, gradient):
        _, pull = jax.vjp(lambda *qkv: body(*qkv, segment_ids), q, k, v)
        return pull(gradient)

    return run


_attention.defvjp(_forward, _backward)
