"""A method sits at any of four levels of the parameter tree and runs in the unchanged decoder."""

from __future__ import annotations

from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as Axes

from jaxllm.models.attention import split_heads
from jaxllm.models.config import RopeConfig
from jaxllm.models.decoder import block, embed, forward, unembed
from jaxllm.models.feedforward import dense_feedforward
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.linear import linear, matmul, project
from jaxllm.models.parameters import init_params, logical_axes
from jaxllm.models.quantized import quantize_params
from jaxllm.models.segments import map_layers
from jaxllm.models.weights import Attention, FeedForward, Group, Weight

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@flax.struct.dataclass
class LowRank(Weight):
    """Level 1: a low-rank update of any weight."""

    base: Any
    a: jax.Array
    b: jax.Array

    def matmul(self, x, context=None):
        return matmul(x, self.base, context) + matmul(matmul(x, self.a), self.b)

    def axes(self, base):
        inner = self.base.axes(base) if isinstance(self.base, Weight) else base
        return self.replace(base=inner, a=Axes(base[0], None), b=Axes(None, base[1]))


@flax.struct.dataclass
class Rotated(Group):
    """Level 2: the shared input is transformed once, the members' weights by the inverse."""

    transform: jax.Array
    members: Any

    def project(self, x, context):
        return project(x @ self.transform, self.members, context)


@flax.struct.dataclass
class ContextSparse(FeedForward):
    """Level 3: one channel set, chosen from the context tokens, for gate, up and down."""

    base: Any
    channels: int = flax.struct.field(pytree_node=False, default=0)

    def __call__(self, x, state, context):
        split = context.inputs.context_length
        head, tail = x[:, :split], x[:, split:]
        gate = jax.nn.silu(linear(head, self.base["in"]["gate"]))
        score = jnp.square(gate * linear(head, self.base["in"]["up"])).sum((0, 1))
        _, kept = jax.lax.top_k(score, self.channels)
        small = {
            "in": jax.tree.map(lambda w: w[:, kept], self.base["in"]),
            "down": {"kernel": self.base["down"]["kernel"][kept]},
        }
        context = context.untapped()
        y = jnp.concatenate(
            [dense_feedforward(small, head, context), dense_feedforward(self.base, tail, context)],
            axis=1,
        )
        return y, state, {"kept": kept}


@flax.struct.dataclass
class CarriedRope(Attention):
    """Level 4: rotary angles, cos and sin [B, T, H, R], that every layer updates."""

    base: Any
    mix: jax.Array

    def __call__(self, x, state, context):
        cos, sin = state
        qkv = project(x, self.base["qkv"], context)
        q, k, v = (split_heads(qkv[name], context.config.head_dim) for name in "qkv")

        def turn(y):
            a, b = jnp.split(y, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        wide = jnp.concatenate([v, cos, sin], axis=-1)
        out, cache = context.cache.attend(turn(q), turn(k), wide, context)
        values, *moved = jnp.split(out, [v.shape[-1], v.shape[-1] + cos.shape[-1]], axis=-1)
        state = tuple(
            old + jnp.einsum("bthr,hg->btgr", new, self.mix)
            for old, new in zip(state, moved, strict=True)
        )
        return linear(values.reshape(*x.shape[:2], -1), self.base["o"], context), state, cache


@pytest.fixture(scope="module")
def plain(models, tokens):
    config = models["llama"][0].replace(num_kv_heads=4, rope=RopeConfig())
    params = init_params(config.replace(initializer_range=0.2), jax.random.key(1))
    return config, params, forward(config, params, tokens).logits


def swap(layer, **changes):
    return {**layer, **changes}


def test_low_rank_over_int4_equals_the_dense_sum(plain, tokens):
    config, params, _ = plain
    params = quantize_params(params, bits=4, group_size=16)
    keys = jax.random.split(jax.random.key(0), 2)

    def adapt(index, layer, dense):
        gate = layer["feedforward"]["in"]["gate"]["kernel"]
        weight = LowRank(
            base=gate,
            a=0.1 * jax.random.normal(keys[0], (32, 3)),
            b=0.1 * jax.random.normal(keys[1], (3, 48)),
        )
        if dense:
            weight = gate.materialize() + weight.a @ weight.b
        inner = swap(layer["feedforward"]["in"], gate={"kernel": weight})
        return swap(layer, feedforward=swap(layer["feedforward"], **{"in": inner}))

    adapted = map_layers(lambda i, layer: adapt(i, layer, dense=False), params)
    merged = map_layers(lambda i, layer: adapt(i, layer, dense=True), params)
    assert len(adapted["layers"]) == 1  # still one scanned segment
    chex.assert_trees_all_close(
        forward(config, adapted, tokens).logits,
        forward(config, merged, tokens).logits,
        **TOLERANCE,
    )
    axes = logical_axes(config, adapted)["layers"][0]["feedforward"]["in"]["gate"]["kernel"]
    assert axes.base.codes == Axes("layers", "embed", "mlp")
    assert axes.b == Axes("layers", None, "mlp")


def test_transformed_group_and_only_some_layers(plain, tokens):
    config, params, expected = plain
    transform = jax.random.normal(jax.random.key(3), (32, 32)) + 3 * jnp.eye(32)

    def rotate(index, layer):
        if index == 1:
            return layer
        qkv = jax.tree.map(lambda w: jnp.linalg.solve(transform, w), layer["attention"]["qkv"])
        return swap(layer, attention=swap(layer["attention"], qkv=Rotated(transform, qkv)))

    rotated = map_layers(rotate, params)
    assert len(rotated["layers"]) == 3
    chex.assert_trees_all_close(forward(config, rotated, tokens).logits, expected, **TOLERANCE)


def test_context_sparse_feedforward(plain, tokens):
    config, params, expected = plain

    def sparse(channels):
        return map_layers(
            lambda _, layer: swap(layer, feedforward=ContextSparse(layer["feedforward"], channels)),
            params,
        )

    inputs = ModelInputs(context_length=5)
    full = forward(config, sparse(48), tokens, inputs)
    chex.assert_trees_all_close(full.logits, expected, **TOLERANCE)
    half = forward(config, sparse(24), tokens, inputs)
    assert half.aux[0]["kept"].shape == (3, 24)
    assert jnp.abs(half.logits - expected).max() > 1e-3


def test_positions_that_travel_from_layer_to_layer(plain, tokens):
    config, params, expected = plain
    angles = jnp.arange(12)[:, None] / 10000.0 ** (jnp.arange(0, 8, 2) / 8)

    def run(mix, shift=0):
        moved = angles + shift / 10000.0 ** (jnp.arange(0, 8, 2) / 8)
        start = tuple(
            jnp.broadcast_to(f(moved)[None, :, None], (2, 12, 4, 4)) for f in (jnp.cos, jnp.sin)
        )
        carried = map_layers(
            lambda _, layer: swap(layer, attention=CarriedRope(layer["attention"], mix)), params
        )
        return forward(config, carried, tokens, ModelInputs(state=start))

    chex.assert_trees_all_close(run(jnp.zeros((4, 4))).logits, expected, **TOLERANCE)
    mix = 0.2 * jax.random.normal(jax.random.key(4), (4, 4))
    mixed = run(mix)
    assert jnp.abs(mixed.logits - expected).max() > 1e-2
    chex.assert_trees_all_close(mixed.logits, run(mix, shift=57).logits, **TOLERANCE)


def test_two_models_scanned_together(plain, tokens):
    """Blocks of a tuned and an original model, both on the tuned model's stream."""
    config, tuned, expected = plain
    original = jax.tree.map(lambda w: w + 0.05, tuned)

    def split(original):
        x = embed(config, tuned, tokens)

        def step(carry, layers):
            x, total_original, total_tuned = carry
            before, after = (block(config, layer, x).x - x for layer in layers)
            return (x + after, total_original + before, total_tuned + after - before), None

        layers = (original["layers"][0], tuned["layers"][0])
        return jax.lax.scan(step, (x, jnp.zeros_like(x), jnp.zeros_like(x)), layers)[0]

    x, total_original, total_tuned = split(original)
    chex.assert_trees_all_close(unembed(config, tuned, x), expected, **TOLERANCE)
    start = embed(config, tuned, tokens)
    chex.assert_trees_all_close(start + total_original + total_tuned, x, **TOLERANCE)
    assert not split(tuned)[2].any()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("feedforward",), "a feed-forward must be a mapping or a FeedForward, got str"),
        (("attention",), "attention must be a mapping or an Attention, got str"),
        (("attention", "qkv"), "a group must be a mapping of linears or a Group, got str"),
        (("attention", "o"), "a linear must be a mapping with 'kernel'"),
        (("attention", "o", "kernel"), "a weight must be an array or a Weight, got str"),
    ],
)
def test_a_wrong_node_is_refused_by_its_type(plain, tokens, path, message):
    config, params, _ = plain
    layer = jax.tree.map(lambda w: w[0], params["layers"][0])
    node = layer
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = "nonsense"
    with pytest.raises(TypeError, match=message):
        block(config, layer, jnp.ones((1, 4, 32)))


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"cannot multiply x \(2, 3\) by a weight of shape"):
        matmul(jnp.ones((2, 3)), jnp.ones((4, 5)))
