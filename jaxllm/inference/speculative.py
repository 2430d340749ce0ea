"""Speculative decoding: a small model proposes tokens, the large one checks several in one pass.

Leviathan, Kalman and Matias (ICML 2023, arXiv:2211.17192); Chen et al. (arXiv:2302.01318). With p
the distribution of the target and q that of the draft, both after the same penalties, temperature
and filters, a proposal x ~ q is kept with probability min(1, p(x) / q(x)); at the first that is
not, a token is drawn from max(0, p - q), normalised, and where all are kept one more from p. The
tokens are distributed as if the target had drawn each of them; at temperature 0 they are its most
likely ones (where rounding does not decide between two, as several tokens run in a pass).

A rejection moves only positions back: a dense cache overwrites what is stale before it is seen.

Letters: B rows, g proposals a round, N new tokens, W = prompt and new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxllm.inference import prompts as prompts_lib
from jaxllm.inference.generate import Completion
from jaxllm.inference.prefill import decode_step, longrope_set, prefill
from jaxllm.inference.sampling import (
    SamplingConfig,
    check_key,
    choose,
    process_logits,
    seen_in_prompts,
)
from jaxllm.inference.stopping import Decodes
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.host import to_host
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import CachePolicy, DensePolicy

# What a random number is for. Each depends on the row's key, the index of the token and this.
_PROPOSE, _ACCEPT, _DRAW = range(3)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Completions, and how often the draft was right.

    Attributes:
      completions: one a prompt; log probabilities are the target's.
      passes: [B] passes of the target over proposals.
      examined: [B] proposals that were compared with the target: up to the first rejected one of
        each pass.
      accepted: [B] proposals that were kept (some may lie behind a stop token or the last token
        asked for, and are cut off).
    """

    completions: list[Completion]
    passes: Int[np.ndarray, " B"]
    examined: Int[np.ndarray, " B"]
    accepted: Int[np.ndarray, " B"]

    @property
    def acceptance(self) -> float:
        """Share of the examined proposals that were kept; NaN where there were none."""
        examined = self.examined.sum()
        return float(self.accepted.sum() / examined) if examined else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass of the target yields on average, between 1 and g + 1."""
        passes = self.passes.sum()
        return float((self.accepted.sum() + passes) / passes) if passes else float("nan")


def speculate(
    config: ModelConfig,
    params: Any,
    draft_config: ModelConfig,
    draft_params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_draft: int = 4,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop_tokens: Sequence[int] | None = None,
    tokenizer: Decodes | None = None,
    row_ids: Sequence[int] | None = None,
    cache_policy: CachePolicy | None = None,
) -> Speculation:
    """Continues prompts of any lengths with the help of a draft model.

    A row's tokens depend on its prompt, its row id and the key only, not on the rows beside it.
    Rows keep different numbers of proposals and go on from different positions.

    Args:
      config, params: the target, whose distribution the tokens have.
      draft_config, draft_params: the draft; its vocabulary is the target's.
      prompts: token ids, one list a row, none empty.
      max_new_tokens: N.
      num_draft: g, proposals a pass of the target.
      sampling: how tokens are chosen, applied to both models; None = the most likely one.
      key: for sampling; required when the temperature is above 0.
      stop_tokens: end a row; None = the target's end-of-sequence tokens.
      tokenizer: decodes the completions.
      row_ids: what the randomness of each prompt is derived from; None = 0, 1, 2, ...
      cache_policy: None or a `DensePolicy`, for both models.

    Raises:
      ValueError: another kind of cache, vocabularies of different sizes, rotary frequencies that
        change with the length, or what `generate.sample` refuses.
    """
    sampling = SamplingConfig() if sampling is None else sampling
    _check(config, draft_config, num_draft, cache_policy)
    for model in (config, draft_config):
        prompts_lib.check_prompts(model, prompts, max_new_tokens)
    check_key(sampling, key)
    if not prompts or max_new_tokens == 0:
        text = None if tokenizer is None else ""
        none = np.zeros(len(prompts), np.int32)
        return Speculation([Completion([], [], "length", text) for _ in prompts], none, none, none)
    stops = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
    padded = prompts_lib.pad_prompts(prompts)
    ids = prompts_lib.pad_row_ids(row_ids, len(prompts), len(padded.lengths))
    state = _run(
        config,
        params,
        draft_config,
        draft_params,
        padded.tokens,
        padded.lengths,
        np.arange(len(padded.lengths)) < padded.rows,
        ids,
        jnp.int32(max_new_tokens),
        jax.random.key(0) if key is None else key,
        sampling.values(),
        num_draft=num_draft,
        capacity=prompts_lib.bucket(max_new_tokens, prompts_lib.SMALLEST),
        stop_tokens=np.array(stops, np.int32),
        policy=cache_policy,
    )
    new, log_probs, passes, examined, accepted = (
        to_host(leaf)[: padded.rows]
        for leaf in (state.new, state.log_probs, state.passes, state.examined, state.accepted)
    )
    completions = []
    for row in range(padded.rows):
        # Only a stop token ends a row earlier than its last token; what follows it is cut.
        tokens = new[row, :max_new_tokens].tolist()[: int(state.count[row])]
        kept = prompts_lib.until_stop(tokens, stops)
        finish: Literal["stop", "length"] = "stop" if len(kept) < len(tokens) else "length"
        text = None if tokenizer is None else tokenizer.decode(kept)
        completions.append(Completion(kept, log_probs[row, : len(kept)].tolist(), finish, text))
    return Speculation(completions, passes, examined, accepted)


def _check(config, draft_config, num_draft, cache_policy) -> None:
    if cache_policy is not None and not isinstance(cache_policy, DensePolicy):
        raise ValueError(
            f"speculative decoding needs dense caches, not {type(cache_policy).__name__}: rejected "
            "tokens must leave no trace."
        )
    if draft_config.vocab_size != config.vocab_size:
        raise ValueError(
            f"the draft has a vocabulary of {draft_config.vocab_size} tokens, the target of "
            f"{config.vocab_size}: they must share one tokenizer."
        )
    if num_draft < 1:
        raise ValueError(f"num_draft={num_draft} must be at least 1.")
    for name, model in (("target", config), ("draft", draft_config)):
        if model.rope.type == "dynamic":
            raise ValueError(
                f"the {name}'s rotary frequencies change with the length (rope type 'dynamic'), so "
                "that its tokens depend on how many run in a pass."
            )


@flax.struct.dataclass
class _State:
    """What the loop carries.

    Attributes:
      last: [B] the newest token of each row, which neither model has run yet.
      new, log_probs: [B, N + g + 1]; a row has `count` of them.
      seen: [B, V] tokens of prompt and answer, where a penalty needs them.
      passes, examined, accepted: see `Speculation`.
    """

    last: Int[Array, " B"]
    new: Int[Array, "B W"]
    log_probs: Float[Array, "B W"]
    count: Int[Array, " B"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None
    passes: Int[Array, " B"]
    examined: Int[Array, " B"]
    accepted: Int[Array, " B"]
    cache: tuple[Any, ...]
    draft_cache: tuple[Any, ...]


@functools.partial(
    jax.jit,
    static_argnames=("config", "draft_config", "num_draft", "capacity"),
)
def _run(
    config: ModelConfig,
    params: Any,
    draft_config: ModelConfig,
    draft_params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    real: Bool[Array, " B"],
    row_ids: Int[Array, " B"],
    max_new_tokens: Int[Array, ""],
    key: PRNGKeyArray,
    values: dict[str, Array],
    *,
    num_draft: int,
    capacity: int,
    stop_tokens: Int[Array, " E"],
    policy: DensePolicy | None,
) -> _State:
    batch, padded = tokens.shape
    rows, offsets = jnp.arange(batch), jnp.arange(num_draft + 1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)
    # Models whose rotary frequencies have two sets keep theirs for the whole row.
    rope_set = longrope_set(config, lengths + max_new_tokens)
    draft_rope_set = longrope_set(draft_config, lengths + max_new_tokens)

    def start() -> _State:
        """Both prefills, and the first token."""
        slots = padded + capacity + num_draft + 1
        options: dict[str, Any] = {"num_slots": slots, "cache_policy": policy}
        logits, cache = prefill(config, params, tokens, lengths, rope_set=rope_set, **options)
        _, draft_cache = prefill(
            draft_config, draft_params, tokens, lengths, rope_set=draft_rope_set, **options
        )
        seen = None
        if "repetition_penalty" in values:
            seen = seen_in_prompts(tokens, lengths, config.vocab_size)
        count = jnp.zeros(batch, jnp.int32)
        first = choose(_keys(keys, count, _DRAW), process_logits(logits, values, seen), values)
        state = _State(
            last=first,
            new=jnp.zeros((batch, capacity + num_draft + 1), jnp.int32),
            log_probs=jnp.zeros((batch, capacity + num_draft + 1), jnp.float32),
            count=count,
            done=~real,
            seen=seen,
            passes=count,
            examined=count,
            accepted=count,
            cache=cache,
            draft_cache=draft_cache,
        )
        return append(state, first[:, None], logits[:, None], jnp.ones(batch, jnp.int32))

    def append(state: _State, chosen, logits, size) -> _State:
        """Adds the first `size` [B] of the tokens [B, M] to the rows that are not done."""
        steps = jnp.arange(chosen.shape[1])
        valid = (steps < size[:, None]) & ~state.done[:, None]
        places = jnp.where(valid, state.count[:, None] + steps, state.new.shape[1])
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[..., None], axis=-1)[
            ..., 0
        ]
        seen = state.seen
        if seen is not None:
            ids = jnp.where(valid, chosen, config.vocab_size)
            seen = seen.at[rows[:, None], ids].set(True, mode="drop")
        count = state.count + jnp.where(state.done, 0, size)
        stopped = (valid & jnp.isin(chosen, stop_tokens)).any(-1)
        return dataclasses.replace(
            state,
            last=jnp.where(state.done, state.last, chosen[rows, size - 1]),
            new=state.new.at[rows[:, None], places].set(chosen, mode="drop"),
            log_probs=state.log_probs.at[rows[:, None], places].set(log_probs, mode="drop"),
            count=count,
            done=state.done | stopped | (count >= max_new_tokens),
            seen=seen,
        )

    def propose(state: _State):
        """g tokens of the draft [B, g], its processed logits [B, g, V], and what each had seen."""

        def step(carry, offset):
            token, seen, cache = carry
            position = lengths + state.count - 1 + offset
            logits, cache = decode_step(
                draft_config, draft_params, token, position, cache, draft_rope_set
            )
            logits = process_logits(logits, values, seen)
            chosen = choose(_keys(keys, state.count + offset, _PROPOSE), logits, values)
            later = None if seen is None else seen.at[rows, chosen].set(True)
            return (chosen, later, cache), (chosen, logits, seen)

        # The last step's token is not proposed: it puts the one before it into the draft's cache.
        carry, found = jax.lax.scan(step, (state.last, state.seen, state.draft_cache), offsets)
        chosen, logits, seen = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), found)
        return chosen[:, :-1], logits[:, :-1], seen, carry[2]

    def round_of(state: _State) -> _State:
        proposed, draft_logits, seen, draft_cache = propose(state)
        ids = jnp.concatenate([state.last[:, None], proposed], axis=1)
        inputs = ModelInputs(
            positions=(lengths + state.count - 1)[:, None] + offsets, rope_set=rope_set
        )
        outputs = forward(config, params, ids, inputs, cache=state.cache)
        processed = process_logits(outputs.logits, values, seen)
        kept, drawn = verify(state, proposed, draft_logits, processed)
        chosen = jnp.where(offsets < kept[:, None], jnp.pad(proposed, ((0, 0), (0, 1))), drawn)
        running = ~state.done
        state = dataclasses.replace(
            state,
            cache=outputs.cache,
            draft_cache=draft_cache,
            passes=state.passes + running,
            examined=state.examined + running * jnp.minimum(kept + 1, num_draft),
            accepted=state.accepted + running * kept,
        )
        return append(state, chosen, outputs.logits, kept + 1)

    def verify(state: _State, proposed, draft_logits, processed):
        """How many proposals are kept [B], and the token that follows them [B, 1]."""
        if "temperature" not in values:
            best = jnp.argmax(processed, axis=-1).astype(jnp.int32)
            kept = _leading(proposed == best[:, :-1])
            return kept, best[rows, kept][:, None]
        p, q = jax.nn.softmax(processed), jax.nn.softmax(draft_logits)
        at = lambda probs: jnp.take_along_axis(probs, proposed[..., None], axis=-1)[..., 0]  # noqa: E731
        index = state.count[:, None] + offsets[:-1]
        uniform = jax.vmap(jax.vmap(jax.random.uniform))(_keys(keys[:, None], index, _ACCEPT))
        kept = _leading(uniform * at(q) < at(p[:, :-1]))
        # Nothing is proposed behind the last one: there the rest is p itself.
        rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)[rows, kept]
        # Rounding can reject where p = q; the rest is then empty.
        rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p[rows, kept])
        draw = _keys(keys, state.count + kept, _DRAW)
        return kept, jax.vmap(jax.random.categorical)(draw, jnp.log(rest)).astype(jnp.int32)[
            :, None
        ]

    return jax.lax.while_loop(lambda state: ~state.done.all(), round_of, start())


def _keys(keys: PRNGKeyArray, index: Int[Array, ...], purpose: int) -> PRNGKeyArray:
    """A key for each token index and purpose; `keys` and `index` broadcast.

    A proposal that was not reached left no trace in the answer, so its index may use the same
    randomness again.
    """
    keys, index = jnp.broadcast_arrays(keys, index) if keys.shape != index.shape else (keys, index)
    fold = lambda key, i: jax.random.fold_in(jax.random.fold_in(key, i), purpose)  # noqa: E731
    return jax.vmap(fold)(keys.reshape(-1), index.reshape(-1)).reshape(index.shape)


def _leading(kept: Bool[Array, "B g"]) -> Int[Array, " B"]:
    """How many are true before the first that is not."""
    return jnp.cumprod(kept, axis=-1).sum(-1).astype(jnp.int32)
