"""The compiled half of the engine: a batch whose rows begin and end at different times.

Letters: B slots, R rows that begin together, P padded prompt length, K steps of a burst, M stop
tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from jaxllm.inference.prefill import decode_step, longrope_set, prefill
from jaxllm.inference.sampling import SamplingConfig, choose, process_logits, seen_in_prompts
from jaxllm.models.config import ModelConfig
from jaxllm.models.kv_cache import CachePolicy, compact, put_rows

MAX_STOP_TOKENS = 16
NO_TOKEN = -1  # Where a row had already ended.

# Values of filters that keep every token; a top_k of the whole vocabulary does.
_OFF = {"top_k": np.iinfo(np.int32).max, "top_p": np.inf, "min_p": 0.0}


@flax.struct.dataclass
class Rows:
    """What is known of each row beside its cache; every leaf has the rows first.

    Attributes:
      tokens: chosen last, not run yet.
      positions: of these tokens.
      steps: new tokens so far.
      limits: most new tokens.
      stop_tokens: end the row, padded with -1.
      keys: randomness of the row; each step folds its number in.
      options: numbers of `SamplingConfig` (see `option_values`).
      seen: tokens of prompt and answer, for the repetition penalty.
      rope_set: see `prefill.longrope_set`.
    """

    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    steps: Int[Array, " B"]
    limits: Int[Array, " B"]
    stop_tokens: Int[Array, "B M"]
    keys: PRNGKeyArray
    options: dict[str, Array]
    seen: Bool[Array, "B V"]
    rope_set: Int[Array, " B"] | None


@flax.struct.dataclass
class Slots:
    """All rows and their caches, one a segment of layers."""

    rows: Rows
    cache: tuple[Any, ...]


@flax.struct.dataclass
class Arrivals:
    """Requests that begin together, as arrays of the host.

    Attributes:
      tokens, lengths: right-padded prompts.
      slots: which slot each takes.
      limits, stop_tokens, options: as in `Rows`.
      keys: key data.
    """

    tokens: Int[np.ndarray, "R P"]
    lengths: Int[np.ndarray, " R"]
    slots: Int[np.ndarray, " R"]
    limits: Int[np.ndarray, " R"]
    stop_tokens: Int[np.ndarray, "R M"]
    options: dict[str, np.ndarray]
    keys: UInt[np.ndarray, "R ..."]


class Burst(NamedTuple):
    """What the rows have chosen; `NO_TOKEN` where a row was not running.

    Attributes:
      tokens, log_probs: [K, B]; rows from `steps` on are empty.
      steps: how many were made.
    """

    tokens: Int[Array, "K B"]
    log_probs: Float[Array, "K B"]
    steps: Int[Array, ""]


def option_values(sampling: SamplingConfig) -> dict[str, Any]:
    """The numbers of one row, with values that change nothing for what is off."""
    values = dataclasses.asdict(sampling)
    values |= {name: off for name, off in _OFF.items() if values[name] is None}
    top_k = np.int32(min(values.pop("top_k"), _OFF["top_k"]))
    return {"top_k": top_k} | {name: np.float32(value) for name, value in values.items()}


def empty_slots(
    config: ModelConfig, params: Any, cache_policy: CachePolicy, num_slots: int, max_length: int
) -> Slots:
    """Slots in which nothing runs."""
    zeros = jnp.zeros(num_slots, jnp.int32)
    options = option_values(SamplingConfig())
    rows = Rows(
        tokens=zeros,
        positions=zeros,
        steps=zeros,
        limits=zeros,
        stop_tokens=jnp.full((num_slots, MAX_STOP_TOKENS), NO_TOKEN, jnp.int32),
        keys=jax.random.split(jax.random.key(0), num_slots),
        options={name: jnp.full(num_slots, value) for name, value in options.items()},
        seen=jnp.zeros((num_slots, config.vocab_size), bool),
        rope_set=longrope_set(config, zeros),
    )
    cache = compact(cache_policy.init(config, params, num_slots, max_length))
    # Donated buffers must not be shared.
    return jax.tree.map(jnp.copy, Slots(rows, cache))


def _choose(rows: Rows, logits: Float[Array, "B V"]) -> tuple[Rows, Float[Array, " B"]]:
    """The next token of every row, as `generate.sample` chooses it, and its log probability.

    Every row has its own options. Steps that no row asks for are skipped, not compiled away.
    """
    options = rows.options
    greedy = options["temperature"] == 0
    always = {
        "repetition_penalty": options["repetition_penalty"],
        "temperature": jnp.where(greedy, 1.0, options["temperature"]),
    }
    filters = {name: options[name] for name in _OFF}
    filtered = (options["top_k"] < logits.shape[-1]) | jnp.isfinite(options["top_p"])
    filtered |= options["min_p"] > 0
    processed = jax.vmap(process_logits)(logits, always, rows.seen)
    best = jnp.argmax(processed, axis=-1).astype(jnp.int32)

    def sampled():
        kept = jax.lax.cond(
            jnp.any(filtered & ~greedy),
            lambda: jax.vmap(process_logits)(processed, filters),
            lambda: processed,
        )
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.steps)
        return jnp.where(greedy, best, choose(keys, kept, always))

    tokens = jax.lax.cond(greedy.all(), lambda: best, sampled)
    index = jnp.arange(len(tokens))
    log_probs = jax.nn.log_softmax(logits)[index, tokens]
    chosen = dataclasses.replace(
        rows,
        tokens=tokens,
        positions=rows.positions + 1,
        steps=rows.steps + 1,
        seen=rows.seen.at[index, tokens].set(True),
    )
    return chosen, log_probs


def _running(rows: Rows) -> Bool[Array, " B"]:
    """Whether a row goes on after its last token."""
    stopped = (rows.tokens[:, None] == rows.stop_tokens).any(-1)
    return ~stopped & (rows.steps < rows.limits)


@functools.partial(
    jax.jit, static_argnames=("config", "max_length", "prefill_chunk"), donate_argnames=("slots",)
)
def begin(
    config: ModelConfig,
    params: Any,
    cache_policy: CachePolicy,
    slots: Slots,
    arrivals: Arrivals,
    *,
    max_length: int,
    prefill_chunk: int | None,
) -> tuple[Slots, Burst]:
    """Runs prompts and puts them into their slots; their first tokens are a burst of one step."""
    arriving = jax.tree.map(jnp.asarray, arrivals)
    tokens, lengths = arriving.tokens, arriving.lengths
    rope_set = longrope_set(config, lengths + arriving.limits)
    logits, cache = prefill(
        config,
        params,
        tokens,
        lengths,
        num_slots=max_length,
        rope_set=rope_set,
        cache_policy=cache_policy,
        chunk=prefill_chunk,
    )
    rows = Rows(
        tokens=lengths,
        positions=lengths - 1,
        steps=jnp.zeros_like(lengths),
        limits=arriving.limits,
        stop_tokens=arriving.stop_tokens,
        keys=jax.random.wrap_key_data(arriving.keys),
        options=arriving.options,
        seen=seen_in_prompts(jnp.asarray(tokens), lengths, config.vocab_size),
        rope_set=rope_set,
    )
    rows, log_probs = _choose(rows, logits)
    slots = Slots(
        rows=jax.tree.map(lambda whole, part: whole.at[arriving.slots].set(part), slots.rows, rows),
        cache=put_rows(slots.cache, arriving.slots, cache),
    )
    return slots, Burst(rows.tokens[None], log_probs[None], jnp.int32(1))


@functools.partial(jax.jit, static_argnames=("config", "most_steps"), donate_argnames=("slots",))
def advance(
    config: ModelConfig,
    params: Any,
    slots: Slots,
    running: Bool[Array, " B"],
    others_wait: Bool[Array, ""],
    *,
    most_steps: int,
) -> tuple[Slots, Burst]:
    """Decodes up to `most_steps` tokens a row.

    Args:
      config, params: the model.
      slots: as it is now.
      running: which rows go on; the others choose nothing.
      others_wait: end as soon as a row ends, so that its slot can be filled.
      most_steps: K.
    """

    def going_on(carry):
        _, now, burst = carry
        enough = others_wait & jnp.any(running & ~now)
        return (burst.steps < most_steps) & jnp.any(now) & ~enough

    def step(carry):
        slots, now, burst = carry
        rows = slots.rows
        logits, cache = decode_step(
            config, params, rows.tokens, rows.positions, slots.cache, rows.rope_set, now
        )
        chosen, log_probs = _choose(rows, logits)
        # A row that has ended stays where it is, within its cache.
        positions = jnp.where(now, chosen.positions, rows.positions)
        chosen = dataclasses.replace(chosen, positions=positions)
        burst = Burst(
            burst.tokens.at[burst.steps].set(jnp.where(now, chosen.tokens, NO_TOKEN)),
            burst.log_probs.at[burst.steps].set(log_probs),
            burst.steps + 1,
        )
        return Slots(chosen, cache), now & _running(chosen), burst

    shape = (most_steps, len(running))
    burst = Burst(jnp.full(shape, NO_TOKEN, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.int32(0))
    slots, _, burst = jax.lax.while_loop(going_on, step, (slots, running, burst))
    return slots, burst
