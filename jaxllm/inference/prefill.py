"""The forward passes of decoding: the prompt, whole or in chunks, then one token a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward, logits_from_hidden
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import CachePolicy, DensePolicy, compact, constrain


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
    cache_policy: CachePolicy | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Runs right-padded prompts; returns the logits after their last tokens, and their cache.

    Args:
      config, params: the model; where the caches of a policy differ by layer, parameters from
        `cache_policy.split(config, params)`.
      tokens, lengths: prompts.
      num_slots: tokens a row that the cache has room for.
      rope_set: see `longrope_set`.
      cache_policy: which caches keep keys and values; None = dense ones.
      chunk: tokens run at once, which bounds the memory of long prompts; None = all. Caches that
        keep keys and values as they are give the same either way. One that rounds them shows a
        chunk the rounded ones of those before. (With "dynamic" rotary positions the frequencies of
        a chunk are those of the length up to its end.)
    """
    policy = DensePolicy() if cache_policy is None else cache_policy
    batch, padded = tokens.shape
    cache = policy.init(config, params, batch, num_slots)
    size = padded if chunk is None else min(chunk, padded)
    if size < 1:
        raise ValueError(f"chunk={chunk} must be at least 1.")
    starts = jnp.arange(0, padded, size)
    tokens = jnp.pad(tokens, ((0, 0), (0, len(starts) * size - padded)))

    def run(carry: Any, start: Int[Array, ""]) -> tuple[Any, None]:
        cache, last = carry
        positions = jnp.broadcast_to(start + jnp.arange(size), (batch, size))
        inputs = ModelInputs(
            positions=positions,
            rope_set=rope_set,
            segment_ids=(positions < lengths[:, None]).astype(jnp.int32),
        )
        piece = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)
        outputs = forward(config, params, piece, inputs, cache=cache, head=False)
        here = lengths - 1 - start
        hidden = outputs.hidden[jnp.arange(batch), jnp.clip(here, 0, size - 1)]
        ends = (here >= 0) & (here < size)
        return (constrain(outputs.cache), jnp.where(ends[:, None], hidden, last)), None

    carry = (cache, jnp.zeros((batch, config.embed_dim), config.compute_dtype))
    if len(starts) == 1:
        (cache, last), _ = run(carry, jnp.int32(0))
    else:
        (cache, last), _ = jax.lax.scan(run, carry, starts)
    return logits_from_hidden(config, params, last[:, None])[:, 0], compact(cache)


def decode_step(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    cache: tuple[Any, ...],
    rope_set: Int[Array, " B"] | None = None,
    active: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """One token a row at its position: the logits after it and the cache with it.

    Rows that are not `active` leave their cache as it is; their logits mean nothing.
    """
    inputs = ModelInputs(
        positions=positions[:, None],
        rope_set=rope_set,
        segment_ids=None if active is None else active.astype(jnp.int32)[:, None],
    )
    outputs = forward(config, params, tokens[:, None], inputs, cache=cache)
    return outputs.logits[:, 0], constrain(outputs.cache)
