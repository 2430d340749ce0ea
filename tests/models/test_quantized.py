"""Integer weights: exact codes, bounded error, and the same model around them."""

from __future__ import annotations

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.decoder import forward
from jaxllm.models.linear import dense, matmul
from jaxllm.models.parameters import logical_axes
from jaxllm.models.quantized import (
    QuantizedWeight,
    pack_int4,
    quantize,
    quantize_params,
    unpack_int4,
)


@hypothesis.given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5))
def test_packing_is_exact_and_pairs_neighbouring_rows(seed, half, width):
    codes = np.random.default_rng(seed).integers(-8, 8, (3, 2 * half, width)).astype(np.int8)
    packed = pack_int4(jnp.asarray(codes))
    assert packed.dtype == jnp.uint8 and packed.shape == (3, half, width)
    np.testing.assert_array_equal(unpack_int4(packed), codes)
    np.testing.assert_array_equal(packed & 0xF, codes[:, 0::2].astype(np.uint8) & 0xF)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [None, 4, 16])
def test_error_is_at_most_half_a_step(bits, group_size):
    weight = jax.random.normal(jax.random.key(0), (3, 16, 5)) * jnp.logspace(-3, 3, 5)
    quantized = quantize(weight, bits, group_size)
    groups = 1 if group_size is None else 16 // group_size
    assert quantized.scales.shape == (3, groups, 5)
    error = jnp.abs(quantized.materialize() - weight).reshape(3, groups, -1, 5)
    assert (error <= quantized.scales[:, :, None] * 0.5001).all()
    again = quantize(quantized.materialize(), bits, group_size)
    chex.assert_trees_all_close(again, quantized, rtol=1e-6)


def test_product_is_that_of_the_materialised_weight():
    weight = quantize(jax.random.normal(jax.random.key(0), (8, 6)), 4, 4)
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    chex.assert_trees_all_close(matmul(x, weight), x @ dense(weight), rtol=1e-6)


def test_a_zero_column_stays_zero():
    weight = jnp.zeros((4, 2)).at[:, 0].set(1.0)
    chex.assert_trees_all_close(quantize(weight, 8).materialize(), weight)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.06), (4, 0.5)])
def test_a_quantised_model_runs_in_the_same_decoder(model, tokens, bits, tolerance):
    config, params = model
    quantized = quantize_params(params, bits=bits, group_size=4)
    run = jax.jit(lambda params: forward(config, params, tokens).logits)
    logits, expected = run(quantized), run(params)
    error = jnp.sqrt(jnp.mean((logits - expected) ** 2) / jnp.var(expected))
    assert 0 < error < tolerance
    axes = jax.tree.leaves(logical_axes(config, quantized))
    leaves = jax.tree.leaves(quantized)
    assert all(len(spec) == leaf.ndim for spec, leaf in zip(axes, leaves, strict=True))
    counts = [
        sum(isinstance(n, QuantizedWeight) for n in jax.tree.leaves(tree, is_leaf=is_quantized))
        for tree in (quantized, params)
    ]
    assert counts[0] >= 5 and counts[1] == 0


def is_quantized(node):
    return isinstance(node, QuantizedWeight)


def test_what_does_not_fit_is_refused():
    weight = jnp.ones((6, 2))
    with pytest.raises(ValueError, match="bits=3 is not supported"):
        quantize(weight, 3)
    with pytest.raises(ValueError, match="group_size=4 does not divide d_in=6"):
        quantize(weight, 8, 4)
    with pytest.raises(ValueError, match="d_in=3 is odd"):
        quantize(jnp.ones((3, 2)), 4)
