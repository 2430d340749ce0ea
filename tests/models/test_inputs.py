"""Masks, windows, patches and captures of a forward pass do what they say, at every layer."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.decoder import block, embed, forward, unembed
from jaxllm.models.inputs import SITES, ModelInputs, Patch, PerLayer
from jaxllm.models.positions import RopeSets, rope_sets
from jaxllm.models.segments import unroll, unstack

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def run(llama):
    config, params = llama
    compiled = jax.jit(
        lambda params, tokens, inputs, capture: forward(
            config, params, tokens, inputs, capture=capture
        ),
        static_argnums=3,
    )
    return lambda tokens, params=params, capture=(), **inputs: compiled(
        params, tokens, ModelInputs(**inputs), capture
    )


def test_captures_are_the_stream_and_its_parts(model, tokens):
    config, params = model
    outputs = jax.jit(lambda p, t: forward(config, p, t, capture=SITES))(params, tokens)
    got = outputs.captured
    missing = set(SITES) - set(got)
    expected_missing = set() if config.moe else {"router_logits"}
    if config.parallel_residual:
        expected_missing |= {"residual_mid"}
    assert missing == expected_missing
    chex.assert_trees_all_close(got["residual_in"][0], embed(config, params, tokens), **TOLERANCE)
    chex.assert_trees_all_close(got["residual_in"][1:], got["residual_out"][:-1], **TOLERANCE)
    chex.assert_trees_all_close(
        got["residual_in"] + got["attention_out"] + got["feedforward_out"],
        got["residual_out"],
        **TOLERANCE,
    )
    chex.assert_trees_all_close(
        unembed(config, params, got["residual_out"][-1]), outputs.logits, **TOLERANCE
    )
    probs = got["attention_probs"]
    assert probs.shape == (config.num_layers, 2, config.num_heads, 12, 12)
    chex.assert_trees_all_close(probs.sum(-1), jnp.ones(probs.shape[:-1]), **TOLERANCE)
    heads = jnp.einsum(
        "lbhts,lbshd->lbthd",
        probs,
        jnp.repeat(got["v"], config.num_heads // config.num_kv_heads, axis=3),
    )
    chex.assert_trees_all_close(heads, got["attention_heads"], **TOLERANCE)


def test_patch_equals_running_the_layers_by_hand(llama, tokens, run):
    config, params = llama
    value = jax.random.normal(jax.random.key(5), (2, 1, config.embed_dim))
    patch = Patch(
        layer=jnp.array([1, 0]), position=jnp.array([4, 4]), value=value, site="residual_out"
    )
    x = embed(config, params, tokens)
    for index, layer in enumerate(unstack(params["layers"])):
        x = block(config, layer, x, layer=index).x
        if index < 2:
            x = x.at[:, 4].set(value[1 - index])
    expected = unembed(config, params, x)
    got = run(tokens, patches=(patch,)).logits
    chex.assert_trees_all_close(got, expected, **TOLERANCE)
    unrolled = run(tokens, params=unroll(params), patches=(patch,)).logits
    chex.assert_trees_all_close(unrolled, expected, **TOLERANCE)


def test_patching_one_head_with_its_value_from_another_run(llama, tokens, run):
    """Causal mediation: the value of one head, per row at its own position, and no other head."""
    config, _ = llama
    other = run(tokens[::-1], capture=("attention_heads",)).captured["attention_heads"]
    base = run(tokens, capture=("attention_heads",)).captured["attention_heads"]
    layer, head, position = 1, 2, jnp.array([[3, -1]])
    rows = jnp.arange(2)
    patch = Patch(
        layer=jnp.array([layer]),
        position=position,
        value=other[layer, rows, position[0]][None],
        mask=(jnp.arange(config.num_heads) == head)[None, None, :, None],
        site="attention_heads",
    )
    outputs = run(tokens, patches=(patch,), capture=("attention_heads",))
    got = outputs.captured["attention_heads"]
    expected = np.array(base[: layer + 1])
    for row in (0, 1):
        at = int(position[0, row])
        expected[layer, row, at, head] = other[layer, row, at, head]
    chex.assert_trees_all_close(got[: layer + 1], expected, **TOLERANCE)
    assert jnp.abs(got[layer + 1] - base[layer + 1]).max() > 1e-4


def test_a_sweep_over_layers_is_one_vmap(llama, tokens, run):
    config, params = llama
    zero = jnp.zeros((1, 1, config.embed_dim))

    def ablate(layer):
        patch = Patch(
            layer=layer[None], position=jnp.array([6]), value=zero, site="feedforward_out"
        )
        return forward(config, params, tokens, ModelInputs(patches=(patch,))).logits

    swept = jax.jit(jax.vmap(ablate))(jnp.arange(3))
    for layer in range(3):
        patch = Patch(
            layer=jnp.array([layer]), position=jnp.array([6]), value=zero, site="feedforward_out"
        )
        chex.assert_trees_all_close(swept[layer], run(tokens, patches=(patch,)).logits, **TOLERANCE)


def test_head_mask_removes_heads_per_layer_and_row(llama, tokens, run):
    config, params = llama
    mask = jnp.ones((3, 2, 4)).at[1, 0, 2].set(0.0)
    heads = run(tokens, per_layer=PerLayer(head_mask=mask), capture=("attention_heads",)).captured[
        "attention_heads"
    ]
    base = run(tokens, capture=("attention_heads",)).captured["attention_heads"]
    assert not heads[1, 0, :, 2].any()
    chex.assert_trees_all_close(heads[1, 1], base[1, 1], **TOLERANCE)
    chex.assert_trees_all_close(heads[1, 0, :, :2], base[1, 0, :, :2], **TOLERANCE)
    everywhere = run(tokens, per_layer=PerLayer(head_mask=mask[:, 0])).logits
    chex.assert_trees_all_close(
        everywhere[0], run(tokens, per_layer=PerLayer(head_mask=mask)).logits[0], **TOLERANCE
    )


def test_neuron_mask_equals_zeroing_weights_and_stops_gradients(llama, tokens, run):
    config, params = llama
    keep = jnp.arange(config.mlp_dim) % 3 > 0
    down = params["layers"][0]["feedforward"]["down"]["kernel"]
    pruned = {
        **params,
        "layers": (
            {
                **params["layers"][0],
                "feedforward": {
                    **params["layers"][0]["feedforward"],
                    "down": {"kernel": down * keep[:, None]},
                },
            },
        ),
    }
    expected = run(tokens, params=pruned).logits
    chex.assert_trees_all_close(run(tokens, neuron_mask=keep).logits, expected, **TOLERANCE)
    per_layer = PerLayer(neuron_mask=jnp.broadcast_to(keep.astype(jnp.float32), (3, 1, 1, 48)))
    chex.assert_trees_all_close(run(tokens, per_layer=per_layer).logits, expected, **TOLERANCE)

    tokenwise = jnp.broadcast_to(keep, (2, 12, 48))
    gradient = jax.grad(
        lambda p: forward(config, p, tokens, ModelInputs(neuron_mask=tokenwise)).logits.sum()
    )(params)["layers"][0]["feedforward"]
    for name in ("gate", "up"):
        assert not gradient["in"][name]["kernel"][..., ~keep].any()
    assert not gradient["down"]["kernel"][:, ~keep].any()
    assert gradient["down"]["kernel"][:, keep].any()


def test_window_of_a_layer_limits_what_it_sees(llama, tokens, run):
    config, params = llama
    window = jnp.array([3, 2**30, 1])
    outputs = run(tokens, per_layer=PerLayer(window=window), capture=("attention_probs",))
    probs = outputs.captured["attention_probs"]
    distance = jnp.arange(12)[:, None] - jnp.arange(12)[None]
    for layer in range(3):
        visible = (distance >= 0) & (distance < window[layer])
        assert not probs[layer, ..., ~visible].any()
        assert (probs[layer, ..., visible] > 0).all()
    static = config.replace(windows=(3, None, 1))
    chex.assert_trees_all_close(forward(static, params, tokens).logits, outputs.logits, **TOLERANCE)


def test_two_rope_sets_in_one_batch(llama, tokens, run):
    config, params = llama
    short = rope_sets(config.rope, config.rotary_dim)
    sets = RopeSets(
        inv_freq=jnp.concatenate([short.inv_freq, short.inv_freq / 4]), scale=jnp.array([1.0, 1.2])
    )
    mixed = run(tokens, rope=sets, rope_set=jnp.array([0, 1])).logits
    chex.assert_trees_all_close(mixed[0], run(tokens).logits[0], **TOLERANCE)
    alone = run(tokens, rope=jax.tree.map(lambda leaf: leaf[1:], sets)).logits
    chex.assert_trees_all_close(mixed[1], alone[1], **TOLERANCE)
    assert jnp.abs(mixed[1] - run(tokens).logits[1]).max() > 1e-3


def test_wrong_sites_and_shapes_are_refused(llama, tokens):
    config, params = llama
    with pytest.raises(ValueError, match="cannot capture 'nowhere'"):
        forward(config, params, tokens, capture=("nowhere",))
    index = jnp.array([0])
    with pytest.raises(ValueError, match="patch site 'attention_probs' is unknown"):
        Patch(layer=index, position=index, value=jnp.zeros((1, 1, 1)), site="attention_probs")
    patch = Patch(layer=index, position=index, value=jnp.zeros((1, 1, 7)))
    with pytest.raises(ValueError, match=r"value has shape \(1, 1, 7\)"):
        forward(config, params, tokens, ModelInputs(patches=(patch,)))
