"""Mixture of experts: the reference against a loop over tokens, and what routing promises."""

from __future__ import annotations

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.config import ModelConfig, MoEConfig
from jaxllm.models.decoder import forward
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.moe import route, router_losses, router_statistics
from jaxllm.models.parameters import init_params


def token_by_token(config, node, x):
    """Float64, one token and one expert at a time."""
    node = jax.tree.map(lambda w: np.asarray(w, np.float64), node)

    def ffn(weights, y):
        gate = y @ weights["in"]["gate"]["kernel"]
        hidden = gate / (1 + np.exp(-gate)) * (y @ weights["in"]["up"]["kernel"])
        return hidden @ weights["down"]["kernel"]

    moe, out = config.moe, np.zeros(x.shape)
    for index in np.ndindex(x.shape[:2]):
        y = np.asarray(x[index], np.float64)
        logits = y @ node.router["kernel"]
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        groups = scores.reshape(moe.num_groups, -1)
        best = np.argsort(-groups.max(1))[: moe.groups_per_token]
        allowed = np.isin(np.arange(moe.num_experts) // groups.shape[1], best)
        chosen = np.argsort(-np.where(allowed, scores, -1))[: moe.experts_per_token]
        weights = scores[chosen]
        if moe.normalize_top_k:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            out[index] += (
                moe.routed_scale
                * weight
                * ffn(jax.tree.map(lambda w, e=expert: w[e], node.experts), y)
            )
        if node.shared is not None:
            shared = ffn(node.shared, y)
            if node.shared_gate is not None:
                shared = shared / (1 + np.exp(-y @ node.shared_gate["kernel"]))
            out[index] += shared
    return out


@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(num_experts=4, experts_per_token=2, expert_dim=12),
        MoEConfig(
            num_experts=8,
            experts_per_token=3,
            expert_dim=12,
            normalize_top_k=False,
            routed_scale=1.7,
            shared_dim=10,
            shared_gate=True,
            num_groups=4,
            groups_per_token=2,
        ),
    ],
    ids=["mixtral", "shared-groups"],
)
def test_reference_equals_a_loop_over_tokens(moe):
    config = ModelConfig(
        vocab_size=20,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=8,
        moe=moe,
        initializer_range=0.4,
    )
    params = init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 20)
    capture = ("feedforward_in", "feedforward_out", "router_logits")
    got = forward(config, params, tokens, capture=capture).captured
    assert got["router_logits"].shape == (2, 2, 6, moe.num_experts)
    for layer in range(2):
        node = jax.tree.map(lambda w, i=layer: w[i], params["layers"][0]["feedforward"])
        expected = token_by_token(config, node, got["feedforward_in"][layer])
        np.testing.assert_allclose(got["feedforward_out"][layer], expected, rtol=1e-4, atol=1e-5)


@hypothesis.given(
    st.integers(0, 10_000),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_routing_chooses_the_best_experts_once(seed, scoring, k, normalize):
    moe = MoEConfig(8, k, 4, scoring=scoring, normalize_top_k=normalize)
    logits = jax.random.normal(jax.random.key(seed), (5, 8))
    experts, weights = route(logits, moe)
    best = np.sort(np.argsort(-logits, axis=-1)[:, :k])
    np.testing.assert_array_equal(np.sort(experts), best)
    assert (weights > 0).all()
    if normalize:
        chex.assert_trees_all_close(weights.sum(-1), jnp.ones(5), rtol=1e-5)
    bias = jnp.zeros(8).at[3].set(100.0)
    biased, biased_weights = route(logits, moe, bias)
    assert (biased[:, 0] == 3).all() and (biased_weights <= 1.0 + 1e-6).all()


def test_losses_of_balanced_and_collapsed_routers_ignore_padding():
    balanced = jnp.log(jnp.eye(4) * 0.4 + 0.15)[None]
    experts = jnp.arange(4)[None, :, None]
    statistics = router_statistics(balanced, experts, None)
    assert statistics["load_balance"] == pytest.approx(1.0)
    chex.assert_trees_all_close(statistics["load"], jnp.full(4, 0.25))
    collapsed = jnp.broadcast_to(jnp.array([50.0, 0, 0, 0]), (1, 4, 4))
    statistics = router_statistics(collapsed, jnp.zeros((1, 4, 1), jnp.int32), None)
    assert statistics["load_balance"] == pytest.approx(4.0)
    assert statistics["router_z"] == pytest.approx(2500.0)
    mixed = jnp.concatenate([balanced, collapsed], axis=1)
    both = jnp.concatenate([experts, jnp.zeros((1, 4, 1), jnp.int32)], axis=1)
    ids = jnp.array([[1, 1, 1, 1, 0, 0, 0, 0]])
    chex.assert_trees_all_close(
        router_statistics(mixed, both, ids), router_statistics(balanced, experts, None), rtol=1e-6
    )


def test_losses_average_over_mixture_layers_and_reach_the_router(models, tokens):
    config, params = models["moe"]

    def loss(params):
        return router_losses(forward(config, params, tokens))["load_balance"]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert 0.9 < value < config.moe.num_experts
    assert jnp.abs(gradient["layers"][1]["feedforward"].router["kernel"]).max() > 0
    dense, dense_params = models["llama"]
    assert router_losses(forward(dense, dense_params, tokens))["load_balance"] == 0


def test_neuron_masks_are_refused_in_mixtures(models, tokens):
    config, params = models["moe"]
    with pytest.raises(ValueError, match="neuron_mask is for dense"):
        forward(config, params, tokens, ModelInputs(neuron_mask=jnp.ones(48, bool)))
