"""RMSNorm and LayerNorm, in float32."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.models.config import ModelConfig


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"], eps: float, unit_offset: bool = False
) -> Float[Array, "... d"]:
    """x / rms(x) * scale (arXiv:1910.07467); `unit_offset` multiplies by 1 + scale (Gemma)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32)
    return (wide * (1.0 + gain if unit_offset else gain)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"], bias: Float[Array, " d"], eps: float
) -> Float[Array, "... d"]:
    """(x - mean) / std * scale + bias (arXiv:1607.06450)."""
    wide = jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def norm(
    config: ModelConfig, node: Mapping[str, Array], x: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """The norm of the config's kind with the parameters of `node`."""
    if config.norm == "layernorm":
        return layer_norm(x, node["scale"], node["bias"], config.norm_eps)
    return rms_norm(x, node["scale"], config.norm_eps, config.norm_unit_offset)
