"""Level 3: the dense feed-forward.

Letters: B batch, T time, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context
from jaxllm.models.linear import linear, project
from jaxllm.models.weights import FeedForward


def activate(config: ModelConfig, x: Array) -> Array:
    """The config's non-linearity."""
    if config.activation == "gelu":
        return jax.nn.gelu(x, approximate=False)
    if config.activation == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    return jax.nn.relu(x) if config.activation == "relu" else jax.nn.silu(x)


def mask_neurons(hidden: Float[Array, "B T F"], context: Context) -> Float[Array, "B T F"]:
    """Applies the neuron masks of the inputs: booleans keep or drop, floats multiply."""
    for mask in (context.inputs.neuron_mask, context.inputs.per_layer.neuron_mask):
        if mask is None:
            continue
        if mask.dtype == jnp.bool_:
            hidden = jnp.where(mask, hidden, 0)
        else:
            hidden = hidden * mask.astype(hidden.dtype)
    return hidden


def dense_feedforward(
    node: Mapping[str, Any], x: Float[Array, "B T D"], context: Context
) -> Float[Array, "B T D"]:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.

    Args:
      node: {"in": group of linears "gate" and "up", or "up" alone; "down": linear}.
      x: the normed stream.
      context: of the layer.
    """
    read = project(x, node["in"], context)
    config = context.config
    if "gate" in read:
        hidden = activate(config, read["gate"]) * read["up"]
    else:
        hidden = activate(config, read["up"])
    hidden = context.tap("feedforward_hidden", mask_neurons(hidden, context))
    return linear(hidden, node["down"], context)


def feedforward(
    node: Any, x: Float[Array, "B T D"], state: Any, context: Context
) -> tuple[Float[Array, "B T D"], Any, dict[str, Array]]:
    """A whole feed-forward, dense or whatever a `FeedForward` makes of it.

    Returns:
      (output, travelling state, auxiliary values: {} for a dense one).
    """
    if isinstance(node, FeedForward):
        return node(x, state, context)
    if not isinstance(node, Mapping):
        raise TypeError(
            f"a feed-forward must be a mapping or a FeedForward, got {type(node).__name__}."
        )
    return dense_feedforward(node, x, context), state, {}
