"""Mixture of experts: routing, and the choice between the two ways to run the experts.

Letters: B batch, T time, D model width, E experts, K experts a token, C = E / groups.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models import grouped_experts
from jaxllm.models.config import MoEConfig
from jaxllm.models.context import Context
from jaxllm.models.feedforward import dense_feedforward
from jaxllm.models.inputs import ModelOutputs
from jaxllm.models.linear import linear
from jaxllm.models.placement import active_spec, mesh_axes
from jaxllm.models.weights import FeedForward


def route(
    logits: Float[Array, "... E"], moe: MoEConfig, selection_bias: Float[Array, " E"] | None = None
) -> tuple[Int[Array, "... K"], Float[Array, "... K"]]:
    """Top-K routing in float32: which experts a token goes to, and with what weights.

    Args:
      logits: router logits.
      moe: K, scoring, normalisation, groups, scale.
      selection_bias: added to the scores for the choice only, not to the weights (DeepSeek-V3's
        balancing).

    Returns:
      (experts, weights), both [..., K].
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if selection_bias is None else scores + selection_bias
    if moe.num_groups > 1:
        choice = _mask_groups(choice, moe)
    _, experts = jax.lax.top_k(choice, moe.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.normalize_top_k:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights * moe.routed_scale


def _mask_groups(choice: Float[Array, "... E"], moe: MoEConfig) -> Float[Array, "... E"]:
    """Leaves the experts of the groups whose best expert scores highest (DeepSeek-V2, 2.2.2)."""
    grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
    _, best = jax.lax.top_k(grouped.max(axis=-1), moe.groups_per_token)
    kept = jax.nn.one_hot(best, moe.num_groups).sum(axis=-2) > 0
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def router_statistics(
    logits: Float[Array, "B T E"],
    experts: Int[Array, "B T K"],
    segment_ids: Int[Array, "B T"] | None,
) -> dict[str, Array]:
    """Load and losses of a router over the real tokens.

    Returns:
      load: [E] fraction of the routed choices that went to each expert.
      load_balance: E * sum_e load_e * mean probability_e, 1 when balanced (Switch,
        arXiv:2101.03961, eq. 4).
      router_z: mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, eq. 5).
    """
    logits = logits.astype(jnp.float32)
    num_experts = logits.shape[-1]
    real = jnp.ones(logits.shape[:2]) if segment_ids is None else (segment_ids > 0)
    real = real.astype(jnp.float32)
    count = jnp.maximum(real.sum(), 1.0)
    chosen = jax.nn.one_hot(experts, num_experts).mean(axis=-2)
    load = jnp.einsum("bte,bt->e", chosen, real) / count
    probability = jnp.einsum("bte,bt->e", jax.nn.softmax(logits, axis=-1), real) / count
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return {
        "load": load,
        "load_balance": num_experts * jnp.sum(load * probability),
        "router_z": jnp.sum(z * real) / count,
    }


@flax.struct.dataclass
class MoE(FeedForward):
    """Token-choice mixture of experts: sum over the K chosen experts, and the shared expert.

    Nothing is dropped. Experts of plain arrays run on the tokens that chose them
    (`jaxllm.models.grouped_experts`) where that is faster; see `MoEConfig.execution`.

    Attributes:
      router: {"kernel": [D, E]} and, where choices are balanced by it, {"bias": [E]}.
      experts: a dense feed-forward whose leaves have a leading expert axis.
      shared: a dense feed-forward that every token goes through, or None.
      shared_gate: linear [D, 1] whose sigmoid multiplies the shared expert, or None.
    """

    router: Any
    experts: Any
    shared: Any = None
    shared_gate: Any = None

    def __call__(self, x, state, context):
        moe = context.config.moe
        if context.inputs.neuron_mask is not None:
            raise ValueError("neuron_mask is for dense feed-forwards: this layer is a mixture.")
        # The router is small and its choices are discontinuous: float32 whatever the compute type.
        logits = x.astype(jnp.float32) @ self.router["kernel"].astype(jnp.float32)
        logits = context.tap("router_logits", logits)
        experts, weights = route(logits, moe, self.router.get("bias"))
        y = run_experts(self.experts, x, experts, weights, context)
        if self.shared is not None:
            shared = dense_feedforward(self.shared, x, context)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(linear(x, self.shared_gate, context))
            y = y + shared
        statistics = router_statistics(logits, experts, context.shared.segment_ids)
        if moe.bias_update_rate:
            y = _carry_load(y, self.router["bias"], statistics["load"])
        return y, state, statistics


@jax.custom_vjp
def _carry_load(
    y: Float[Array, "B T D"], bias: Float[Array, " E"], load: Float[Array, " E"]
) -> Float[Array, "B T D"]:
    """y, with the excess load of each expert as the gradient of its selection bias.

    The true gradient is zero, since the bias only decides choices. The load so reaches the
    optimizer (`jaxllm.training.balance`) through accumulation and sharding like any gradient, from
    any loss.
    """
    del bias, load
    return y


def _carry_load_forward(y, bias, load):
    return y, (bias, load)


def _carry_load_backward(residuals, gradient):
    bias, load = residuals
    return gradient, (load - load.mean()).astype(bias.dtype), jnp.zeros_like(load)


_carry_load.defvjp(_carry_load_forward, _carry_load_backward)


def run_experts(
    nodes: Any,
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    context: Context,
) -> Float[Array, "B T D"]:
    """sum_k weights_k * expert_k(x), dropless, accumulated in float32.

    Raises:
      ValueError: grouped execution is asked for and the experts are not plain arrays.
    """
    execution = context.config.moe.execution
    supported = grouped_experts.supports(nodes, context)
    if execution == "grouped" and not supported:
        raise ValueError(
            "moe.execution='grouped' needs experts that are plain arrays, without a neuron mask: "
            "use 'auto' or 'every'."
        )
    if execution == "grouped" or (
        execution == "auto"
        and supported
        and (_experts_are_sharded(nodes) or grouped_experts.is_faster(*_sizes(nodes, experts)))
    ):
        return grouped_experts.run(nodes, x, experts, weights, context)
    return run_every_expert(nodes, x, experts, weights, context)


def _sizes(nodes: Any, experts: Int[Array, "B T K"]) -> tuple[int, int, int]:
    rows, per_row = experts.shape[0] * experts.shape[1], experts.shape[2]
    return rows, per_row, jax.tree.leaves(nodes)[0].shape[0]


def _experts_are_sharded(nodes: Any) -> bool:
    """Whether devices hold different experts: a loop over all of them would move every one."""
    spec = active_spec(jax.tree.leaves(nodes)[0].shape[:1], ("expert",))
    return bool(mesh_axes(*spec))


def run_every_expert(
    nodes: Any,
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    context: Context,
) -> Float[Array, "B T D"]:
    """`run_experts` by every expert on every token, one expert at a time.

    Memory holds one expert's activations, any `Weight` works, and derivatives of any order exist.
    """
    num_experts = jax.tree.leaves(nodes)[0].shape[0]
    mixed = jnp.einsum("btke,btk->ebt", jax.nn.one_hot(experts, num_experts), weights)
    context = context.untapped()

    def add_expert(total: Array, operand: tuple[Any, Array]) -> tuple[Array, None]:
        node, weight = operand
        y = dense_feedforward(node, x, context).astype(jnp.float32)
        return total + y * weight[..., None], None

    total, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), (nodes, mixed))
    return total.astype(x.dtype)


def router_losses(outputs: ModelOutputs) -> dict[str, Float[Array, ""]]:
    """Router losses averaged over the mixture layers; zeros for a dense model."""
    layers = [aux for aux in outputs.aux if "load_balance" in aux]
    if not layers:
        return {"load_balance": jnp.float32(0), "router_z": jnp.float32(0)}
    return {
        name: jnp.concatenate([aux[name] for aux in layers]).mean()
        for name in ("load_balance", "router_z")
    }
