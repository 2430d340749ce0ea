"""Batched generation: one compiled prefill and decode loop, no Python per token.

Letters: B batch, P padded prompt length, N new tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward, logits_from_hidden
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import init_dense_cache

PROMPT_BUCKET = 32  # Prompts are padded to a multiple, so that few lengths compile.


def generate(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    key: PRNGKeyArray | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continues prompts of any lengths with a dense cache.

    A row's tokens do not depend on the other rows. Models with longrope use the long frequencies
    from the first token on where prompt and answer together can pass the original context.

    Args:
      config, params: the model.
      prompts: token ids, one list a row, none empty.
      max_new_tokens: N.
      temperature: 0 = the most likely token; otherwise logits / temperature are sampled.
      key: for sampling; required when temperature > 0.
      stop_tokens: end a row (not returned); None = the config's end-of-sequence tokens.

    Returns:
      The new tokens of every row.

    Raises:
      ValueError: an empty prompt, token ids outside of the vocabulary, a missing key, too long a
        row for learned positions.
    """
    _check(config, prompts, max_new_tokens, temperature, key)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = -(-int(lengths.max()) // PROMPT_BUCKET) * PROMPT_BUCKET
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    stop_tokens = config.eos_token_ids if stop_tokens is None else stop_tokens
    new = _generate(
        config,
        params,
        jnp.asarray(tokens),
        jnp.asarray(lengths, jnp.int32),
        jnp.float32(temperature),
        jax.random.key(0) if key is None else key,
        max_new_tokens=max_new_tokens,
        stop_tokens=tuple(stop_tokens),
        greedy=temperature == 0,
    )
    return [_until_stop(row, stop_tokens) for row in np.asarray(new).tolist()]


def _check(config, prompts, max_new_tokens, temperature, key):
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative.")
    if temperature < 0 or not np.isfinite(temperature):
        raise ValueError(f"temperature={temperature} must be zero or positive.")
    if temperature > 0 and key is None:
        raise ValueError("sampling with temperature > 0 needs a key (jax.random.key(seed)).")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: give at least a beginning-of-sequence token.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"prompt {row} has token id {low if low < 0 else high}, outside of the "
                f"vocabulary of {config.vocab_size}."
            )
        total = len(prompt) + max_new_tokens
        if config.positions == "learned" and total > config.max_positions:
            raise ValueError(
                f"prompt {row} and {max_new_tokens} new tokens make {total} positions, the model "
                f"has {config.max_positions}."
            )


def _until_stop(row: list[int], stop_tokens: Sequence[int]) -> list[int]:
    ends = [row.index(token) for token in stop_tokens if token in row]
    return row[: min(ends)] if ends else row


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens", "stop_tokens", "greedy"))
def _generate(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    temperature: Float[Array, ""],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    greedy: bool,
) -> Int[Array, "B N"]:
    batch, padded = tokens.shape
    rows = jnp.arange(batch)
    rope_set = None
    if config.rope.type == "longrope":
        rope_set = (lengths + max_new_tokens > config.rope.original_max_positions).astype(jnp.int32)

    def pick(logits: Float[Array, "B V"], step: Int[Array, ""]) -> Int[Array, " B"]:
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
        chosen = jax.vmap(jax.random.categorical)(keys, logits / temperature)
        return chosen.astype(jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(padded), tokens.shape)
    inputs = ModelInputs(
        positions=positions,
        rope_set=rope_set,
        segment_ids=(positions < lengths[:, None]).astype(jnp.int32),
    )
    cache = init_dense_cache(config, params, batch, padded + max_new_tokens)
    outputs = forward(config, params, tokens, inputs, cache=cache, head=False)
    last = outputs.hidden[rows, lengths - 1][:, None]
    first = pick(logits_from_hidden(config, params, last)[:, 0], jnp.int32(0))
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def unfinished(carry):
        step, _, _, _, done = carry
        return (step < max_new_tokens) & ~done.all()

    def decode(carry):
        step, token, new, cache, done = carry
        inputs = ModelInputs(positions=(lengths + step - 1)[:, None], rope_set=rope_set)
        outputs = forward(config, params, token[:, None], inputs, cache=cache)
        token = pick(outputs.logits[:, 0], step)
        new = new.at[:, step].set(token)
        return step + 1, token, new, outputs.cache, done | jnp.isin(token, stops)

    # Unwritten places keep a stop token, so that a row that ended early is cut there.
    blank = stop_tokens[0] if stop_tokens else 0
    new = jnp.full((batch, max_new_tokens), blank, jnp.int32).at[:, 0].set(first)
    carry = (jnp.int32(1), first, new, outputs.cache, jnp.isin(first, stops))
    return jax.lax.while_loop(unfinished, decode, carry)[2]
