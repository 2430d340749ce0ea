"""The manifest rebuilds a restore target and refuses a tree that is another."""

from __future__ import annotations

import json

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxllm.models import manifest
from jaxllm.models.quantized import quantize_params
from jaxllm.models.segments import unroll


def test_a_description_survives_json_and_rebuilds_the_tree(model):
    _, params = model
    params = unroll(quantize_params(params, bits=4, group_size=4))
    description = json.loads(json.dumps(manifest.describe(params)))
    target = manifest.abstract(description)
    assert jax.tree.structure(target) == jax.tree.structure(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(target, jax.eval_shape(lambda: params))
    manifest.check(description, params)


def test_differences_are_named_by_path(llama):
    _, params = llama
    four = quantize_params(params, bits=4)
    description = manifest.describe(four)
    with pytest.raises(
        ValueError, match=r"params/layers/0/attention/o/kernel: .*'bits': 4.*'bits': 8"
    ):
        manifest.check(description, quantize_params(params, bits=8))
    with pytest.raises(ValueError, match="params/layers/1: only the model has it"):
        manifest.check(description, {**four, "layers": four["layers"] * 2})
    with pytest.raises(ValueError, match="params/lm_head: only the checkpoint has it"):
        manifest.check(description, {k: v for k, v in four.items() if k != "lm_head"})


def test_only_node_classes_of_the_named_modules_are_built():
    node = {"kind": "node", "class": "os:system", "static": {}, "fields": {}}
    with pytest.raises(ValueError, match="names the class 'os:system'"):
        manifest.abstract(node)
    node["class"] = "jaxllm.models.config:ModelConfig"
    with pytest.raises(ValueError, match="not a class of parameter nodes"):
        manifest.abstract(node)


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="cannot describe a function"):
        manifest.describe({"a": test_what_json_cannot_hold_is_refused})
    assert manifest.describe({"a": jnp.ones(3)})["items"]["a"]["shape"] == [3]
