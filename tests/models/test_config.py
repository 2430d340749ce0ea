"""Configs are validated by name, and survive JSON."""

from __future__ import annotations

import json

import pytest

from jaxllm.models.config import ModelConfig, MoEConfig, RopeConfig
from jaxllm.models.parameters import abstract_params, count_params
from jaxllm.models.presets import PRESETS, preset


def test_every_config_survives_json(model):
    config, _ = model
    restored = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config and hash(restored) == hash(config)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="unknown model option 'num_layer'"):
        ModelConfig.from_dict({"num_layer": 3})
    with pytest.raises(ValueError, match="unknown model option 'rope.base'"):
        ModelConfig.from_dict({"rope": {"base": 3}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(num_heads=6, num_kv_heads=4), "not divisible by num_kv_heads=4"),
        (lambda: ModelConfig(embed_dim=10, num_heads=3), "embed_dim=10 is not divisible"),
        (lambda: ModelConfig(num_layers=0), "num_layers=0 must be a positive integer"),
        (lambda: ModelConfig(activation="tanh"), "activation='tanh' is not supported"),
        (lambda: ModelConfig(compute_dtype="int8"), "must be a floating-point type"),
        (lambda: ModelConfig(windows=(4,)), "windows must have one entry per layer"),
        (lambda: RopeConfig(type="yarn"), "needs rope.original_max_positions"),
        (lambda: RopeConfig(type="ntk"), "rope.type='ntk' is not supported"),
        (lambda: MoEConfig(4, 5, 8), "moe.experts_per_token=5"),
        (lambda: MoEConfig(8, 3, 8, num_groups=4, groups_per_token=1), "leaves 2 experts"),
    ],
)
def test_impossible_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama_15m", 0.0152),
        ("llama3_8b", 8.03),
        ("llama3_70b", 70.55),
        ("mixtral_8x7b", 46.70),
        ("olmoe_7b", 6.92),
    ],
)
def test_presets_have_the_published_sizes(name, billions):
    assert count_params(abstract_params(preset(name))) / 1e9 == pytest.approx(billions, rel=5e-3)
    assert name in PRESETS


def test_unknown_preset_lists_the_known():
    with pytest.raises(KeyError, match="expected one of"):
        preset("gpt5")
