"""What a model thinks of given tokens: log probabilities, and the likeliest tokens at every place.

Letters: B sequences, P padded length, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.inference import prompts as prompts_lib
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward, logits_from_hidden
from jaxllm.models.inputs import ModelInputs


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Scores of one sequence of n tokens.

    Attributes:
      log_probs: [n - 1] log p of each token after the first, given all before it.
      top_ids, top_log_probs: [n, k] what is likeliest to follow each token, best first.
    """

    log_probs: Float[np.ndarray, " n-1"]
    top_ids: Int[np.ndarray, "n k"]
    top_log_probs: Float[np.ndarray, "n k"]


def score_tokens(
    config: ModelConfig, params: Any, sequences: Sequence[Sequence[int]], *, top: int
) -> list[TokenScores]:
    """Scores sequences, one after the other: none has a part in the numbers of another.

    Args:
      config, params: the model.
      sequences: token ids, none empty.
      top: k.
    """
    found = []
    for tokens in sequences:
        length = len(tokens)
        padded = np.zeros((1, prompts_lib.bucket(length, prompts_lib.SMALLEST)), np.int32)
        padded[0, :length] = tokens
        # A power of two, so that clients who ask for few or many cost no compilation each.
        kept = min(config.vocab_size, prompts_lib.bucket(max(top, 1), 4))
        scores = jax.device_get(
            _score(config, params, padded, np.array([length], np.int32), top=kept)
        )
        log_probs, ids, values = (part[0] for part in scores)
        found.append(
            TokenScores(log_probs[: length - 1], ids[:length, :top], values[:length, :top])
        )
    return found


@functools.partial(jax.jit, static_argnames=("config", "top"))
def _score(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    top: int,
) -> tuple[Float[Array, "B P"], Int[Array, "B P k"], Float[Array, "B P k"]]:
    batch, padded = tokens.shape
    segment_ids = (jnp.arange(padded) < lengths[:, None]).astype(jnp.int32)
    hidden = forward(
        config, params, tokens, ModelInputs(segment_ids=segment_ids), head=False
    ).hidden

    def of_chunk(chunk):
        hidden, targets = chunk
        log_probs = jax.nn.log_softmax(logits_from_hidden(config, params, hidden))
        values, ids = jax.lax.top_k(log_probs, top)
        return jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0], ids, values

    # Places whose logits over the vocabulary are in memory at a time; divides every bucket.
    size = min(128, max(8, padded // 8))

    def split(x: Array) -> Array:
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    targets = jnp.roll(tokens, -1, axis=1)
    chunks = jax.lax.map(of_chunk, (split(hidden), split(targets)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, padded, *x.shape[3:]), chunks)
