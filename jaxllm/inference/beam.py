"""Beam search, with the rules of `transformers` for finished beams and for when to stop.

Letters: B prompts, M beams of each, C candidates kept a step, N new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.inference import prompts as prompts_lib
from jaxllm.inference.prefill import decode_step, longrope_set, prefill
from jaxllm.models.config import ModelConfig
from jaxllm.models.kv_cache import CachePolicy, DensePolicy, take_rows

_NEVER = -1e9  # Score of a beam that does not exist.


@dataclasses.dataclass(frozen=True)
class BeamConfig:
    """How beams are kept and compared.

    Attributes:
      num_beams: M.
      length_penalty: exponent p of the score, log probability / length^p; above 0 favours long
        answers.
      early_stopping: True: stop as soon as M beams have finished. False: stop when the best running
        beam, at its present length, cannot beat the worst finished one. "never": the same with the
        largest length it may reach where the penalty favours long answers.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ValueError(f"num_beams={self.num_beams} must be at least 1.")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping={self.early_stopping!r} must be True, False or 'never'."
            )


@dataclasses.dataclass(frozen=True)
class Beam:
    """One answer.

    Attributes:
      tokens: new ids, without the stop token.
      score: log probability (stop token included) / length^length_penalty.
    """

    tokens: list[int]
    score: float


def beam_search(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    beams: BeamConfig | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_policy: CachePolicy | None = None,
    prefill_chunk: int | None = None,
) -> list[list[Beam]]:
    """The best continuations of each prompt, best first.

    Args:
      config, params: the model.
      prompts: token ids, one list a row, none empty.
      max_new_tokens: N.
      beams: None = four beams, scores divided by length.
      stop_tokens: end a beam; None = the config's end-of-sequence tokens.
      cache_policy, prefill_chunk: as for `generate.sample`.

    Returns:
      For every prompt up to M beams.

    Raises:
      ValueError: as `generate.sample`, or more beams than tokens in the vocabulary.
    """
    beams = BeamConfig() if beams is None else beams
    prompts_lib.check_prompts(config, prompts, max_new_tokens)
    if beams.num_beams > config.vocab_size:
        raise ValueError(
            f"num_beams={beams.num_beams} exceeds the vocabulary of {config.vocab_size}."
        )
    if not prompts or max_new_tokens == 0:
        return [[Beam([], 0.0)] for _ in prompts]
    stops = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
    cache_policy = DensePolicy() if cache_policy is None else cache_policy
    params = cache_policy.split(config, params)
    padded = prompts_lib.pad_prompts(prompts)
    finished = _search(
        config,
        params,
        padded.tokens,
        padded.lengths,
        jnp.int32(max_new_tokens),
        jnp.float32(beams.length_penalty),
        cache_policy,
        prefill_chunk=prefill_chunk,
        num_beams=beams.num_beams,
        early_stopping=beams.early_stopping,
        capacity=prompts_lib.bucket(max_new_tokens, prompts_lib.SMALLEST),
        stop_tokens=stops,
    )
    tokens, lengths, scores = (np.asarray(part) for part in finished)
    return [
        [
            Beam(prompts_lib.until_stop(ids[:length].tolist(), stops), float(score))
            for ids, length, score in zip(tokens[row], lengths[row], scores[row], strict=True)
            if score > _NEVER / 2
        ]
        for row in range(padded.rows)
    ]


class _Finished(NamedTuple):
    """The best answers so far, best first; `scores` of empty places are -1e9."""

    tokens: Int[Array, "B M N"]
    lengths: Int[Array, "B M"]
    scores: Float[Array, "B M"]


class _Running(NamedTuple):
    """What the loop carries.

    `improvable` says of each prompt whether a running beam might still become one of the best.
    """

    step: Int[Array, ""]
    tokens: Int[Array, "B M N"]
    scores: Float[Array, "B M"]
    finished: _Finished
    improvable: Bool[Array, " B"]
    exhausted: Bool[Array, ""]
    cache: tuple[Any, ...]
    logits: Float[Array, "B*M V"]


@functools.partial(
    jax.jit,
    static_argnames=(
        "config",
        "prefill_chunk",
        "num_beams",
        "early_stopping",
        "capacity",
        "stop_tokens",
    ),
)
def _search(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    limit: Int[Array, ""],
    length_penalty: Float[Array, ""],
    cache_policy: CachePolicy,
    *,
    prefill_chunk: int | None,
    num_beams: int,
    early_stopping: bool | str,
    capacity: int,
    stop_tokens: tuple[int, ...],
) -> _Finished:
    batch, padded = tokens.shape
    rope_set = longrope_set(config, lengths + limit)
    logits, cache = prefill(
        config,
        params,
        tokens,
        lengths,
        num_slots=padded + capacity,
        rope_set=rope_set,
        cache_policy=cache_policy,
        chunk=prefill_chunk,
    )
    rows = jnp.repeat(jnp.arange(batch), num_beams)
    rope_rows = None if rope_set is None else rope_set[rows]
    stops = jnp.asarray(stop_tokens, jnp.int32)
    # So many candidates that M of them go on even where every beam could end.
    num_candidates = min(max(2, 1 + len(stop_tokens)) * num_beams, num_beams * config.vocab_size)

    def going_on(running: _Running):
        open_beams = jnp.any(running.improvable) & ~running.exhausted
        if early_stopping is True:
            open_beams &= ~jnp.all(running.finished.scores > _NEVER / 2)
        return open_beams

    def advance(running: _Running) -> _Running:
        totals = jax.nn.log_softmax(running.logits).reshape(batch, num_beams, -1)
        totals = (totals + running.scores[..., None]).reshape(batch, -1)
        scores, flat = jax.lax.top_k(totals, num_candidates)
        parent, token = flat // config.vocab_size, (flat % config.vocab_size).astype(jnp.int32)
        history = _take(running.tokens, parent).at[:, :, running.step].set(token)
        length = running.step + 1
        ends = jnp.isin(token, stops) | (length == limit)
        finished = _merge(running, history, scores, ends, length)
        keep, order = jax.lax.top_k(scores + ends * _NEVER, num_beams)
        parents, last = _take(parent, order), _take(token, order)
        chosen = (jnp.arange(batch)[:, None] * num_beams + parents).reshape(-1)
        logits, cache = decode_step(
            config,
            params,
            last.reshape(-1),
            lengths[rows] + running.step,
            take_rows(running.cache, chosen),
            rope_rows,
        )
        reach = length
        if early_stopping == "never":
            reach = jnp.where(length_penalty > 0, limit, length)
        best = keep[:, 0] / reach.astype(jnp.float32) ** length_penalty
        worst = finished.scores.min(-1)
        return _Running(
            step=length,
            tokens=_take(history, order),
            scores=keep,
            finished=finished,
            improvable=running.improvable & (best > worst),
            exhausted=jnp.all(ends),
            cache=cache,
            logits=logits,
        )

    def _merge(running: _Running, history, scores, ends, length) -> _Finished:
        """Puts candidates that end now among the finished beams.

        Only the M best candidates may: the others are there to carry on the search.
        """
        counts = ends & (jnp.arange(num_candidates) < num_beams) & running.improvable[:, None]
        if early_stopping is True:
            full = jnp.all(running.finished.scores > _NEVER / 2, axis=-1, keepdims=True)
            counts &= ~full
        final = jnp.where(counts, scores / length.astype(jnp.float32) ** length_penalty, _NEVER)
        new = _Finished(history, jnp.broadcast_to(length, final.shape), final)
        both = _Finished(
            *(jnp.concatenate(pair, 1) for pair in zip(running.finished, new, strict=True))
        )
        order = jax.lax.top_k(both.scores, num_beams)[1]
        return _Finished(*(_take(part, order) for part in both))

    shape = (batch, num_beams)
    empty = jnp.zeros((*shape, capacity), jnp.int32)
    running = _Running(
        step=jnp.int32(0),
        tokens=empty,
        # All beams are the prompt: only the first may be continued.
        scores=jnp.where(jnp.arange(num_beams) == 0, 0.0, _NEVER) + jnp.zeros(shape),
        finished=_Finished(empty, jnp.zeros(shape, jnp.int32), jnp.full(shape, _NEVER)),
        improvable=jnp.ones(batch, bool),
        exhausted=jnp.bool_(False),
        cache=take_rows(cache, rows),
        logits=logits[rows],
    )
    return jax.lax.while_loop(going_on, advance, running).finished


def _take(values: Array, order: Int[Array, "B K"]) -> Array:
    """values[b, order[b, k]]."""
    return jax.vmap(lambda row, index: row[index])(values, order)
