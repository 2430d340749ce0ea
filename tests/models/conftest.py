"""Tiny configs that together use every feature of the decoder, shared by the tests of models."""

from __future__ import annotations

import jax
import pytest

from jaxllm.models.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxllm.models.parameters import init_params

TINY = {"vocab_size": 64, "embed_dim": 32, "num_layers": 3, "num_heads": 4, "mlp_dim": 48}
CONFIGS = {
    "llama": ModelConfig(**TINY, num_kv_heads=2, rope=RopeConfig(partial=0.5)),
    "gpt2": ModelConfig(
        **TINY,
        norm="layernorm",
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        max_positions=32,
    ),
    "neox": ModelConfig(
        **TINY, norm="layernorm", activation="gelu", gated=False, parallel_residual=True
    ),
    "gemma2": ModelConfig(
        **TINY,
        num_kv_heads=2,
        head_dim=16,
        norm_unit_offset=True,
        post_norms=True,
        windows=(4, None, 4),
        attention_softcap=5.0,
        logit_softcap=3.0,
        embed_scale=32**0.5,
        tie_embeddings=True,
    ),
    "moe": ModelConfig(
        **TINY,
        qk_norm="whole",
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            expert_dim=24,
            shared_dim=16,
            num_groups=4,
            groups_per_token=2,
            sparse_layers=(False, True, True),
        ),
    ),
    "mla": ModelConfig(
        **TINY, mla=MLAConfig(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12, q_rank=20)
    ),
}


@pytest.fixture(scope="session")
def models():
    """name -> (config, params) with weights large enough that every feature shows in the logits."""
    return {
        name: (config, init_params(config.replace(initializer_range=0.2), jax.random.key(1)))
        for name, config in CONFIGS.items()
    }


@pytest.fixture(scope="session", params=list(CONFIGS))
def model(request, models):
    return models[request.param]


@pytest.fixture(scope="session")
def llama(models):
    return models["llama"]


@pytest.fixture(scope="session")
def tokens():
    return jax.random.randint(jax.random.key(2), (2, 12), 0, TINY["vocab_size"])
