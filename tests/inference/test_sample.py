"""Samples sharing a prefill, log-probabilities, stop strings, streaming, few compilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference import generate as generate_module
from jaxllm.inference import prompts as prompts_lib
from jaxllm.inference.generate import Completion, generate, sample
from jaxllm.inference.sampling import SamplingConfig, penalize_repetition
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import init_params

PROMPTS = [[1, 2, 3], [7] * 9, [5, 4, 3, 2, 1]]
HOT = SamplingConfig(temperature=1.2, top_k=20, repetition_penalty=1.3)
KEY = jax.random.key(5)


class Letters:
    """Token i is the letter chr(97 + i), except that 30 and above are two letters."""

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else "zz" for i in ids)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=40, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, initializer_range=0.4
    )
    return config, init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def samples(model):
    return sample(*model, PROMPTS, max_new_tokens=8, sampling=HOT, key=KEY, num_samples=3)


def test_log_probs_are_those_of_the_model(model, samples):
    config, params = model
    logits = jax.jit(lambda tokens: forward(config, params, tokens).logits)
    for prompt, completions in zip(PROMPTS, samples, strict=True):
        for completion in completions:
            whole = prompt + completion.tokens
            expected = jax.nn.log_softmax(logits(jnp.asarray([whole]))[0])
            places = np.arange(len(prompt) - 1, len(whole) - 1)
            np.testing.assert_allclose(
                completion.log_probs, expected[places, whole[len(prompt) :]], atol=1e-4
            )


def test_samples_of_a_prompt_differ_and_do_not_depend_on_the_batch(model, samples):
    assert len({tuple(c.tokens) for c in samples[0]}) == 3
    alone = sample(
        *model, PROMPTS[1:2], max_new_tokens=8, sampling=HOT, key=KEY, num_samples=3, row_ids=[1]
    )
    assert [c.tokens for c in alone[0]] == [c.tokens for c in samples[1]]
    fewer = sample(*model, PROMPTS, max_new_tokens=8, sampling=HOT, key=KEY, num_samples=1)
    assert [c[0].tokens for c in fewer] == [c[0].tokens for c in samples]


def test_shorter_limit_is_a_prefix(model, samples):
    short = sample(*model, PROMPTS, max_new_tokens=3, sampling=HOT, key=KEY, num_samples=3)
    for few, many in zip(short, samples, strict=True):
        assert [c.tokens for c in few] == [c.tokens[:3] for c in many]
        assert {c.finish for c in few} == {"length"}


def test_repetition_penalty_counts_prompt_and_answer(model):
    config, params = model
    penalty = SamplingConfig(repetition_penalty=3.0)
    ((completion,),) = sample(config, params, [PROMPTS[2]], max_new_tokens=6, sampling=penalty)
    row = list(PROMPTS[2])
    for token in completion.tokens:
        logits = forward(config, params, jnp.asarray([row])).logits[0, -1]
        seen = jnp.zeros(40, bool).at[jnp.asarray(row)].set(True)
        assert token == int(penalize_repetition(logits, seen, 3.0).argmax())
        row.append(token)
    assert completion.tokens != generate(config, params, [PROMPTS[2]], max_new_tokens=6)[0]


def test_stop_strings_cut_the_text_where_they_begin(model):
    tokenizer = Letters()
    options = {"max_new_tokens": 40, "tokenizer": tokenizer, "sampling": HOT, "key": KEY}
    (whole,), (other,), _ = sample(*model, PROMPTS, **options)
    assert whole.text == tokenizer.decode(whole.tokens)
    # A string across three tokens, beyond the first look at the text.
    stop = tokenizer.decode(whole.tokens[20:23])
    (cut,), (second,), _ = sample(*model, PROMPTS, **options, stop_strings=[stop, "no such text"])
    end = whole.text.index(stop)
    assert cut.text == whole.text[:end]
    assert cut.finish == "stop"
    assert tokenizer.decode(cut.tokens).endswith(stop)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(cut.log_probs) == len(cut.tokens)
    if stop not in other.text:
        assert second == other


def test_stop_tokens_end_with_a_reason(model, samples):
    stop = samples[0][0].tokens[4]
    ended = sample(
        *model, PROMPTS, max_new_tokens=8, sampling=HOT, key=KEY, num_samples=3, stop_tokens=[stop]
    )
    first = samples[0][0].tokens.index(stop)
    assert ended[0][0].tokens == samples[0][0].tokens[:first]
    assert ended[0][0].finish == "stop"


def test_streaming_reports_every_token_once_in_order(model):
    seen: dict[tuple[int, int], list[int]] = {}

    def on_tokens(prompt, number, tokens):
        seen.setdefault((prompt, number), []).extend(tokens)

    options = {"max_new_tokens": 37, "sampling": HOT, "key": KEY, "num_samples": 2}
    found = sample(*model, PROMPTS, **options, on_tokens=on_tokens)
    assert found == sample(*model, PROMPTS, **options)
    for prompt, completions in enumerate(found):
        for number, completion in enumerate(completions):
            assert seen[prompt, number] == completion.tokens


def test_a_workload_of_many_shapes_compiles_few_programs(model):
    before = generate_module._start._cache_size(), generate_module._continue._cache_size()
    rng = np.random.default_rng(0)
    for size in range(1, 17):
        prompts = [rng.integers(1, 40, rng.integers(1, 33)).tolist() for _ in range(size)]
        temperature = 0.5 + size / 10
        generate(
            *model,
            prompts,
            max_new_tokens=int(rng.integers(2, 16)),
            temperature=temperature,
            key=KEY,
        )
    starts = generate_module._start._cache_size() - before[0]
    assert starts <= 7 * 3  # 1, 2, 3, 4, 6, 8, 12, 16 rows; 16, 24, 32 tokens
    assert generate_module._continue._cache_size() - before[1] <= starts


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_buckets(size):
    found = prompts_lib.bucket(size)
    assert size <= found <= max(4, 1.5 * size)
    assert prompts_lib.bucket(found) == found


def test_bad_requests_are_refused(model):
    for options, message in (
        ({"stop_strings": ["x"]}, "need a tokenizer"),
        ({"stop_strings": [""], "tokenizer": Letters()}, "must not be empty"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"row_ids": [1, 2]}, "2 row_ids do not fit 3 prompts"),
        ({"sampling": HOT}, "needs a key"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(*model, PROMPTS, max_new_tokens=2, **options)
    nothing = sample(*model, PROMPTS[:1], max_new_tokens=0, num_samples=2)
    assert nothing == [[Completion([], [], "length")] * 2]
