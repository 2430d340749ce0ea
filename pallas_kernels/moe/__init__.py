"""Experts of a mixture on the tokens that chose them: permutation, grouped products, and back.

The products themselves are JAX's: `megablox.gmm` on a TPU, `jax.lax.ragged_dot` elsewhere.

    experts [T, K] choices of T tokens       sorted by expert: T K rows, group_sizes [E]
    rows of each expert times its matrices   one grouped product a matrix, nothing dropped or padded
    sum_k weights[t, k] * result             gathered back, in float32

Letters: T tokens, K choices a token, E experts, D model width, F hidden width of an expert, M rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.moe import reference, tpu
from pallas_kernels.partition import Partition

__all__ = ["expert_feedforward", "grouped_matmul", "tpu"]

_ON_GPU = dispatch.Unsupported(
    "the grouped products of JAX for GPUs take shapes of one generation of them; ragged_dot is used"
)


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    blocks: tpu.Blocks | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    partition: Partition | None = None,
) -> Float[Array, "M F"]:
    """x[start_e : start_e + group_sizes[e]] @ weights[e] for the groups of rows of each e.

    Accumulated in float32; differentiable in x and weights.

    Args:
      x: rows, those of a group beside each other, the groups in order.
      weights: a matrix for each group; of the type of x.
      group_sizes: rows of each group, int32. Their sum is at most M; rows beyond it give zeros.
      blocks: of the TPU kernel; None = `tpu.plan`'s choice.
      implementation, interpret: see `pallas_kernels.dispatch`; Pallas' interpreter.
      partition: mesh axes of "d" (partial products are summed) and "f".

    Raises:
      ValueError: shapes or types that do not fit together.
    """
    _check_matrices("grouped_matmul", x, weights=weights)
    if group_sizes.shape != weights.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"grouped_matmul: group_sizes {group_sizes.dtype}{list(group_sizes.shape)}, expected "
            f"int32[{weights.shape[0]}]."
        )

    def kernels(*parts: Array) -> dispatch.Kernels:
        matmul = tpu.matmul(*parts, blocks=blocks, interpret=interpret)
        if isinstance(matmul, dispatch.Unsupported):
            return dispatch.Kernels(tpu=matmul, gpu=_ON_GPU)
        body = functools.partial(reference.grouped_matmul, matmul=matmul)
        return dispatch.Kernels(tpu=body, gpu=_ON_GPU)

    return dispatch.call(
        "grouped_matmul",
        x,
        weights,
        group_sizes,
        xla=reference.grouped_matmul,
        kernels=kernels,
        rule="m d, e d f, e -> m f",
        whole=("m", "e"),
        summed=("d",),
        implementation=implementation,
        partition=partition,
    )


def expert_feedforward(
    x: Float[Array, "T D"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    gate: Float[Array, "E D F"] | None = None,
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    blocks: tpu.Blocks | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    partition: Partition | None = None,
) -> Float[Array, "T D"]:
    """sum_k weights_k (activation(x gate_e) * (x up_e)) down_e with e = experts_k.

    Without `gate`, activation(x up_e) down_e. Differentiable in x, weights and the matrices. With
    "e" cut over a mesh axis every device runs its own experts on the tokens of its part of "t",
    which must be the same on all devices of that axis, and the results are summed.

    Args:
      x: tokens.
      experts: the experts that they chose, 0 .. E - 1.
      weights: of the choices.
      up, down, gate: matrices of the experts, of the type of x.
      activation: elementwise.
      blocks: of the TPU kernel; None = `tpu.plan`'s choice.
      implementation, interpret: see `pallas_kernels.dispatch`; Pallas' interpreter.
      partition: mesh axes of "t" (tokens), "e" (experts) and "f" (hidden width).

    Raises:
      ValueError: shapes or types that do not fit together.
    """
    name = "expert_feedforward"
    matrices = {"up": up} if gate is None else {"up": up, "gate": gate}
    _check_matrices(name, x, **matrices)
    for key, found, expected in (
        ("experts", experts.shape, (x.shape[0], experts.shape[-1])),
        ("weights", weights.shape, experts.shape),
        ("down", down.shape, (up.shape[0], up.shape[2], up.shape[1])),
        ("gate", up.shape if gate is None else gate.shape, up.shape),
    ):
        if tuple(found) != tuple(expected):
            raise ValueError(f"{name}: {key} {tuple(found)}, expected {tuple(expected)}.")
    if down.dtype != x.dtype:
        raise ValueError(f"{name}: down is {down.dtype}, expected {x.dtype} as x.")
    run = functools.partial(
        reference.expert_feedforward, num_experts=up.shape[0], activation=activation
    )

    def kernels(x: Array, experts: Array, weights: Array, ids: Array, *mats: Array):
        rows = jax.ShapeDtypeStruct((experts.size, x.shape[1]), x.dtype)
        matmul = tpu.matmul(rows, mats[0], ids, blocks=blocks, interpret=interpret)
        if isinstance(matmul, dispatch.Unsupported):
            return dispatch.Kernels(tpu=matmul, gpu=_ON_GPU)
        return dispatch.Kernels(tpu=functools.partial(run, matmul=matmul), gpu=_ON_GPU)

    return dispatch.call(
        name,
        x,
        experts,
        weights,
        # Tells a device which experts are its own.
        jnp.arange(up.shape[0]),
        up,
        down,
        *(() if gate is None else (gate,)),
        xla=run,
        kernels=kernels,
        rule="t d, t k, t k, e, e d f, e f d" + (", e d f" if gate is not None else "") + " -> t d",
        whole=("d", "k"),
        summed=("e", "f"),
        implementation=implementation,
        partition=partition,
    )


def _check_matrices(name: str, x: Array, **matrices: Array) -> None:
    if x.ndim != 2:
        raise ValueError(f"{name}: x {x.shape}, expected [rows, width].")
    for key, matrix in matrices.items():
        if matrix.ndim != 3 or matrix.shape[1] != x.shape[1]:
            raise ValueError(
                f"{name}: {key} {matrix.shape}, expected [experts, {x.shape[1]}, width]."
            )
        if matrix.dtype != x.dtype:
            raise ValueError(f"{name}: {key} is {matrix.dtype}, expected {x.dtype} as x.")
