"""The two forward passes of decoding: the whole prompt, then one token a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward, logits_from_hidden
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import init_dense_cache


def longrope_set(config: ModelConfig, totals: Int[Array, " B"]) -> Int[Array, " B"] | None:
    """Which frequencies each row uses, by the tokens that prompt and answer can reach together.

    A row keeps its set from the first token on, so that keys in the cache fit the queries to come.
    """
    if config.rope.type != "longrope":
        return None
    return (totals > config.rope.original_max_positions).astype(jnp.int32)


def prefill(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    num_slots: int,
    rope_set: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Runs right-padded prompts; returns the logits after their last tokens, and their cache.

    Args:
      config, params: the model.
      tokens, lengths: prompts.
      num_slots: tokens a row that the cache has room for.
      rope_set: see `longrope_set`.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    inputs = ModelInputs(
        positions=positions,
        rope_set=rope_set,
        segment_ids=(positions < lengths[:, None]).astype(jnp.int32),
    )
    cache = init_dense_cache(config, params, tokens.shape[0], num_slots)
    outputs = forward(config, params, tokens, inputs, cache=cache, head=False)
    last = outputs.hidden[jnp.arange(tokens.shape[0]), lengths - 1][:, None]
    return logits_from_hidden(config, params, last)[:, 0], outputs.cache


def decode_step(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    cache: tuple[Any, ...],
    rope_set: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """One token a row at its position: the logits after it and the cache with it."""
    inputs = ModelInputs(positions=positions[:, None], rope_set=rope_set)
    outputs = forward(config, params, tokens[:, None], inputs, cache=cache)
    return outputs.logits[:, 0], outputs.cache


def take_rows(cache: tuple[Any, ...], rows: Int[Array, " R"]) -> tuple[Any, ...]:
    """The cache of chosen rows (repeated or reordered); leaves are [layers, batch, ...]."""
    return jax.tree.map(lambda leaf: leaf[:, rows], cache)
