"""Rings: equal to a mask over everything, in any chunks, rewritten, and renumbered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv_compression.streaming_llm import StreamingLLMPolicy
from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.inputs import ModelInputs, PerLayer
from jaxllm.models.kv_cache import DensePolicy
from jaxllm.models.positions import rope_tables, rotate
from jaxllm.models.window_cache import SlidingWindowPolicy, WindowCache

CONFIG = ModelConfig(
    vocab_size=8,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=8,
    windows=(5, None),
    rope=RopeConfig(partial=0.5, theta=20.0),
)
ROWS, LENGTH = 2, 24
LENGTHS = np.array([24, 9])
# Without the model's own window.
OPEN = CONFIG.replace(windows=None)


@pytest.fixture(scope="module")
def stream():
    """Queries, keys and values before rotation: [B, S, heads, 8]."""
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(ROWS, LENGTH, n, 8)).astype(np.float32) for n in (4, 2, 2))


def _attend(config, cache, q, k, v, positions, real):
    shared = Shared(positions, real.astype(jnp.int32), rope_tables(config, positions))
    context = Context(config, ModelInputs(), shared, layer=0, cache=cache, taps=Taps(()))
    return cache.attend(rotate(q, *shared.rope), rotate(k, *shared.rope), v, context)


attend = jax.jit(_attend, static_argnums=0)


def run(config, policy, stream, chunks, lengths=LENGTHS):
    """Outputs [B, S, H, D] of real tokens (others 0), and the cache."""
    cache = policy.init_layer(config, 0, ROWS, LENGTH)
    outputs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        positions = np.broadcast_to(np.arange(start, start + size), (ROWS, size))
        real = positions < lengths[:, None]
        out, cache = attend(config, cache, *(x[:, part] for x in stream), positions, real)
        outputs.append(np.where(real[..., None, None], out, 0))
        start += size
    return np.concatenate(outputs, 1), cache


CHUNKS = [[24], [8] * 3, [8] + [1] * 16]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_ring_equals_a_dense_cache_with_a_mask(stream, chunks):
    expected, _ = run(CONFIG, DensePolicy(), stream, [24])
    found, cache = run(CONFIG, SlidingWindowPolicy(), stream, chunks)
    assert isinstance(cache, WindowCache)
    assert cache.k.shape == (ROWS, 2, 5, 8)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert sorted(cache.positions[0].tolist()) == list(range(19, 24))
    assert sorted(cache.positions[1].tolist()) == list(range(4, 9))
    assert not isinstance(SlidingWindowPolicy().init_layer(CONFIG, 1, ROWS, LENGTH), WindowCache)


def test_tokens_are_taken_back_within_the_slack(stream):
    """Three tokens are tried and two of them replaced, as speculative decoding does."""
    expected, _ = run(CONFIG, DensePolicy(), stream, [24])
    _, cache = run(CONFIG, SlidingWindowPolicy(slack=2), stream, [8], np.array([8, 8]))
    wrong = tuple(x + 1 for x in stream)
    here = lambda start, stop: np.broadcast_to(np.arange(start, stop), (ROWS, stop - start))  # noqa: E731
    for start in (8, 9, 10, 11):
        mixed = [
            np.concatenate([s[:, start : start + 1], w[:, start + 1 : start + 3]], 1)
            for s, w in zip(stream, wrong, strict=True)
        ]
        positions = here(start, start + 3)
        out, cache = attend(CONFIG, cache, *mixed, positions, positions >= 0)
        np.testing.assert_allclose(out[0, 0], expected[0, start], atol=1e-5)


def _turned(x, positions):
    """Rotary embedding of the first 4 of 8 dimensions, in NumPy: [S, heads, 8]."""
    angles = positions[:, None, None] * OPEN.rope.theta ** (-np.arange(2) / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _reference(stream, row, position, sinks, window, renumber):
    """Attention of one query over the tokens that StreamingLLM would hold, rotated anew."""
    q, k, v = (x[row] for x in stream)
    kept = [p for p in range(position + 1) if p < sinks or p > position - window]
    numbers = np.arange(len(kept)) if renumber else np.array(kept)
    keys = np.repeat(_turned(k[kept], numbers), 2, axis=1)
    query = _turned(q[position][None], numbers[-1:])[0]
    logits = np.einsum("hd,shd->hs", query, keys) / 8**0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hs,shd->hd", weights, np.repeat(v[kept], 2, axis=1))


@pytest.mark.parametrize("renumber", [False, True])
def test_sinks_and_window_at_constant_size(stream, renumber):
    policy = StreamingLLMPolicy(num_sinks=2, window=6, renumber=renumber)
    for chunks in CHUNKS:
        found, cache = run(OPEN, policy, stream, chunks)
        assert cache.k.shape[2] == 8
        assert sorted(cache.positions[0].tolist()) == [0, 1, *range(18, 24)]
        for row, length in enumerate(LENGTHS):
            for position in {0, 1, 5, 7, 8, 9, 16, 23} & set(range(length)):
                expected = _reference(stream, row, position, 2, 6, renumber)
                np.testing.assert_allclose(found[row, position], expected, atol=1e-5)


def test_what_a_ring_cannot_do_is_refused(stream):
    cache = SlidingWindowPolicy().init_layer(CONFIG, 0, ROWS, LENGTH)
    inputs = ModelInputs(per_layer=PerLayer(window=jnp.int32(3)))
    with pytest.raises(ValueError, match="per_layer.window does not reach"):
        cache.attend(*stream, Context(CONFIG, inputs, None, layer=0, cache=cache, taps=Taps(())))
    learned = CONFIG.replace(positions="learned")
    with pytest.raises(ValueError, match="renumber=True needs rotary positions"):
        StreamingLLMPolicy().init_layer(learned, 0, 1, 8)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        StreamingLLMPolicy(window=0)
    dynamic = OPEN.replace(rope=RopeConfig(type="dynamic", original_max_positions=8))
    with pytest.raises(ValueError, match="cannot be renumbered"):
        run(dynamic, StreamingLLMPolicy(num_sinks=1, window=4), stream, [8])
