"""Generation equals growing the sequence by hand, whatever the company of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference.generate import generate
from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import init_params

PROMPTS = [[1, 2, 3], [7] * 9, [5, 4, 3, 2, 1]]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=40, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, initializer_range=0.4
    )
    return config, init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def greedy(model):
    return generate(*model, PROMPTS, max_new_tokens=8)


def test_greedy_equals_recomputing_every_token(model, greedy):
    config, params = model
    logits = jax.jit(lambda tokens: forward(config, params, tokens).logits)
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        assert len(answer) == 8
        whole = np.asarray(logits(jnp.asarray([prompt + answer])))[0]
        expected = whole.argmax(-1)[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(answer, expected)


def test_rows_do_not_depend_on_each_other(model, greedy):
    assert generate(*model, PROMPTS[:1], max_new_tokens=8) == greedy[:1]
    options = {"max_new_tokens": 8, "temperature": 1.3, "key": jax.random.key(3)}
    sampled = generate(*model, PROMPTS, **options)
    assert sampled != greedy
    assert generate(*model, PROMPTS[:1], **options) == sampled[:1]
    assert generate(*model, PROMPTS, **{**options, "key": jax.random.key(4)}) != sampled


def test_stop_tokens_end_a_row_and_are_not_returned(model, greedy):
    stop = greedy[0][3]
    answers = generate(*model, PROMPTS, max_new_tokens=8, stop_tokens=[stop, 39])
    for answer, full in zip(answers, greedy, strict=True):
        cut = full.index(stop) if stop in full else 8
        assert answer == full[:cut]


def test_sampling_follows_the_distribution(model):
    config, params = model
    answers = generate(
        *model, [[1, 2, 3]] * 2000, max_new_tokens=1, temperature=0.7, key=jax.random.key(0)
    )
    counts = np.bincount(np.ravel(answers), minlength=40) / 2000
    logits = forward(config, params, jnp.asarray([[1, 2, 3]])).logits[0, -1]
    expected = np.asarray(jax.nn.softmax(logits / 0.7))
    assert 0.5 * np.abs(counts - expected).sum() < 0.08  # expected noise about 0.04


def test_longrope_uses_one_set_for_a_whole_answer():
    config = ModelConfig(
        vocab_size=40,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=24,
        initializer_range=0.4,
        rope=RopeConfig(
            type="longrope",
            original_max_positions=10,
            short_factor=(1.0,) * 4,
            long_factor=(3.0, 4.0, 5.0, 6.0),
        ),
    )
    params = init_params(config, jax.random.key(0))
    (answer,) = generate(config, params, [[1, 2, 3]], max_new_tokens=9)
    whole = forward(config, params, jnp.asarray([[1, 2, 3, *answer]])).logits[0]
    np.testing.assert_array_equal(answer, whole.argmax(-1)[2:-1])


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(*model, [[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match="token id 40, outside of the vocabulary of 40"):
        generate(*model, [[40]], max_new_tokens=1)
    with pytest.raises(ValueError, match="needs a key"):
        generate(*model, [[1]], max_new_tokens=1, temperature=1.0)
    assert generate(*model, [], max_new_tokens=3) == []
