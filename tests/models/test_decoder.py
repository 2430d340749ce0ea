"""The decoder against itself: scanned, unrolled, packed, padded, cached, block by block."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.decoder import block, embed, forward, unembed
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import DensePolicy
from jaxllm.models.linen import Decoder
from jaxllm.models.segments import unroll, unstack

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def run():
    """One compiled forward pass a config and structure."""
    compiled = jax.jit(
        lambda config, params, tokens, inputs: forward(config, params, tokens, inputs).logits,
        static_argnums=0,
    )
    return lambda config, params, tokens, **inputs: compiled(
        config, params, tokens, ModelInputs(**inputs)
    )


def test_unrolled_equals_scanned(model, tokens, run):
    config, params = model
    scanned = run(config, params, tokens)
    assert jnp.std(scanned) > 0.1
    chex.assert_trees_all_close(run(config, unroll(params), tokens), scanned, **TOLERANCE)


def test_blocks_by_hand_equal_forward(model, tokens, run):
    config, params = model
    x = embed(config, params, tokens)
    step = jax.jit(block, static_argnums=0, static_argnames="layer")
    for index, layer in enumerate(unstack(params["layers"])):
        x = step(config, layer, x, layer=index).x
    chex.assert_trees_all_close(
        unembed(config, params, x), run(config, params, tokens), **TOLERANCE
    )


def test_packed_segments_equal_segments_alone(model, tokens, run):
    config, params = model
    alone_a, alone_b = run(config, params, tokens[:, :5]), run(config, params, tokens[:, 5:12])
    segment_ids = jnp.broadcast_to(jnp.array([1] * 5 + [2] * 7), (2, 12))
    packed = run(config, params, tokens, segment_ids=segment_ids)
    chex.assert_trees_all_close(packed[:, :5], alone_a, **TOLERANCE)
    chex.assert_trees_all_close(packed[:, 5:], alone_b, **TOLERANCE)


def test_padding_on_either_side_changes_nothing(model, tokens, run):
    config, params = model
    alone = run(config, params, tokens[:, :7])
    for pad in ((0, 5), (5, 0)):
        padded = jnp.pad(tokens[:, :7], ((0, 0), pad), constant_values=3)
        segment_ids = jnp.pad(jnp.ones((2, 7), jnp.int32), ((0, 0), pad))
        logits = run(config, params, padded, segment_ids=segment_ids)
        assert np.isfinite(logits).all()
        chex.assert_trees_all_close(logits[:, pad[0] : pad[0] + 7], alone, **TOLERANCE)


def test_future_tokens_are_invisible(model, tokens, run):
    config, params = model
    changed = tokens.at[:, 8:].set((tokens[:, 8:] + 1) % config.vocab_size)
    before, after = run(config, params, tokens), run(config, params, changed)
    chex.assert_trees_all_close(before[:, :8], after[:, :8], **TOLERANCE)
    assert jnp.abs(before[:, 8:] - after[:, 8:]).max() > 1e-2


def test_dense_cache_equals_recomputing(model, tokens, run):
    config, params = model
    full = run(config, params, tokens)
    step = jax.jit(
        lambda params, tokens, positions, cache: forward(
            config, params, tokens, ModelInputs(positions=positions), cache=cache
        )
    )
    cache = DensePolicy().init(config, params, 2, 16)
    for start, stop in ((0, 5), (5, 8), (8, 9), (9, 10)):  # prefill in chunks, then decode
        positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        outputs = step(params, tokens[:, start:stop], positions, cache)
        cache = outputs.cache
        chex.assert_trees_all_close(outputs.logits, full[:, start:stop], **TOLERANCE)


@pytest.mark.parametrize("policy", ["all_dots", "dots", "full"])
def test_remat_changes_no_gradient(models, tokens, policy):
    config, params = models["gemma2"]

    def loss(params, config):
        return jnp.square(forward(config, params, tokens).logits).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    recomputed, kept = gradient(params, config.replace(remat=policy)), gradient(params, config)
    # Some entries are small differences of terms around 1e-2, rounded in another order.
    chex.assert_trees_all_close(recomputed, kept, rtol=1e-5, atol=1e-6)


def test_linen_shell_initialises_with_logical_axes_and_applies(llama, tokens, run):
    config, params = llama
    module = Decoder(config)
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens)
    boxed = variables["params"]["layers"][0]["attention"]["qkv"]["k"]["kernel"]
    assert boxed.names == ("layers", "embed", "kv_heads")
    chex.assert_trees_all_equal_shapes(
        jax.tree.map(lambda x: x, jax.eval_shape(lambda: params)),
        jax.tree.map(
            lambda box: box.value,
            variables["params"],
            is_leaf=lambda node: hasattr(node, "names"),
        ),
    )
    outputs = module.apply({"params": params}, tokens)
    chex.assert_trees_all_close(outputs.logits, run(config, params, tokens), **TOLERANCE)


def test_bfloat16_compute_keeps_float32_masters_and_logits(llama, tokens):
    config, params = llama
    logits = forward(config.replace(compute_dtype="bfloat16"), params, tokens).logits
    assert logits.dtype == jnp.float32
    exact = forward(config, params, tokens).logits
    error = jnp.abs(logits - exact).max() / jnp.abs(exact).max()
    assert 1e-4 < error < 5e-2


def test_shapes_that_do_not_fit_are_refused(llama, tokens):
    config, params = llama
    with pytest.raises(ValueError, match=r"tokens must be \[batch, time\]"):
        forward(config, params, tokens[0])
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 5\), expected \(2, 12\)"):
        forward(config, params, tokens, ModelInputs(segment_ids=jnp.ones((2, 5), jnp.int32)))
    with pytest.raises(ValueError, match="parameters hold 3 layers, the config says 4"):
        forward(config.replace(num_layers=4), params, tokens)
    with pytest.raises(ValueError, match="0 caches for 1 segments"):
        forward(config, params, tokens, cache=())


def test_long_rows_attend_in_blocks_of_queries_to_the_same_effect(models):
    """Asking for the attention weights turns the blocks off."""
    config, params = models["llama"]
    config = config.replace(windows=(20, 20, 20))
    tokens = jax.random.randint(jax.random.key(3), (2, 131), 0, config.vocab_size)
    segment_ids = jnp.broadcast_to(jnp.array([1] * 50 + [2] * 70 + [0] * 11), (2, 131))
    run = jax.jit(
        lambda capture, p: (
            forward(config, p, tokens, ModelInputs(segment_ids=segment_ids), capture=capture).logits
        ),
        static_argnums=0,
    )
    blocks, whole = run((), params), run(("attention_probs",), params)
    chex.assert_trees_all_close(blocks, whole, **TOLERANCE)
