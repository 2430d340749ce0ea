"""KIVI: what is coded and what is exact, whatever the chunks and the company of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import DensePolicy
from jaxllm.quantization.kivi import KIVIPolicy

CONFIG = ModelConfig(
    vocab_size=8, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=8
)
ROWS, SLOTS, RESIDUAL, GROUP = 3, 40, 8, 4
LENGTHS = np.array([29, 16, 7])
POLICY = KIVIPolicy(key_bits=4, value_bits=2, key_group=GROUP, value_group=4, residual=RESIDUAL)


@pytest.fixture(scope="module")
def stream():
    """Queries, keys with one large channel, values: [B, S, heads, width]."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(ROWS, SLOTS, n, 8)).astype(np.float32) for n in (4, 2, 2))
    k[..., 3] *= 10
    return q, k, v


def rounded(x, bits):
    """The groups of the last axis, to 2^bits levels and back, in NumPy."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = (high - low) / np.float32(2**bits - 1)
    zero = np.round(low / scale)
    return (np.clip(np.round(x / scale - zero), 0, 2**bits - 1) + zero) * scale


@jax.jit
def attend(cache, q, k, v, positions, real):
    shared = Shared(positions=positions, segment_ids=real.astype(jnp.int32), rope=None)
    context = Context(CONFIG, ModelInputs(), shared, layer=0, cache=cache, taps=Taps(()))
    return cache.attend(q, k, v, context)


def run(policy, stream, chunks, rows=slice(None), lengths=LENGTHS):
    """Feeds the rows in chunks; outputs [B, S, H, D] of real tokens (others 0), and the cache."""
    q, k, v = (x[rows] for x in stream)
    lengths = lengths[rows]
    cache = policy.init_layer(CONFIG, 0, len(q), SLOTS)
    outputs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        positions = np.broadcast_to(np.arange(start, start + size), (len(q), size))
        real = positions < lengths[:, None]
        out, cache = attend(cache, q[:, part], k[:, part], v[:, part], positions, real)
        outputs.append(np.where(real[..., None, None], out, 0))
        start += size
    return np.concatenate(outputs, 1), cache


@pytest.fixture(scope="module")
def whole(stream):
    return run(POLICY, stream, [30])


@pytest.mark.parametrize("chunks", [[6] * 5, [1] * 30, [6] * 2 + [1] * 18])
def test_codes_do_not_depend_on_the_chunks(stream, whole, chunks):
    """Also: appending gives what rounding the grouped prefix at once gives."""
    _, cache = run(POLICY, stream, chunks)
    for row, length in enumerate(LENGTHS):
        coded, out_of_recent = length // RESIDUAL * RESIDUAL, max(length - RESIDUAL, 0)
        for found in (cache, whole[1]):
            keys = found.k.dequantize()[row, :, : coded // GROUP]
            prefix = stream[1][row, :coded].reshape(-1, GROUP, 2, 8).transpose(2, 0, 3, 1)
            np.testing.assert_allclose(keys, rounded(prefix, 4), atol=1e-5)
            assert not np.asarray(found.k.scale)[row, :, coded // GROUP :].any()
            values = found.v.dequantize()[row, :, :out_of_recent]
            prefix = stream[2][row, :out_of_recent].reshape(-1, 2, 2, 4).transpose(1, 0, 2, 3)
            np.testing.assert_allclose(values, rounded(prefix, 2), atol=1e-5)
            last = np.arange(max(length - RESIDUAL, 0), length)
            recent = np.asarray(found.recent_v)[row][:, last % RESIDUAL]
            np.testing.assert_array_equal(recent, stream[2][row, last].swapaxes(0, 1))


def test_attention_sees_codes_of_the_past_and_exact_recent_tokens(stream):
    """Token by token, against attention over tensors rounded by hand."""
    out, _ = run(POLICY, stream, [1] * 30)
    q, k, v = stream
    for row, length in enumerate(LENGTHS):
        for step in {0, 7, 8, 15, 16, 17, 28} & set(range(length)):
            keys, values = k[row, : step + 1].copy(), v[row, : step + 1].copy()
            coded, far = step // RESIDUAL * RESIDUAL, max(step - RESIDUAL, 0)
            groups = keys[:coded].reshape(-1, GROUP, 2, 8).swapaxes(1, 3)
            keys[:coded] = rounded(groups, 4).swapaxes(1, 3).reshape(coded, 2, 8)
            groups = values[:far].reshape(far, 2, 2, 4)
            values[:far] = rounded(groups, 2).reshape(far, 2, 8)
            keys, values = (np.repeat(x, 2, axis=1) for x in (keys, values))
            logits = np.einsum("hd,shd->hs", q[row, step], keys) / 8**0.5
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("hs,shd->hd", weights, values)
            np.testing.assert_allclose(out[row, step], expected, atol=1e-5)


def test_a_prompt_is_exact_and_rows_are_alone(stream, whole):
    exact, _ = run(DensePolicy(), stream, [30])
    np.testing.assert_allclose(whole[0], exact, atol=1e-5)
    together, _ = run(POLICY, stream, [6] * 5)
    alone, _ = run(POLICY, stream, [6] * 5, rows=slice(1, 2))
    np.testing.assert_allclose(together[1:2], alone, atol=1e-6)


def test_more_bits_are_nearer_and_take_more_bytes(stream):
    exact, dense = run(DensePolicy(), stream, [6] * 5)
    errors, sizes = [], []
    for bits in (8, 4, 2):
        policy = KIVIPolicy(bits, bits, key_group=8, value_group=None, residual=8)
        out, cache = run(policy, stream, [6] * 5)
        errors.append(np.abs(out - exact).max())
        sizes.append(cache.k.codes.nbytes + cache.v.codes.nbytes)
    assert errors[0] < 0.05 < errors[2]
    assert errors[0] < errors[1] < errors[2]
    floats = dense.k.nbytes + dense.v.nbytes
    assert sizes == [floats // 4, floats // 8, floats // 16]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="key_bits=3 must be 2, 4 or 8"):
        KIVIPolicy(key_bits=3)
    with pytest.raises(ValueError, match="residual=100 must be a positive multiple"):
        KIVIPolicy(residual=100)
    with pytest.raises(ValueError, match="value_group=32 does not divide the 8 channels"):
        KIVIPolicy().init_layer(CONFIG, 0, 1, 8)
