"""Objectives: functions `loss(params, batch, rng) -> (scalar, metrics)`, and ways to combine them.

The scalar is a weighted mean whose weight is `metrics["loss"].weight`, so that a training step can
weigh microbatches exactly. Supervised fine-tuning is `language_model_loss` with weights that are 0
on prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.models import decoder, moe
from jaxllm.models.config import ModelConfig
from jaxllm.models.inputs import ModelInputs, ModelOutputs
from jaxllm.models.weights import Weight
from jaxllm.training import losses
from jaxllm.training.metrics import Mean
from jaxllm.training.step import Loss

Batch = Mapping[str, Array]
_IMPLEMENTATIONS = ("fused", "plain")


def language_model_loss(
    config: ModelConfig,
    *,
    implementation: Literal["fused", "plain"] = "fused",
    z_loss: float = 0.0,
    load_balance: float = 0.01,
    router_z: float = 0.001,
    chunk: int = 512,
) -> Loss:
    """Next-token cross-entropy, a mean over the tokens of a batch by their weights.

    Args:
      config: the model.
      implementation: "fused" forms the gradients of head and hidden states chunk by chunk, and
        allows first derivatives in reverse mode; "plain" holds all logits and allows any. A head
        that is not a plain array takes the plain path.
      z_loss: coefficient of the squared log-normaliser.
      load_balance: coefficient of the routers' load-balancing loss (mixtures of experts).
      router_z: coefficient of the squared log-normaliser of router logits.
      chunk: tokens whose logits the fused loss holds at once.

    Returns:
      The loss over batches of `tokens`, `targets`, `weights` and optionally `segment_ids`,
      `positions`, all [B, T]. Metrics: "loss" (what is minimised), "cross_entropy" (nats),
      "accuracy", and where they apply "z_loss", "load_balance", "router_z".
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown: expected one of {_IMPLEMENTATIONS}."
        )

    def loss(params: Any, batch: Batch, rng: Array) -> tuple[Float[Array, ""], dict[str, Mean]]:
        del rng
        head, vocab_axis = head_array(params)
        fused = implementation == "fused" and head is not None
        outputs = forward(config, params, batch, head=not fused)
        targets, weights = batch["targets"], batch["weights"]
        if fused:
            sums = losses.fused_cross_entropy(
                outputs.hidden,
                head,
                targets,
                weights,
                vocab_axis=vocab_axis,
                softcap=config.logit_softcap,
                z_loss=z_loss,
                chunk=chunk,
            )
        else:
            sums = losses.cross_entropy(outputs.logits, targets, weights, z_loss=z_loss)
        weight = jax.lax.stop_gradient(sums.weight)
        scalar = sums.total / jnp.where(weight == 0, 1.0, weight)
        metrics = {
            "cross_entropy": Mean(sums.cross_entropy, weight),
            "accuracy": Mean(sums.correct, weight),
        }
        if z_loss:
            metrics["z_loss"] = Mean(sums.z_loss, weight)
        if config.moe is not None:
            routers = moe.router_losses(outputs)
            coefficients = {"load_balance": load_balance, "router_z": router_z}
            for name, coefficient in coefficients.items():
                scalar = scalar + coefficient * routers[name]
                metrics[name] = Mean.of(routers[name], weight)
        metrics["loss"] = Mean(scalar * weight, weight)
        return scalar, jax.lax.stop_gradient(metrics)

    return loss


def forward(config: ModelConfig, params: Any, batch: Batch, *, head: bool = True) -> ModelOutputs:
    """The decoder on a batch, with its segment ids and positions if it has them."""
    inputs = ModelInputs(positions=batch.get("positions"), segment_ids=batch.get("segment_ids"))
    return decoder.forward(config, params, batch["tokens"], inputs, head=head)


def head_array(params: Any) -> tuple[Array | None, int]:
    """`decoder.head_weight`, with None for a container that multiplies in its own way."""
    weight, vocab_axis = decoder.head_weight(params)
    return (None if isinstance(weight, Weight) else weight), vocab_axis


def sequence_log_probs(
    config: ModelConfig, params: Any, batch: Batch, *, chunk: int = 512
) -> Float[Array, " B"]:
    """sum_t weights[t] log p(targets[t] | ...) of every row, with `chunk` logits at a time."""
    head, axis = head_array(params)
    outputs = forward(config, params, batch, head=head is None)
    if head is None:
        logits = outputs.logits - jax.nn.logsumexp(outputs.logits, axis=-1, keepdims=True)
        log_probs = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1, mode="clip")[
            ..., 0
        ]
    else:
        log_probs = losses.token_log_probs(
            outputs.hidden,
            head,
            batch["targets"],
            vocab_axis=axis,
            softcap=config.logit_softcap,
            chunk=chunk,
        )
    return (log_probs * batch["weights"]).sum(-1)


def pair_log_probs(
    config: ModelConfig, params: Any, batch: Mapping[str, Batch], *, chunk: int = 512
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Sequence log-probabilities of `batch["chosen"]` and `batch["rejected"]`, in one forward pass.

    The two are padded to one length and stacked, so that the parameters are read once.
    """
    chosen, rejected = batch["chosen"], batch["rejected"]
    length = max(chosen["tokens"].shape[1], rejected["tokens"].shape[1])
    names = sorted(set(chosen) & set(rejected))
    both = {
        name: jnp.concatenate([_pad_time(chosen[name], length), _pad_time(rejected[name], length)])
        for name in names
    }
    log_probs = sequence_log_probs(config, params, both, chunk=chunk)
    rows = chosen["tokens"].shape[0]
    return log_probs[:rows], log_probs[rows:]


def forget_retain(
    forget: Loss, retain: Loss, *, forget_weight: float = 1.0, retain_weight: float = 1.0
) -> Loss:
    """forget_weight * forget(batch["forget"]) + retain_weight * retain(batch["retain"]).

    Each part is the mean over its own tokens. When microbatches are accumulated, the sum is weighed
    by the number of rows, so the microbatches should hold as many of each kind (they do: rows are
    dealt out in turn). Metrics of the parts are prefixed "forget/" and "retain/".
    """
    return weighted_sum({"forget": (forget, forget_weight), "retain": (retain, retain_weight)})


def weighted_sum(parts: Mapping[str, tuple[Loss, float]]) -> Loss:
    """The sum of coefficient * loss(batch[name]) over named parts of a batch."""

    def loss(params: Any, batch: Mapping[str, Any], rng: Array):
        total: Any = 0.0
        metrics: dict[str, Mean] = {}
        rows = None
        for index, (name, (part, coefficient)) in enumerate(parts.items()):
            scalar, inner = part(params, batch[name], jax.random.fold_in(rng, index))
            total = total + coefficient * scalar
            metrics |= {f"{name}/{key}": mean for key, mean in inner.items()}
            rows = rows or jax.tree.leaves(batch[name])[0].shape[0]
        metrics["loss"] = Mean.of(jax.lax.stop_gradient(total), float(rows))
        return total, metrics

    return loss


def mapped(loss: Loss, transform: Callable[[Float[Array, ""]], Float[Array, ""]]) -> Loss:
    """The loss with its scalar transformed, for example negated (gradient ascent)."""

    def changed(params: Any, batch: Any, rng: Array):
        scalar, metrics = loss(params, batch, rng)
        scalar = transform(scalar)
        weight = metrics["loss"].weight
        return scalar, {**metrics, "loss": Mean.of(jax.lax.stop_gradient(scalar), weight)}

    return changed


def _pad_time(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
