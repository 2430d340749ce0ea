"""Grouped experts against every expert on every token: values, gradients, choice, meshes."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import grouped_experts, quantized
from jaxllm.models.config import ModelConfig, MoEConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.decoder import forward
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.moe import run_every_expert
from jaxllm.models.parameters import init_params
from jaxllm.training import sharding

BASE = ModelConfig(
    vocab_size=8, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=8, initializer_range=0.4
)
CONFIGS = {
    "gated": BASE.replace(moe=MoEConfig(4, 2, 8)),
    "biases": BASE.replace(moe=MoEConfig(6, 3, 8), gated=False, mlp_bias=True, activation="gelu"),
}


def context(config):
    shared = Shared(positions=None, segment_ids=None, rope=None)
    return Context(config, ModelInputs(), shared, layer=0, cache=None, taps=Taps(()))


def example(config, seed, skew=0.0, rows=(8, 6)):
    """(nodes, x, experts, weights, a direction for the output); skew sends all to expert 0."""
    keys = jax.random.split(jax.random.key(seed), 4)
    node = init_params(config, keys[0])["layers"][0]["feedforward"].experts
    node = jax.tree.map(lambda w: w[0] + 0.1, node)
    x = jax.random.normal(keys[1], (*rows, config.embed_dim))
    moe = config.moe
    scores = jax.random.normal(keys[2], (*rows, moe.num_experts)).at[..., 0].add(skew)
    scores, experts = jax.lax.top_k(scores, moe.experts_per_token)
    direction = jax.random.normal(keys[3], x.shape)
    return node, x, experts, jax.nn.softmax(scores), direction


@functools.cache
def compiled(run, name):
    """(output, gradients with respect to experts, x and weights), compiled once."""
    config = CONFIGS[name]

    def both(node, x, experts, weights, direction):
        def scalar(node, x, weights):
            y = run(node, x, experts, weights, context(config))
            return (y * direction).sum(), y

        grads, y = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(node, x, weights)
        return y, grads

    return jax.jit(both)


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("name", list(CONFIGS))
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 10_000), skew=st.sampled_from([-9.0, 0.0, 1.0, 9.0]))
def test_grouped_equals_every_expert(name, seed, skew):
    arguments = example(CONFIGS[name], seed, skew)
    expected = compiled(run_every_expert, name)(*arguments)
    assert_close(compiled(grouped_experts.run, name)(*arguments), expected)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gated", {"fsdp": 2, "tensor": 2, "expert": 2}),
        ("gated", {"fsdp": 1, "data": 2, "expert": 2, "context": 2}),
        ("biases", {"fsdp": 4, "tensor": 2}),
        ("biases", {"fsdp": 2, "expert": 4}),  # Six experts do not divide: all are everywhere.
    ],
)
def test_meshes_equal_one_device(name, mesh):
    arguments = example(CONFIGS[name], 1, 1.0)
    expected = compiled(run_every_expert, name)(*arguments)
    with sharding.use(sharding.create_mesh(sharding.MeshConfig(**mesh))):
        # A function of its own: what is compiled outside of the mesh must not be found again.
        got = jax.jit(lambda *a: compiled(grouped_experts.run, name)(*a))(*arguments)
    assert_close(got, expected)


def test_rows_that_do_not_divide_meet_sharded_experts():
    arguments = example(CONFIGS["gated"], 2, 0.0, (1, 5))
    expected = compiled(run_every_expert, "gated")(*arguments)
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=4, expert=2))
    with sharding.use(mesh):
        got = jax.jit(lambda *a: compiled(grouped_experts.run, "gated")(*a))(*arguments)
    assert_close(got, expected)


@hypothesis.given(st.integers(1, 5000), st.integers(1, 8), st.integers(8, 256))
def test_blocks_are_powers_of_two_that_fit(rows, per_row, num_experts):
    block = grouped_experts.block_rows(rows, per_row, num_experts)
    assert 8 <= block <= 512 and block & (block - 1) == 0
    assert block <= max(8, 2 * rows)


def test_what_is_faster():
    assert grouped_experts.is_faster(4096, 2, 8)  # Training.
    assert grouped_experts.is_faster(1, 8, 64)  # A decoding step reads 8 experts of 64.
    assert not grouped_experts.is_faster(512, 4, 4)  # Every expert is chosen by everyone.


def test_containers_fall_back_and_are_refused_where_grouping_is_asked_for():
    config = BASE.replace(embed_dim=32, moe=MoEConfig(8, 2, 32))
    params = init_params(config, jax.random.key(0))
    (segment,) = params["layers"]
    quantize = functools.partial(quantized.quantize, bits=8, group_size=8)
    mixture = segment["feedforward"]
    experts = jax.tree.map(lambda w: jax.vmap(jax.vmap(quantize))(w), mixture.experts)
    layer = segment | {"feedforward": mixture.replace(experts=experts)}
    packed = params | {"layers": (layer,)}
    tokens = jnp.arange(8)[None] % 8
    logits = jax.jit(lambda params: forward(config, params, tokens).logits)
    np.testing.assert_allclose(logits(packed), logits(params), atol=0.05)
    grouped = config.replace(moe=dataclasses.replace(config.moe, execution="grouped"))
    with pytest.raises(ValueError, match="moe.execution='grouped' needs experts that are plain"):
        forward(grouped, packed, tokens)


def test_a_training_step_holds_no_activations_of_experts():
    """Memory of the gradient does not grow with the hidden width times the choices."""
    config = BASE.replace(moe=MoEConfig(8, 2, 256))
    arguments = example(config, 0, 0.0, (8, 256))

    def temporaries(run):
        def scalar(node, x):
            return (run(node, x, *arguments[2:4], context(config)) ** 2).sum()

        compiled = jax.jit(jax.grad(scalar, argnums=(0, 1))).lower(*arguments[:2]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(grouped_experts.run) < 0.25 * temporaries(run_every_expert)
