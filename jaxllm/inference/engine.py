"""Continuous batching: a fixed number of slots, refilled as sequences end.

    engine = Engine(config, params, num_slots=8, max_length=512)
    completions = engine.run([Request(prompt, max_new_tokens=64) for prompt in prompts])

Requests join while others run (Orca, OSDI 2022), each with options of its own. What a request is
answered depends on its prompt, key and options only: not on its neighbours, on the order of arrival
or on the number of slots. An engine belongs to one thread.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxllm.inference import engine_slots, stopping
from jaxllm.inference import prompts as prompts_lib
from jaxllm.inference.engine_slots import MAX_STOP_TOKENS, NO_TOKEN, Arrivals, Burst
from jaxllm.inference.generate import Completion
from jaxllm.inference.sampling import SamplingConfig, check_key
from jaxllm.models.config import ModelConfig
from jaxllm.models.kv_cache import CachePolicy, DensePolicy

BURST = 8  # Decoding steps between looks at stop strings, new requests and cancelled ones.


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      prompt: token ids, not empty.
      max_new_tokens: N.
      sampling: how tokens are chosen.
      key: for sampling; `generate.sample` gives sample s of row id r the key
        fold_in(fold_in(key, r), s).
      stop_tokens: end the answer, at most 16; None = the config's end-of-sequence tokens.
      stop_strings: end the answer as soon as its text holds one; need the engine's tokenizer.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig = SamplingConfig()
    key: PRNGKeyArray | None = None
    stop_tokens: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()


class Handle:
    """A submitted request.

    Attributes:
      request: what was asked for.
      tokens, log_probs: of the answer so far, as in `Completion`.
      completion: the answer; None until it is finished, and for ever where it was cancelled.
      cancelled: whether it was.
    """

    def __init__(self, request: Request, on_update: Callable[[Handle], None] | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.completion: Completion | None = None
        self.cancelled = False
        self._on_update = on_update

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.cancelled or self.completion is not None

    def _updated(self) -> None:
        if self._on_update is not None:
            self._on_update(self)


class Engine:
    """Answers requests in a fixed number of slots.

    Args:
      config, params: the model.
      num_slots: sequences that run at once.
      max_length: the most tokens that a prompt and its answer may have together: what a slot's
        cache has room for.
      tokenizer: decodes completions and finds stop strings.
      burst: decoding steps that are run without a look at the host.
      cache_policy: which caches keep keys and values; None = dense ones.
      prefill_chunk: tokens of prompts run at once (see `prefill.prefill`); None = all.

    Prompts are padded to buckets and begin in powers of two, so that a workload of any lengths
    compiles few programs: one to decode, and one for each bucket and number of prompts.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        *,
        num_slots: int = 8,
        max_length: int = 1024,
        tokenizer: stopping.Decodes | None = None,
        burst: int = BURST,
        cache_policy: CachePolicy | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        for name, value in (("num_slots", num_slots), ("burst", burst)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if max_length < 2:
            raise ValueError(f"max_length={max_length} must be at least 2.")
        if config.positions == "learned" and max_length > config.max_positions:
            raise ValueError(
                f"max_length={max_length} exceeds the model's {config.max_positions} positions."
            )
        self._cache_policy = DensePolicy() if cache_policy is None else cache_policy
        self.config = config
        self.params = self._cache_policy.split(config, params)
        self.num_slots = num_slots
        self.max_length = max_length
        self.tokenizer = tokenizer
        self._burst = burst
        self._prefill_chunk = prefill_chunk
        self._slots = self._empty_slots()
        self._running: list[Handle | None] = [None] * num_slots
        self._waiting: collections.deque[Handle] = collections.deque()

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return sum(handle is not None for handle in self._running)

    def check(self, request: Request) -> None:
        """Refuses what cannot be answered.

        Raises:
          ValueError: an empty prompt, a token id outside of the vocabulary, more tokens than a slot
            has room for, a missing key or tokenizer, too many stop tokens.
        """
        prompts_lib.check_prompts(self.config, [request.prompt], request.max_new_tokens)
        total = len(request.prompt) + request.max_new_tokens
        if total > self.max_length:
            raise ValueError(
                f"a prompt of {len(request.prompt)} and {request.max_new_tokens} new tokens make "
                f"{total}, more than max_length={self.max_length}."
            )
        check_key(request.sampling, request.key)
        stopping.check_stop_strings(request.stop_strings, self.tokenizer)
        if len(self._stop_tokens(request)) > MAX_STOP_TOKENS:
            raise ValueError(
                f"{len(self._stop_tokens(request))} stop_tokens: at most {MAX_STOP_TOKENS} fit."
            )

    def submit(self, request: Request, on_update: Callable[[Handle], None] | None = None) -> Handle:
        """Queues a request.

        Args:
          request: what to answer.
          on_update: called with the handle from within `step` whenever it has new tokens or is
            done.

        Raises:
          ValueError: as `check`.
        """
        self.check(request)
        handle = Handle(request, on_update)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """`submit` for a handle whose request has been checked, as from another thread."""
        if handle.request.max_new_tokens == 0:
            self._finish(handle, "length")
            handle._updated()
        else:
            self._waiting.append(handle)

    def cancel(self, handle: Handle) -> None:
        """Ends a request without an answer and frees its slot; a done one stays as it is."""
        if handle.done:
            return
        handle.cancelled = True
        if handle in self._waiting:
            self._waiting.remove(handle)
        self._running = [None if other is handle else other for other in self._running]
        handle._updated()

    def reset(self) -> None:
        """Cancels all requests and empties the slots: after a step that has failed."""
        for handle in [*self._running, *self._waiting]:
            if handle is not None:
                self.cancel(handle)
        self._slots = self._empty_slots()

    def _empty_slots(self) -> engine_slots.Slots:
        return engine_slots.empty_slots(
            self.config, self.params, self._cache_policy, self.num_slots, self.max_length
        )

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """The answers to all requests, in their order."""
        handles = [self.submit(request) for request in requests]
        while not all(handle.done for handle in handles):
            self.step()
        return [handle.completion for handle in handles if handle.completion is not None]

    def stream(self, request: Request) -> Iterator[list[int]]:
        """Submits a request and yields its new tokens as they come, other requests going on.

        Leaving the iterator early cancels it.
        """
        handle = self.submit(request)
        reported = 0
        try:
            while not handle.done:
                self.step()
                fresh = handle.tokens[reported:]
                reported += len(fresh)
                if fresh:
                    yield fresh
        finally:
            self.cancel(handle)

    def step(self) -> bool:
        """Fills free slots, then decodes one burst; returns whether requests are left."""
        self._refill()
        running = np.array([handle is not None for handle in self._running])
        if running.any():
            self._slots, burst = engine_slots.advance(
                self.config,
                self.params,
                self._slots,
                running,
                np.bool_(bool(self._waiting)),
                most_steps=self._burst,
            )
            self._read(burst, list(self._running))
        return bool(self._waiting) or self.num_running > 0

    def _refill(self) -> None:
        """Starts waiting requests, first come first served, until no slot is free."""
        while self._waiting and None in self._running:
            free = [slot for slot, handle in enumerate(self._running) if handle is None]
            arriving = [self._waiting.popleft() for _ in free[: len(self._waiting)]]
            for slot, handle in zip(free, arriving, strict=False):
                self._running[slot] = handle
            by_length: dict[int, list[tuple[int, Handle]]] = {}
            for slot, handle in zip(free, arriving, strict=False):
                by_length.setdefault(self._padded(handle), []).append((slot, handle))
            for padded, group in by_length.items():
                for part in _powers_of_two(group):
                    self._begin(padded, part)

    def _padded(self, handle: Handle) -> int:
        length = prompts_lib.bucket(len(handle.request.prompt), prompts_lib.SMALLEST)
        return min(length, self.max_length)

    def _begin(self, padded: int, group: list[tuple[int, Handle]]) -> None:
        requests = [handle.request for _, handle in group]
        tokens = np.zeros((len(group), padded), np.int32)
        stops = np.full((len(group), MAX_STOP_TOKENS), NO_TOKEN, np.int32)
        for row, request in enumerate(requests):
            tokens[row, : len(request.prompt)] = request.prompt
            own = self._stop_tokens(request)
            stops[row, : len(own)] = own
        keys = [jax.random.key(0) if r.key is None else r.key for r in requests]
        options = [engine_slots.option_values(r.sampling) for r in requests]
        arrivals = Arrivals(
            tokens=tokens,
            lengths=np.array([len(r.prompt) for r in requests], np.int32),
            slots=np.array([slot for slot, _ in group], np.int32),
            limits=np.array([r.max_new_tokens for r in requests], np.int32),
            stop_tokens=stops,
            options={name: np.stack([row[name] for row in options]) for name in options[0]},
            keys=np.stack([np.asarray(jax.random.key_data(key)) for key in keys]),
        )
        self._slots, burst = engine_slots.begin(
            self.config,
            self.params,
            self._cache_policy,
            self._slots,
            arrivals,
            max_length=self.max_length,
            prefill_chunk=self._prefill_chunk,
        )
        self._read(burst, [handle for _, handle in group])

    def _read(self, burst: Burst, columns: list[Handle | None]) -> None:
        """Hands the tokens of a burst to their requests, and frees the slots of those that end."""
        burst = jax.device_get(burst)
        for column, handle in enumerate(columns):
            if handle is None or handle.done:  # another's `on_update` may have cancelled it
                continue
            made = burst.tokens[: burst.steps, column]
            count = int((made != NO_TOKEN).sum())
            log_probs = burst.log_probs[:count, column]
            finish = self._extend(handle, made[:count].tolist(), log_probs.tolist())
            if finish is not None:
                self._finish(handle, finish)
                self._running[self._running.index(handle)] = None
            handle._updated()

    def _extend(
        self, handle: Handle, tokens: list[int], log_probs: list[float]
    ) -> Literal["stop", "length"] | None:
        """Adds new tokens; returns why the answer ends, if it does."""
        request = handle.request
        kept = prompts_lib.until_stop(tokens, self._stop_tokens(request))
        handle.tokens += kept
        handle.log_probs += log_probs[: len(kept)]
        end = stopping.find_stop(handle.tokens, request.stop_strings, self.tokenizer)
        if end is not None:
            del handle.tokens[end:], handle.log_probs[end:]
        if end is not None or len(kept) < len(tokens):
            return "stop"
        return "length" if len(handle.tokens) >= request.max_new_tokens else None

    def _finish(self, handle: Handle, finish: Literal["stop", "length"]) -> None:
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(handle.tokens)
            text = stopping.cut_text(text, handle.request.stop_strings)
        handle.completion = Completion(handle.tokens, handle.log_probs, finish, text)

    def _stop_tokens(self, request: Request) -> tuple[int, ...]:
        given = self.config.eos_token_ids if request.stop_tokens is None else request.stop_tokens
        return tuple(dict.fromkeys(given))


def _powers_of_two(group: list[Any]) -> Iterator[list[Any]]:
    """Cuts a group into parts of 1, 2, 4, 8, ... so that few numbers of rows are compiled."""
    start = 0
    while start < len(group):
        size = 1 << ((len(group) - start).bit_length() - 1)
        yield group[start : start + size]
        start += size
