"""Rotary embeddings against their formulas in float64, and their invariants."""

from __future__ import annotations

import math

import chex
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.positions import (
    attention_factor,
    rope_sets,
    rope_tables,
    rotate,
    segment_lengths,
    token_positions,
)


def config(rope: RopeConfig, head_dim: int = 16) -> ModelConfig:
    return ModelConfig(num_heads=2, head_dim=head_dim, rope=rope)


def base(theta: float, dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, dim, 2) / dim)


def test_default_and_linear_tables_equal_float64():
    positions = jnp.arange(3000)[None]
    for factor in (1.0, 4.0):
        rope = RopeConfig(type="linear", theta=5e5, factor=factor)
        cos, sin = rope_tables(config(rope), positions)
        angles = np.arange(3000)[:, None] * base(5e5, 16) / factor
        # float32 angles near 3000 are spaced by 2.4e-4
        np.testing.assert_allclose(cos[0], np.cos(angles), atol=3e-4)
        np.testing.assert_allclose(sin[0], np.sin(angles), atol=3e-4)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_is_monotone_between():
    rope = RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_positions=8192)
    ratio = base(5e5, 128) / np.asarray(rope_sets(rope, 128).inv_freq[0], np.float64)
    turns = 8192 * base(5e5, 128) / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[turns < 1], 8, rtol=1e-5)
    assert (np.diff(ratio) > -1e-5).all() and ((ratio > 1.01) & (ratio < 7.9)).any()


def test_yarn_ramp_and_temperature():
    rope = RopeConfig(type="yarn", factor=4.0, original_max_positions=512)
    inv_freq = np.asarray(rope_sets(rope, 64).inv_freq[0], np.float64)

    def edge(rotations):
        return 64 * math.log(512 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(edge(32)), math.ceil(edge(1))
    keep = 1 - np.clip((np.arange(32) - low) / (high - low), 0, 1)
    expected = base(10000.0, 64) * (keep + (1 - keep) / 4)
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-5)
    assert attention_factor(rope) == pytest.approx(0.1 * math.log(4) + 1)


def test_longrope_switches_by_the_length_of_each_segment():
    pairs = 8
    rope = RopeConfig(
        type="longrope",
        factor=4.0,
        original_max_positions=6,
        short_factor=(1.0,) * pairs,
        long_factor=tuple(float(i + 2) for i in range(pairs)),
    )
    segment_ids = jnp.array([[1] * 4 + [2] * 8])
    cos, _ = rope_tables(config(rope), token_positions(segment_ids), segment_ids=segment_ids)
    scale = math.sqrt(1 + math.log(4) / math.log(6))
    short = np.cos(np.arange(4)[:, None] * base(10000.0, 16)) * scale
    long = np.cos(np.arange(8)[:, None] * base(10000.0, 16) / np.arange(2, 10)) * scale
    np.testing.assert_allclose(cos[0, :4], short, atol=1e-5)
    np.testing.assert_allclose(cos[0, 4:], long, atol=1e-5)


def test_dynamic_grows_with_the_sequence_only_beyond_the_original_context():
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=8)
    for length in (8, 20):
        cos, _ = rope_tables(config(rope), jnp.arange(length)[None])
        theta = 10000.0 * (2.0 * max(length, 8) / 8 - 1) ** (16 / 14)
        expected = np.cos(np.arange(length)[:, None] * base(theta, 16))
        np.testing.assert_allclose(cos[0], expected, atol=1e-5)


@hypothesis.given(st.integers(0, 500), st.integers(0, 15), st.integers(0, 15))
def test_scores_depend_on_the_distance_only(shift, first, second):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    rope = config(RopeConfig(partial=0.5))

    def score(a, b):
        tables = [rope_tables(rope, jnp.array([[position]])) for position in (a, b)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=1e-3)


def test_rotation_leaves_the_rest_of_a_partial_head_alone():
    x = jnp.ones((1, 3, 2, 16))
    cos, sin = rope_tables(config(RopeConfig(partial=0.25)), jnp.arange(3)[None])
    turned = rotate(x, cos, sin)
    assert cos.shape[-1] == 2
    chex.assert_trees_all_close(turned[..., 4:], x[..., 4:])
    assert jnp.abs(turned[:, 1:, :, :4] - x[:, 1:, :, :4]).max() > 0.1


@hypothesis.given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_positions_restart_with_every_segment(lengths, padding):
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(padding)])
    ids = jnp.asarray(ids[None], jnp.int32)
    positions = token_positions(ids)
    expected = np.concatenate([np.arange(n) for n in [*lengths, padding]])
    np.testing.assert_array_equal(positions[0], expected)
    longest = np.concatenate([np.full(n, n) for n in [*lengths, padding]])
    np.testing.assert_array_equal(segment_lengths(positions, ids)[0], longest)
