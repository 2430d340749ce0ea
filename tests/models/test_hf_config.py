"""config.json in and out."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxllm.models.config import ModelConfig, MoEConfig, RopeConfig
from jaxllm.models.hf import UnsupportedModelError, config_from_hf, config_to_hf
from jaxllm.models.hf.defaults import DEFAULTS
from jaxllm.models.hf.export import ARCHITECTURES
from jaxllm.models.hf.names import FAMILIES
from jaxllm.models.presets import PRESETS, preset
from tests.models.hf_models import CONFIGS

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_round_trip_through_json(name):
    config = CONFIGS[name]
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_can_be_written(name):
    written = config_to_hf(preset(name))
    assert written["architectures"] == [ARCHITECTURES[preset(name).family]]


def test_how_experts_run_is_no_part_of_a_checkpoint():
    config = preset("mixtral_8x7b")
    grouped = config.replace(moe=dataclasses.replace(config.moe, execution="grouped"))
    assert config_to_hf(grouped) == config_to_hf(config)


def test_every_family_has_every_table():
    assert set(DEFAULTS) == set(FAMILIES) == set(ARCHITECTURES)


def test_classic_and_new_spelling_of_the_rotary_settings_agree():
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    classic = config_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": settings})
    new = config_from_hf(LLAMA | {"rope_parameters": settings | {"rope_theta": 5e5}})
    nested = config_from_hf(
        LLAMA | {"rope_parameters": {"full_attention": settings | {"rope_theta": 5e5}}}
    )
    assert classic == new == nested
    assert classic.rope == RopeConfig(
        "llama3",
        5e5,
        factor=8.0,
        original_max_positions=512,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_rotary_settings_of_gpt_neox():
    config = config_from_hf({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500})
    assert (config.rope.partial, config.rope.theta) == (0.5, 500.0)
    assert config_from_hf({"model_type": "gpt_neox"}).rope.partial == 0.25


def test_dynamic_scaling_is_measured_against_max_position_embeddings():
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    config = config_from_hf(LLAMA | {"max_position_embeddings": 128, "rope_scaling": scaling})
    assert config.rope.original_max_positions == 128


@pytest.mark.parametrize("where", ["top", "inside", "nowhere"])
def test_phi3_longrope(where):
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {
        "model_type": "phi3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 16384,
    }
    if where == "top":
        values["original_max_position_embeddings"] = 4096
    elif where == "inside":  # the class's own default, 4096, still wins in transformers
        scaling["original_max_position_embeddings"] = 2048
    rope = config_from_hf(values | {"rope_scaling": scaling}).rope
    assert (rope.type, rope.original_max_positions, rope.factor) == ("longrope", 4096, 4.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported: expected one of .*'llama'"),
        ({}, "model_type None is not supported"),
        (LLAMA | {"hidden_act": "mish"}, "activation 'mish' is not supported: .*'silu'"),
        (LLAMA | {"rope_scaling": {"type": "mrope"}}, "rope scaling type 'mrope' is not supported"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (LLAMA | {"hidden_size": 66}, "embed_dim=66 is not divisible by num_heads=4"),
        (LLAMA | {"hidden_size": "64"}, "config.json of a llama model"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantised .*'gptq'"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True is not supported",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention=True",
        ),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"] * 32},
            "layer type 'linear_attention' is not supported",
        ),
        (
            LLAMA | {"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}},
            "rope_parameters differ between layer types",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(values)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ModelConfig(qk_norm="head"), "qk_norm='head'"),
        (ModelConfig(windows=(4,) * 6), r"windows=\(4, 4, 4, 4, 4, 4\)"),
        (ModelConfig(rope=RopeConfig(partial=0.5)), "rope="),
        (ModelConfig(family="mistral", windows=(4, None, 4, 4, 4, 4)), "windows="),
        (ModelConfig(moe=MoEConfig(4, 2, 8)), "moe="),
        (ModelConfig(family="rwkv"), "'rwkv' cannot be saved"),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(config, field):
    with pytest.raises(ValueError, match=field):
        config_to_hf(config)
