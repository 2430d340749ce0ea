"""Filters against their definitions, and frequencies of what is sampled after each."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxllm.inference import sampling
from jaxllm.inference.sampling import SamplingConfig

LOGITS = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32) * 2


def reference(logits, config: SamplingConfig) -> np.ndarray:
    """Probabilities by sorting and counting, one row, in float64."""
    probs = np.exp(np.float64(logits) / config.temperature)
    probs /= probs.sum()
    keep = np.ones(len(probs), bool)
    order = np.argsort(-probs)
    if config.top_k is not None:
        keep[order[config.top_k :]] = False
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    if config.top_p is not None:
        total = 0.0
        for token in order:
            if total >= config.top_p:
                keep[token] = False
            total += probs[token]
        probs = np.where(keep, probs, 0) / probs[keep].sum()
    if config.min_p is not None:
        keep &= probs >= config.min_p * probs.max() * (1 - 1e-6)
    return np.where(keep, probs, 0) / probs[keep].sum()


CONFIGS = [
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.6),
    SamplingConfig(temperature=1.0, top_k=4),
    SamplingConfig(temperature=1.0, top_k=100),
    SamplingConfig(temperature=1.0, top_p=0.8),
    SamplingConfig(temperature=1.0, top_p=1e-6),
    SamplingConfig(temperature=1.0, min_p=0.1),
    SamplingConfig(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_distribution_and_frequencies(config):
    expected = np.stack([reference(row, config) for row in LOGITS])
    processed = sampling.process_logits(jnp.asarray(LOGITS), config.values())
    np.testing.assert_allclose(jax.nn.softmax(processed), expected, atol=1e-6)
    draws = 4000
    keys = jax.random.split(jax.random.key(1), (draws, len(LOGITS)))
    choose = jax.jit(jax.vmap(lambda keys: sampling.choose(keys, processed, config.values())))
    tokens = np.asarray(choose(keys))
    for row, probs in enumerate(expected):
        counts = np.bincount(tokens[:, row], minlength=12)
        assert counts[probs == 0].sum() == 0
        kept = probs > 0
        if kept.sum() > 1:
            assert stats.chisquare(counts[kept], draws * probs[kept]).pvalue > 1e-4


@hypothesis.given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.integers(1, 9), st.floats(0.01, 1)
)
def test_filters_keep_the_largest(values, k, p):
    logits = jnp.asarray(values, jnp.float32)
    for kept in (
        sampling.keep_top_k(logits, k),
        sampling.keep_top_p(logits, p),
        sampling.keep_min_p(logits, p),
    ):
        inside = np.isfinite(np.asarray(kept))
        assert inside[np.argmax(values)]
        # What is kept is never less likely than what is not.
        if not inside.all():
            assert np.min(np.array(values)[inside]) > np.max(np.array(values)[~inside])
    assert np.isfinite(np.asarray(sampling.keep_top_k(logits, k))).sum() >= min(k, len(values))


def test_repetition_penalty():
    logits = jnp.asarray([2.0, -1.0, 0.5])
    seen = jnp.asarray([True, True, False])
    np.testing.assert_allclose(sampling.penalize_repetition(logits, seen, 2.0), [1.0, -2.0, 0.5])
    with pytest.raises(ValueError, match="tokens seen so far"):
        sampling.process_logits(logits, SamplingConfig(repetition_penalty=2.0).values())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingConfig(**options)
