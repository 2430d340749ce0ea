"""Batched generation: one compiled prefill and decode loop, no Python per token.

Letters: B prompts, n samples of each, R = B n rows, P padded prompt length, N new tokens, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxllm.inference import prompts as prompts_lib
from jaxllm.inference.prefill import decode_step, longrope_set, prefill
from jaxllm.inference.sampling import (
    SamplingConfig,
    check_key,
    choose,
    process_logits,
    seen_in_prompts,
)
from jaxllm.inference.stopping import Decodes, check_stop_strings, cut_text, find_stop
from jaxllm.models.config import ModelConfig
from jaxllm.models.host import to_host
from jaxllm.models.kv_cache import CachePolicy, DensePolicy, stacked_spec, take_rows
from jaxllm.models.placement import active_spec

CHECK_EVERY = 16  # Decoding steps between looks at stop strings and calls of `on_tokens`.


@dataclasses.dataclass(frozen=True)
class Completion:
    """One continuation.

    Attributes:
      tokens: new ids, without the stop token; with a stop string up to the token that completes it.
      log_probs: log probability of each under the model, before penalties, temperature and filters.
      finish: "stop" (a stop token or string came) or "length".
      text: decoded, cut before the stop string; None without a tokenizer.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    text: str | None = None


def generate(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    key: PRNGKeyArray | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_policy: CachePolicy | None = None,
    prefill_chunk: int | None = None,
) -> list[list[int]]:
    """The new tokens of every prompt: `sample` without its options.

    Args:
      config, params: the model.
      prompts: token ids, one list a row, none empty.
      max_new_tokens: N.
      temperature: 0 = the most likely token; otherwise logits / temperature are sampled.
      key: for sampling; required when temperature > 0.
      stop_tokens: end a row (not returned); None = the config's end-of-sequence tokens.
      cache_policy, prefill_chunk: as for `sample`.

    Raises:
      ValueError: as `sample`.
    """
    completions = sample(
        config,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature),
        key=key,
        stop_tokens=stop_tokens,
        cache_policy=cache_policy,
        prefill_chunk=prefill_chunk,
    )
    return [of_prompt[0].tokens for of_prompt in completions]


def sample(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    num_samples: int = 1,
    stop_tokens: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: Decodes | None = None,
    row_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int, int, list[int]], None] | None = None,
    cache_policy: CachePolicy | None = None,
    prefill_chunk: int | None = None,
) -> list[list[Completion]]:
    """Continues prompts of any lengths.

    A row's tokens depend on its prompt, its row id and the key only, not on the rows beside it.
    Lengths and rows are padded up to buckets, so that a workload compiles few programs. Models with
    longrope use the long frequencies from the first token on where prompt and answer together can
    pass the original context.

    Args:
      config, params: the model.
      prompts: token ids, one list a row, none empty.
      max_new_tokens: N.
      sampling: how tokens are chosen; None = the most likely one.
      key: for sampling; required when the temperature is above 0.
      num_samples: n continuations of each prompt, which share its prefill.
      stop_tokens: end a row; None = the config's end-of-sequence tokens.
      stop_strings: end a row as soon as its text holds one; need the tokenizer.
      tokenizer: decodes the completions.
      row_ids: what the randomness of each prompt is derived from; None = 0, 1, 2, ...
      on_tokens: called as on_tokens(prompt, sample, new tokens) every few steps, before the end of
        a stop string has been cut off.
      cache_policy: which caches keep keys and values; None = dense ones. Where they differ by layer
        the parameters are cut (`CachePolicy.split`) at each call, if that has not been done before.
      prefill_chunk: tokens of the prompts run at once (see `prefill`); None = all.

    Returns:
      For every prompt its n completions.

    Raises:
      ValueError: an empty prompt, token ids outside of the vocabulary, a missing key or tokenizer,
        too long a row for learned positions.
    """
    sampling = SamplingConfig() if sampling is None else sampling
    prompts_lib.check_prompts(config, prompts, max_new_tokens)
    check_key(sampling, key)
    check_stop_strings(stop_strings, tokenizer)
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1.")
    text = "" if tokenizer is not None else None
    if not prompts or max_new_tokens == 0:
        return [[Completion([], [], "length", text)] * num_samples for _ in prompts]
    stops = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
    cache_policy = DensePolicy() if cache_policy is None else cache_policy
    params = cache_policy.split(config, params)
    padded = prompts_lib.pad_prompts(prompts)
    ids = prompts_lib.pad_row_ids(row_ids, len(prompts), len(padded.lengths))
    state = _start(
        config,
        params,
        padded.tokens,
        padded.lengths,
        np.arange(len(padded.lengths)) < padded.rows,
        ids,
        jnp.int32(max_new_tokens),
        jax.random.key(0) if key is None else key,
        sampling.values(),
        cache_policy,
        num_samples=num_samples,
        prefill_chunk=prefill_chunk,
        capacity=prompts_lib.bucket(max_new_tokens, prompts_lib.SMALLEST),
        stop_tokens=stops,
    )
    look = bool(stop_strings) or on_tokens is not None
    watch = _Watch(padded.rows, num_samples, stops, stop_strings, tokenizer, on_tokens)
    until = 1 if look else max_new_tokens
    while True:
        if until > 1:
            state = _continue(
                config, params, state, jnp.int32(until), sampling.values(), stop_tokens=stops
            )
        if look:
            state = dataclasses.replace(state, done=jnp.asarray(watch.update(state)))
        if until >= max_new_tokens or bool(state.done.all()):
            return watch.completions(state, max_new_tokens)
        until = min(until + CHECK_EVERY, max_new_tokens)


def lower(
    config: ModelConfig,
    params: Any,
    *,
    batch_size: int,
    prompt_length: int,
    max_new_tokens: int,
    cache_policy: CachePolicy | None = None,
    prefill_chunk: int | None = None,
) -> dict[str, jax.stages.Lowered]:
    """The two programs of `sample` for greedy decoding, lowered from shapes alone.

    Rows and caches lie on the active mesh (`jaxllm.training.sharding.use`) by its rules.

    Args:
      config: the model.
      params: its `ShapeDtypeStruct`s, with shardings on a mesh.
      batch_size, prompt_length, max_new_tokens: B, P, N.
      cache_policy, prefill_chunk: as for `sample`.

    Returns:
      "prefill", with the first token, and "decode", the loop over the others.
    """
    policy = DensePolicy() if cache_policy is None else cache_policy
    params = policy.split(config, params)
    mesh = jax.sharding.get_mesh()

    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh.empty else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def rows(leaf: Any) -> jax.ShapeDtypeStruct:
        names = ("batch", *(None,) * len(leaf.shape))[: len(leaf.shape)]
        return placed(leaf, active_spec(leaf.shape, names))

    whole = functools.partial(placed, spec=PartitionSpec())
    numbers = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    key = whole(jax.eval_shape(lambda: jax.random.key(0)))
    scalar = whole(jax.ShapeDtypeStruct((), jnp.int32))
    values = jax.tree.map(whole, SamplingConfig().values())
    start = (
        config,
        params,
        rows(jax.ShapeDtypeStruct((batch_size, prompt_length), jnp.int32)),
        rows(numbers),
        rows(jax.ShapeDtypeStruct((batch_size,), jnp.bool_)),
        rows(numbers),
        scalar,
        key,
        values,
        policy,
    )
    options = {
        "num_samples": 1,
        "prefill_chunk": prefill_chunk,
        "capacity": prompts_lib.bucket(max_new_tokens, prompts_lib.SMALLEST),
        "stop_tokens": config.eos_token_ids,
    }
    state = _start.eval_shape(*start, **options)
    cache = jax.tree.map(lambda leaf: placed(leaf, stacked_spec(leaf)), state.cache)
    state = dataclasses.replace(
        jax.tree.map(rows, dataclasses.replace(state, cache=())), cache=cache
    )
    stops = {"stop_tokens": config.eos_token_ids}
    return {
        "prefill": _start.lower(*start, **options),
        "decode": _continue.lower(config, params, state, scalar, values, **stops),
    }


@flax.struct.dataclass
class _State:
    """What the decoding loop carries.

    Attributes:
      step: tokens made so far; those of column step - 1 have not been run yet.
      new, log_probs: [R, N]; columns from `step` on are empty.
      seen: [R, V] tokens of prompt and answer, where a penalty needs them.
      done: [R].
      lengths: [R] of the prompts.
    """

    step: Int[Array, ""]
    new: Int[Array, "R N"]
    log_probs: Float[Array, "R N"]
    seen: Bool[Array, "R V"] | None
    done: Bool[Array, " R"]
    lengths: Int[Array, " R"]
    keys: PRNGKeyArray
    rope_set: Int[Array, " R"] | None
    cache: tuple[Any, ...]


def _append(state: _State, logits, values, stop_tokens) -> _State:
    """Chooses the next token of every row from the model's logits."""
    processed = process_logits(logits, values, state.seen)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    tokens = choose(keys, processed, values)
    rows = jnp.arange(len(tokens))
    log_probs = jax.nn.log_softmax(logits)[rows, tokens]
    return dataclasses.replace(
        state,
        step=state.step + 1,
        new=state.new.at[:, state.step].set(tokens),
        log_probs=state.log_probs.at[:, state.step].set(log_probs),
        seen=None if state.seen is None else state.seen.at[rows, tokens].set(True),
        done=state.done | jnp.isin(tokens, jnp.asarray(stop_tokens, jnp.int32)),
    )


@functools.partial(
    jax.jit,
    static_argnames=("config", "num_samples", "prefill_chunk", "capacity", "stop_tokens"),
)
def _start(
    config: ModelConfig,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    real: Bool[Array, " B"],
    row_ids: Int[Array, " B"],
    max_new_tokens: Int[Array, ""],
    key: PRNGKeyArray,
    values: dict[str, Array],
    cache_policy: CachePolicy,
    *,
    num_samples: int,
    prefill_chunk: int | None,
    capacity: int,
    stop_tokens: tuple[int, ...],
) -> _State:
    """Prefill and the first token."""
    batch, padded = tokens.shape
    rope_set = longrope_set(config, lengths + max_new_tokens)
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
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
        row_keys, jnp.arange(num_samples)
    )
    seen = None
    if "repetition_penalty" in values:
        seen = seen_in_prompts(tokens, lengths, config.vocab_size)
    rows = jnp.repeat(jnp.arange(batch), num_samples)
    if num_samples > 1:
        logits, cache = logits[rows], take_rows(cache, rows)
    state = _State(
        step=jnp.int32(0),
        new=jnp.zeros((len(rows), capacity), jnp.int32),
        log_probs=jnp.zeros((len(rows), capacity), jnp.float32),
        seen=None if seen is None else seen[rows],
        done=~real[rows],
        lengths=lengths[rows],
        keys=keys.reshape(-1),
        rope_set=None if rope_set is None else rope_set[rows],
        cache=cache,
    )
    return _append(state, logits, values, stop_tokens)


@functools.partial(jax.jit, static_argnames=("config", "stop_tokens"), donate_argnames=("state",))
def _continue(
    config: ModelConfig,
    params: Any,
    state: _State,
    until: Int[Array, ""],
    values: dict[str, Array],
    *,
    stop_tokens: tuple[int, ...],
) -> _State:
    """Decodes until every row is done or has so many new tokens."""

    def unfinished(state: _State):
        return (state.step < until) & ~state.done.all()

    def decode(state: _State) -> _State:
        tokens = state.new[:, state.step - 1]
        positions = state.lengths + state.step - 1
        logits, cache = decode_step(config, params, tokens, positions, state.cache, state.rope_set)
        return _append(dataclasses.replace(state, cache=cache), logits, values, stop_tokens)

    return jax.lax.while_loop(unfinished, decode, state)


class _Watch:
    """Follows the rows of a running batch on the host: stop strings, streaming, results."""

    def __init__(self, prompts, num_samples, stop_tokens, stop_strings, tokenizer, on_tokens):
        self._rows = prompts * num_samples
        self._num_samples = num_samples
        self._stop_tokens = stop_tokens
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        self._on_tokens = on_tokens
        self._reported = [0] * self._rows
        self._stopped_at: list[int | None] = [None] * self._rows

    def update(self, state: _State) -> np.ndarray:
        """Reports new tokens and looks for stop strings; returns which rows are done now."""
        done = np.array(to_host(state.done))
        new = to_host(state.new[: self._rows, : int(state.step)]).tolist()
        for row, tokens in enumerate(new):
            if self._stopped_at[row] is not None:
                continue
            tokens = prompts_lib.until_stop(tokens, self._stop_tokens)
            end = find_stop(tokens, self._stop_strings, self._tokenizer)
            if end is not None:
                self._stopped_at[row], tokens = end, tokens[:end]
                done[row] = True
            if self._on_tokens is not None and len(tokens) > self._reported[row]:
                fresh = tokens[self._reported[row] :]
                self._on_tokens(*divmod(row, self._num_samples), fresh)
                self._reported[row] = len(tokens)
        return done

    def completions(self, state: _State, max_new_tokens: int) -> list[list[Completion]]:
        """The results of all real rows."""
        limit = min(int(state.step), max_new_tokens)
        new = to_host(state.new[: self._rows, :limit]).tolist()
        log_probs = to_host(state.log_probs[: self._rows, :limit]).tolist()
        found = [self._completion(row, new[row], log_probs[row]) for row in range(self._rows)]
        size = self._num_samples
        return [found[start : start + size] for start in range(0, self._rows, size)]

    def _completion(self, row: int, new: list[int], log_probs: list[float]) -> Completion:
        tokens = prompts_lib.until_stop(new, self._stop_tokens)
        stopped = len(tokens) < len(new)
        if self._stopped_at[row] is not None:
            tokens, stopped = tokens[: self._stopped_at[row]], True
        text = None
        if self._tokenizer is not None:
            text = cut_text(self._tokenizer.decode(tokens), self._stop_strings)
        return Completion(tokens, log_probs[: len(tokens)], "stop" if stopped else "length", text)
