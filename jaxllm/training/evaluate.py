"""Evaluation over held-out batches: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh

from jaxllm.training import metrics as metrics_lib
from jaxllm.training import sharding
from jaxllm.training.metrics import Mean


def evaluate(
    step: Callable[[Any, Any], dict[str, Mean]],
    params: Any,
    batches: Iterable[Any],
    *,
    total_bytes: float | None = None,
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
) -> dict[str, float]:
    """Means over all tokens of all batches.

    Args:
      step: from `step.make_eval_step`.
      params: what to evaluate.
      batches: host batches, of equal shapes (pad the last with rows of weight 0).
      total_bytes: bytes of text behind the tokens that count, summed over all batches and
        processes.
      mesh: where the batches go.
      rules: mesh axes by logical name.

    Returns:
      The loss's metrics, "tokens" (weight of what counted), "perplexity" = exp(cross-entropy), and
      with `total_bytes` "bits_per_byte" = (nats of all tokens) / ln 2 / bytes. Cross-entropy is the
      metric "cross_entropy" if the loss has one, else "loss".

    Raises:
      ValueError: there was no batch, or nothing in them counted.
    """
    merged: dict[str, Mean] = {}
    for batch in batches:
        result = step(params, sharding.shard_batch(batch, mesh, rules))
        merged = metrics_lib.merge(merged, metrics_lib.to_host(result))
    if not merged:
        raise ValueError("evaluation got no batch.")
    likelihood = merged.get("cross_entropy", merged["loss"])
    if not likelihood.weight > 0:
        raise ValueError("evaluation got no token with a positive weight.")
    values = metrics_lib.compute(merged)
    values["tokens"] = float(likelihood.weight)
    values["perplexity"] = _exp(likelihood.compute())
    if total_bytes is not None:
        if not total_bytes > 0:
            raise ValueError(f"total_bytes={total_bytes} must be positive.")
        values["bits_per_byte"] = float(likelihood.total) / math.log(2) / total_bytes
    return values


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
