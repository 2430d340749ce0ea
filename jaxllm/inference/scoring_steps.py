"""The compiled passes of scoring: whole rows, and continuations that share a context.

Letters: R continuations, Q contexts, P tokens of a context, T of a row, S scored ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward, logits_from_hidden
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import DensePolicy, take_rows
from jaxllm.training import losses
from jaxllm.training.objectives import head_array


@functools.partial(jax.jit, static_argnames="config")
def row_scores(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    starts: Int[Array, " R"],
    targets: Int[Array, "R S"],
) -> losses.TokenScores:
    """Scores [R, S] of the targets that follow the tokens starts .. starts + S - 1 of each row.

    Only these go through the head.
    """
    segment_ids = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    inputs = ModelInputs(segment_ids=segment_ids)
    hidden = forward(config, params, tokens, inputs, head=False).hidden
    # A short row among long ones has fewer than S tokens to score: the rest means nothing.
    places = jnp.minimum(starts[:, None] + jnp.arange(targets.shape[1]), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    return _head_scores(config, params, hidden, targets)


@functools.partial(jax.jit, static_argnames="config")
def shared_scores(
    config: ModelConfig,
    params: Any,
    contexts: Int[Array, "Q P"],
    context_lengths: Int[Array, " Q"],
    owners: Int[Array, " R"],
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    targets: Int[Array, "R S"],
) -> losses.TokenScores:
    """Scores [R, S] of continuations: the contexts run once, and their caches are repeated.

    Args:
      config, params: the model.
      contexts, context_lengths: right-padded.
      owners: which context each continuation follows.
      tokens, lengths: continuations without their last tokens; T = S - 1, and 0 where every
        continuation is one token.
      targets: continuations.
    """
    count, width = contexts.shape
    time = tokens.shape[1]
    cache = DensePolicy().init(config, params, count, width + time) if time else None
    positions = jnp.broadcast_to(jnp.arange(width), contexts.shape)
    inputs = ModelInputs(
        positions=positions,
        segment_ids=(positions < context_lengths[:, None]).astype(jnp.int32),
    )
    outputs = forward(config, params, contexts, inputs, cache=cache, head=False)
    hidden = outputs.hidden[owners, context_lengths[owners] - 1][:, None]
    if time:
        steps = jnp.arange(time)
        inputs = ModelInputs(
            positions=context_lengths[owners][:, None] + steps,
            segment_ids=(steps < lengths[:, None]).astype(jnp.int32),
        )
        rest = forward(
            config, params, tokens, inputs, cache=take_rows(outputs.cache, owners), head=False
        )
        hidden = jnp.concatenate([hidden, rest.hidden], axis=1)
    return _head_scores(config, params, hidden, targets)


def _head_scores(
    config: ModelConfig, params: Any, hidden: Float[Array, "R S D"], targets: Int[Array, "R S"]
) -> losses.TokenScores:
    head, vocab_axis = head_array(params)
    if head is not None:
        return losses.token_scores(
            hidden, head, targets, vocab_axis=vocab_axis, softcap=config.logit_softcap
        )
    logits = jax.nn.log_softmax(logits_from_hidden(config, params, hidden))
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return losses.TokenScores(at_target, (at_target >= logits.max(-1)).astype(logits.dtype))
