"""Level 4: attention, and multi-head latent attention.

Letters: B batch, T time, D model width, H query heads, K key heads, d head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context
from jaxllm.models.kv_cache import KVCache
from jaxllm.models.linear import linear, project
from jaxllm.models.norms import rms_norm
from jaxllm.models.positions import rotate
from jaxllm.models.weights import Attention


def split_heads(x: Float[Array, "B T Hd"], head_dim: int) -> Float[Array, "B T H d"]:
    """Cuts the last axis into heads; H follows from the width, so pruned heads need no config."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def qk_norm(
    config: ModelConfig, node: Mapping[str, Any], q: Array, k: Array
) -> tuple[Array, Array]:
    """RMSNorm of queries and keys [B, T, H, d], over the head or over the whole width."""
    if config.qk_norm is None:
        return q, k

    def one(x: Array, name: str) -> Array:
        flat = x if config.qk_norm == "head" else x.reshape(*x.shape[:-2], -1)
        return rms_norm(flat, node[name]["scale"], config.norm_eps).reshape(x.shape)

    return one(q, "q_norm"), one(k, "k_norm")


def mask_heads(x: Float[Array, "B T H d"], context: Context) -> Float[Array, "B T H d"]:
    """Multiplies each head's output by this layer's head mask, [H] or [B, H], if there is one."""
    mask = context.inputs.per_layer.head_mask
    if mask is None:
        return x
    mask = mask.astype(x.dtype)
    return x * (mask[:, None, :, None] if mask.ndim == 2 else mask[:, None])


def attend_and_project(
    node: Any, q: Array, k: Array, v: Array, context: Context
) -> tuple[Float[Array, "B T D"], KVCache]:
    """From rotated q, k and v to what attention adds to the stream.

    Args:
      node: the output projection, a linear.
      q, k, v: [B, T, H or K, d].
      context: of the layer.
    """
    q, k, v = context.tap("q", q), context.tap("k", k), context.tap("v", v)
    heads, cache = context.cache.attend(q, k, v, context)
    heads = context.tap("attention_heads", mask_heads(heads, context))
    return linear(heads.reshape(*heads.shape[:2], -1), node, context), cache


def attention(
    node: Any, x: Float[Array, "B T D"], state: Any, context: Context
) -> tuple[Float[Array, "B T D"], Any, KVCache]:
    """A whole attention: projections, rotary positions, the cache, the output projection.

    Args:
      node: {"qkv": group of linears q, k, v; "o": linear; "q_norm", "k_norm" where the config has
        them}, or an `Attention`.
      x: the normed stream.
      state: what travels with the stream; passed through by the plain attention.
      context: of the layer.

    Returns:
      (output, state, this layer's cache).
    """
    if isinstance(node, Attention):
        return node(x, state, context)
    if not isinstance(node, Mapping):
        raise TypeError(f"attention must be a mapping or an Attention, got {type(node).__name__}.")
    config = context.config
    qkv = project(x, node["qkv"], context)
    q, k, v = (split_heads(qkv[name], config.head_dim) for name in ("q", "k", "v"))
    q, k = qk_norm(config, node, q, k)
    if config.clip_qkv is not None:
        q, k, v = (jnp.clip(y, -config.clip_qkv, config.clip_qkv) for y in (q, k, v))
    if context.shared.rope is not None:
        q, k = rotate(q, *context.shared.rope), rotate(k, *context.shared.rope)
    y, cache = attend_and_project(node["o"], q, k, v, context)
    return y, state, cache


@flax.struct.dataclass
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are expanded from one compressed vector a token; one rotated key
    part is shared by all heads. The cache holds expanded keys and values.

    Attributes:
      down: group of linears "q" (the whole query, or the compressed one) and "kv" (the compressed
        key/value followed by the rotated key part).
      kv_norm: norm of the compressed key/value.
      kv_up: linear from it to H heads of (plain key, value).
      o: output projection.
      q_norm, q_up: norm and expansion of the compressed query; None where queries are not
        compressed.
    """

    down: Any
    kv_norm: Any
    kv_up: Any
    o: Any
    q_norm: Any = None
    q_up: Any = None

    def __call__(self, x, state, context):
        mla = context.config.mla
        down = project(x, self.down, context)
        q = down["q"]
        if self.q_up is not None:
            q = linear(rms_norm(q, self.q_norm["scale"], _LATENT_EPS), self.q_up, context)
        q = split_heads(q, mla.nope_dim + mla.rope_dim)
        q_plain, q_rotary = jnp.split(q, [mla.nope_dim], axis=-1)
        latent, k_rotary = jnp.split(down["kv"], [mla.kv_rank], axis=-1)
        latent = rms_norm(latent, self.kv_norm["scale"], _LATENT_EPS)
        kv = split_heads(linear(latent, self.kv_up, context), mla.nope_dim + mla.value_dim)
        k_plain, v = jnp.split(kv, [mla.nope_dim], axis=-1)
        k_rotary = rotate(k_rotary[:, :, None], *context.shared.rope)
        k_rotary = jnp.broadcast_to(k_rotary, (*k_plain.shape[:-1], mla.rope_dim))
        q = jnp.concatenate([q_plain, rotate(q_rotary, *context.shared.rope)], axis=-1)
        k = jnp.concatenate([k_plain, k_rotary], axis=-1)
        y, cache = attend_and_project(self.o, q, k, v, context)
        return y, state, cache


_LATENT_EPS = 1e-6  # The family fixes the epsilon of its latent norms, whatever the config says.
