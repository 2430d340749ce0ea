"""The engine answers every request as it would be answered alone."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference import engine_slots
from jaxllm.inference.engine import Engine, Request
from jaxllm.inference.generate import Completion, sample
from jaxllm.inference.sampling import SamplingConfig
from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.decoder import forward
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.parameters import init_params
from jaxllm.models.window_cache import SlidingWindowPolicy

KEY = jax.random.key(5)
SLOTS = {"num_slots": 2, "max_length": 48, "burst": 5}
# What the requests of a workload differ in beside their prompts: one call of `sample` for each.
KINDS = (
    {"max_new_tokens": 9, "sampling": SamplingConfig(repetition_penalty=1.5)},
    {"max_new_tokens": 16, "sampling": SamplingConfig(temperature=1.0), "stop_tokens": (7, 11)},
    {
        "max_new_tokens": 13,
        "sampling": SamplingConfig(1.2, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
        "stop_strings": ("zz", "qj"),
    },
)


class Letters:
    """Token i is the letter chr(97 + i), except that 26 and above are two letters."""

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else "zz" for i in ids)


def build(**changes):
    config = ModelConfig(
        vocab_size=40, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, initializer_range=0.4
    )
    config = dataclasses.replace(config, **changes)
    return config, init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def engine(model):
    return Engine(*model, **SLOTS, tokenizer=Letters())


def row_key(row: int):
    """The key of the first sample of a row id in `sample`."""
    return jax.random.fold_in(jax.random.fold_in(KEY, row), 0)


PROMPTS = [np.random.default_rng(i).integers(1, 40, 1 + 5 * i % 16).tolist() for i in range(24)]
REQUESTS = [
    Request(prompt, key=row_key(i), **KINDS[i % len(KINDS)]) for i, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def expected(model) -> list[Completion]:
    """What `sample` answers, whose rows do not depend on each other."""
    found: dict[int, Completion] = {}
    for number, kind in enumerate(KINDS):
        ids = range(number, len(PROMPTS), len(KINDS))
        prompts = [PROMPTS[i] for i in ids]
        answers = sample(*model, prompts, key=KEY, row_ids=ids, tokenizer=Letters(), **kind)
        found |= {i: completion for i, (completion,) in zip(ids, answers, strict=True)}
    # Some are ended by stop tokens, some by stop strings.
    for number in (1, 2):
        assert "stop" in {found[i].finish for i in range(number, len(PROMPTS), len(KINDS))}
    return [found[i] for i in range(len(PROMPTS))]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.tokens == other.tokens, number
        assert (one.finish, one.text) == (other.finish, other.text), number
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


@pytest.mark.parametrize("num_slots", [1, 5])
def test_answers_are_those_of_one_by_one_in_any_order(model, expected, num_slots):
    engine = Engine(*model, **(SLOTS | {"num_slots": num_slots}), tokenizer=Letters())
    assert_same(engine.run(REQUESTS), expected)
    order = list(range(len(REQUESTS)))
    random.Random(num_slots).shuffle(order)
    assert_same(engine.run([REQUESTS[i] for i in order]), [expected[i] for i in order])
    assert engine.num_running == engine.num_waiting == 0


def test_cancelled_requests_leave_their_slots_and_change_nothing(engine, expected):
    others = REQUESTS[::2]
    endless = [Request([3, 1, number], 40, stop_tokens=()) for number in range(4)]
    handles = [engine.submit(request) for request in (*endless, *others)]
    engine.step()
    assert engine.num_running == 2 and 0 < len(handles[0].tokens) < 40
    for handle in handles[:4]:  # two are running, two wait
        engine.cancel(handle)
    assert engine.num_running == 0 and engine.num_waiting == len(others)
    while engine.step():
        pass
    assert all(handle.cancelled and handle.completion is None for handle in handles[:4])
    assert_same([handle.completion for handle in handles[4:]], expected[::2])


def test_a_callback_may_cancel_its_neighbour(engine):
    handles = []
    request = Request([1, 2], 30, stop_tokens=())
    handles.append(engine.submit(request, lambda _: engine.cancel(handles[1])))
    handles.append(engine.submit(request))
    while engine.step():
        pass
    assert len(handles[0].completion.tokens) == 30
    assert handles[1].cancelled and engine.num_running == 0


def test_requests_join_while_others_run_in_two_slots(engine, expected):
    handles = []
    for request in REQUESTS:
        handles.append(engine.submit(request))
        engine.step()
    while engine.step():
        pass
    assert_same([handle.completion for handle in handles], expected)
    short = [dataclasses.replace(request, max_new_tokens=1) for request in REQUESTS[:3]]
    for one, whole in zip(engine.run(short), expected, strict=False):
        assert one.tokens == whole.tokens[:1]


def test_streams_are_the_answers(engine, expected):
    for number in range(3):
        parts = list(engine.stream(REQUESTS[number]))
        assert sum(parts, []) == expected[number].tokens
    stream = engine.stream(REQUESTS[1])
    next(stream)
    stream.close()
    assert engine.num_running == 0


def test_a_burst_ends_early_only_where_another_waits(engine):
    short, long = (Request([5, 6], count, stop_tokens=()) for count in (2, 30))
    handles = [engine.submit(request) for request in (short, long, long)]
    engine.step()
    assert [len(handle.tokens) for handle in handles] == [2, 2, 0]
    engine.step()
    assert [len(handle.tokens) for handle in handles] == [2, 7, 6]
    while engine.step():
        pass


def test_few_programs_are_compiled(model):
    engine = Engine(*model, **SLOTS)
    before = engine_slots.begin._cache_size(), engine_slots.advance._cache_size()
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(1, 40, rng.integers(1, 25)).tolist(),
            int(rng.integers(1, 12)),
            SamplingConfig(temperature=number % 3, top_k=1 + number, top_p=0.9),
            key=KEY,
            stop_tokens=range(number % 5),
        )
        for number in range(40)
    ]
    engine.run(requests)
    # Prompts of up to 16 and 24 tokens, 1 or 2 of them at once.
    assert engine_slots.begin._cache_size() - before[0] <= 2 * 2
    assert engine_slots.advance._cache_size() - before[1] <= 1


def test_a_full_slot_holds_max_length_tokens_and_longrope_keeps_its_set():
    rope = RopeConfig(
        type="longrope",
        original_max_positions=10,
        short_factor=(1.0,) * 4,
        long_factor=(3.0, 4.0, 5.0, 6.0),
    )
    config, params = build(rope=rope)
    engine = Engine(config, params, num_slots=2, max_length=12)
    requests = [Request([1, 2, 3], count, stop_tokens=()) for count in (9, 3)]
    logits = jax.jit(
        lambda tokens, sets: forward(config, params, tokens, ModelInputs(rope_set=sets)).logits
    )
    for request, found in zip(requests, engine.run(requests), strict=True):
        tokens = [*request.prompt, *found.tokens]
        assert len(found.tokens) == request.max_new_tokens
        # Up to 10 tokens of prompt and answer the short frequencies, beyond them the long ones.
        padded = jnp.asarray([tokens + [0] * (12 - len(tokens))])
        likeliest = logits(padded, jnp.asarray([int(len(tokens) > 10)]))[0].argmax(-1)
        np.testing.assert_array_equal(found.tokens, likeliest[2 : len(tokens) - 1])


def test_slots_with_rings_of_a_window_serve_one_request_after_another():
    config, params = build(windows=(4, None))
    engine = Engine(
        config,
        params,
        num_slots=2,
        max_length=32,
        cache_policy=SlidingWindowPolicy(),
        prefill_chunk=8,
    )
    prompts = [PROMPTS[i][:size] for i, size in ((2, 11), (3, 3), (6, 14), (9, 9), (3, 16))]
    limits = [9, 2, 5, 12, 12]
    found = engine.run(
        Request(prompt, limit, stop_tokens=())
        for prompt, limit in zip(prompts, limits, strict=True)
    )
    expected = sample(config, params, prompts, max_new_tokens=12, stop_tokens=())
    for one, (other,), limit in zip(found, expected, limits, strict=True):
        assert one.tokens == other.tokens[:limit]


def test_bad_requests_are_refused(model, engine):
    for request, message in (
        (Request([], 1), "prompt 0 is empty"),
        (Request([40], 1), "token id 40"),
        (Request([1] * 40, 9), "make 49, more than max_length=48"),
        (Request([1], -1), "must not be negative"),
        (Request([1], 1, SamplingConfig(1.0)), "needs a key"),
        (Request([1], 1, stop_strings=("",)), "must not be empty"),
        (Request([1], 1, stop_tokens=range(17)), "17 stop_tokens: at most 16"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    assert not engine.step()
    with pytest.raises(ValueError, match="num_slots=0"):
        Engine(*model, num_slots=0)
    with pytest.raises(ValueError, match="max_length=1 "):
        Engine(*model, max_length=1)
    assert engine.run([Request([1], 0)]) == [Completion([], [], "length", "")]
    with pytest.raises(ValueError, match="need a tokenizer"):
        Engine(*model, **SLOTS).submit(Request([1], 1, stop_strings=("a",)))
