"""Layers as segments: runs of equal structure, restacked and unstacked without loss."""

from __future__ import annotations

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.decoder import forward
from jaxllm.models.quantized import quantize
from jaxllm.models.segments import map_layers, restack, segment_length, unroll, unstack

KINDS = ("wide", "narrow", "int8", "int4", "extra")


def layer(kind: str, value: int):
    width = 2 if kind == "narrow" else 4
    weight = np.full((4, width), value, np.float32)
    if kind in ("int8", "int4"):
        weight = quantize(jnp.asarray(weight), bits=int(kind[3:]))
    node = {"kernel": weight, "scale": np.float32(value)[None]}
    return {**node, "bias": np.zeros(1)} if kind == "extra" else node


@hypothesis.given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
def test_restack_makes_the_fewest_runs_and_unstack_undoes_it(kinds):
    layers = [layer(kind, index) for index, kind in enumerate(kinds)]
    segments = restack(layers)
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    assert len(segments) == 1 + changes
    assert sum(map(segment_length, segments)) == len(kinds)
    restored = unstack(segments)
    assert [float(node["scale"][0]) for node in restored] == list(range(len(kinds)))
    chex.assert_trees_all_close(tuple(restored), tuple(layers))


def test_ten_and_more_layers_keep_their_order_through_jit():
    layers = [layer("wide" if index % 2 else "narrow", index) for index in range(12)]
    segments = jax.jit(lambda tree: jax.tree.map(lambda x: x, tree))(restack(layers))
    assert [float(node["scale"][0]) for node in unstack(segments)] == list(range(12))


def test_abstract_layers_stack_to_the_same_shapes():
    layers = [layer("int4", index) for index in range(3)]
    chex.assert_trees_all_equal_shapes_and_dtypes(
        restack(jax.eval_shape(lambda: layers)), jax.eval_shape(lambda: restack(layers))
    )
    assert unstack(restack(jax.eval_shape(lambda: layers)))[0]["scale"].shape == (1,)


def test_mixed_widths_and_bits_run_unchanged(llama, tokens):
    config, params = llama

    def change(index, node):
        if index == 0:
            return node
        inner = {
            name: {"kernel": linear["kernel"][:, :40]}
            for name, linear in node["feedforward"]["in"].items()
        }
        down = quantize(node["feedforward"]["down"]["kernel"][:40], bits=8)
        return {**node, "feedforward": {"in": inner, "down": {"kernel": down}}}

    mixed = map_layers(change, params)
    assert [segment_length(segment) for segment in mixed["layers"]] == [1, 2]
    chex.assert_trees_all_close(
        forward(config, mixed, tokens).logits,
        forward(config, unroll(mixed), tokens).logits,
        atol=1e-5,
    )


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        restack([])
