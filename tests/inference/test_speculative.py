"""Speculative decoding against the target alone: same greedy tokens, same distribution."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxllm.inference.generate import sample
from jaxllm.inference.sampling import SamplingConfig, process_logits
from jaxllm.inference.speculative import speculate
from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.decoder import forward
from jaxllm.models.kv_cache import CachePolicy
from jaxllm.models.parameters import init_params

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3]]
NEW = 14


def build(seed, vocab_size=24, **changes):
    settings = {
        "embed_dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_dim": 24,
        "initializer_range": 0.5,
        "eos_token_ids": (),
    }
    config = ModelConfig(vocab_size=vocab_size, **settings | changes)
    return config, jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))


@pytest.fixture(scope="module")
def target():
    return build(0)


@pytest.fixture(scope="module")
def draft():
    return build(1, num_layers=1, num_heads=1)


def test_greedy_tokens_are_those_of_the_target(target, draft):
    def run(helper, stops):
        options = {"max_new_tokens": NEW, "stop_tokens": stops}
        found = speculate(*target, *helper, PROMPTS, num_draft=3, **options)
        for ours, (plain,) in zip(
            found.completions, sample(*target, PROMPTS, **options), strict=True
        ):
            assert (ours.tokens, ours.finish) == (plain.tokens, plain.finish)
            np.testing.assert_allclose(ours.log_probs, plain.log_probs, atol=1e-5)
        return found

    itself = run(target, [])
    assert itself.acceptance == 1
    # 1 token of the prefill, then 4 a pass.
    assert itself.passes.tolist() == [4] * 4 and itself.tokens_per_pass == 4
    other = run(draft, [])
    assert 0 <= other.acceptance < 0.6 and other.passes.max() > 4
    tokens = [c.tokens for c in other.completions]
    stopped = run(draft, [tokens[0][5], tokens[2][8]])
    assert "stop" in {c.finish for c in stopped.completions}


def test_penalised_greedy_tokens_are_those_of_the_target(target, draft):
    options = {"max_new_tokens": NEW, "sampling": SamplingConfig(repetition_penalty=1.7)}
    expected = [rows[0].tokens for rows in sample(*target, PROMPTS, **options)]
    found = speculate(*target, *draft, PROMPTS, num_draft=3, **options)
    assert [c.tokens for c in found.completions] == expected
    assert expected != [r[0].tokens for r in sample(*target, PROMPTS, max_new_tokens=NEW)]


SAMPLING = SamplingConfig(temperature=1.3, top_p=0.93)
ROWS = 3072


def joint(config, params, prompt, length):
    """Probability of every continuation [V] * length under the processed distribution."""
    vocab = config.vocab_size
    prefixes = list(itertools.product(range(vocab), repeat=length - 1))
    tokens = jnp.asarray([[*prompt, *prefix] for prefix in prefixes])
    logits = jax.jit(forward, static_argnums=0)(config, params, tokens).logits
    probs = np.asarray(jax.nn.softmax(process_logits(logits, SAMPLING.values())), np.float64)
    probs = probs[:, len(prompt) - 1 :]
    table = probs[:, -1]
    for place in range(length - 1):
        chosen = [prefix[place] for prefix in prefixes]
        table = table * probs[np.arange(len(prefixes)), place, chosen][:, None]
    return table.reshape(-1)


def p_value(counts, expected):
    """Chi-square with cells of small expectation put together; 0 where one that cannot is met."""
    if counts[expected == 0].sum():
        return 0.0
    order = np.argsort(expected)
    small = order[np.cumsum(expected[order]) < 10]
    rest = np.setdiff1d(order[expected[order] > 0], small)
    observed = np.append(counts[rest], counts[small].sum())
    wanted = np.append(expected[rest], expected[small].sum())
    keep = wanted > 0
    return stats.chisquare(observed[keep], wanted[keep] * counts.sum() / wanted.sum()).pvalue


def test_tokens_have_the_distribution_of_the_target():
    target, draft = build(0, 5), build(3, 5, num_layers=1, initializer_range=0.4)
    prompt, length = [1, 4, 2], 3
    found = speculate(
        *target,
        *draft,
        [prompt] * ROWS,
        max_new_tokens=length,
        num_draft=2,
        sampling=SAMPLING,
        key=jax.random.key(7),
    )
    assert 0.2 < found.acceptance < 0.95
    digits = np.array([c.tokens for c in found.completions])
    counts = np.bincount(digits @ 5 ** np.arange(length)[::-1], minlength=5**length)
    assert p_value(counts, ROWS * joint(*target, prompt, length)) > 1e-3
    assert p_value(counts, ROWS * joint(*draft, prompt, length)) < 1e-12


def test_rows_are_independent_and_deterministic(target, draft):
    options = {
        "max_new_tokens": NEW,
        "num_draft": 3,
        "sampling": SamplingConfig(temperature=1.0, top_k=9, repetition_penalty=1.2),
    }
    key = jax.random.key(3)
    whole = speculate(*target, *draft, PROMPTS, key=key, **options)
    back = speculate(*target, *draft, PROMPTS[::-1], key=key, row_ids=[3, 2, 1, 0], **options)
    assert [c.tokens for c in whole.completions] == [c.tokens for c in back.completions[::-1]]
    assert whole.accepted.tolist() == back.accepted[::-1].tolist()
    other = speculate(*target, *draft, PROMPTS, key=jax.random.key(4), **options)
    assert [c.tokens for c in whole.completions] != [c.tokens for c in other.completions]


class Windowed(CachePolicy):
    """Some other policy."""


def test_what_does_not_fit_is_refused(target, draft):
    dynamic = target[0].replace(
        rope=RopeConfig(type="dynamic", factor=2.0, original_max_positions=8)
    )
    for pair, options, message in (
        ((target, (target[0].replace(vocab_size=25), None)), {}, "vocabulary of 25"),
        ((target, draft), {"cache_policy": Windowed()}, "dense caches, not Windowed"),
        ((target, draft), {"num_draft": 0}, "num_draft=0"),
        ((target, draft), {"sampling": SamplingConfig(temperature=1.0)}, "needs a key"),
        ((target, draft), {"row_ids": [1]}, "row_ids"),
        (((dynamic, target[1]), draft), {}, "dynamic"),
    ):
        with pytest.raises(ValueError, match=message):
            speculate(*pair[0], *pair[1], PROMPTS, max_new_tokens=4, **options)
    assert speculate(*target, *draft, [], max_new_tokens=4).completions == []
