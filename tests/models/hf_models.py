"""One tiny config a family, with the options that matter for its layout on disk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxllm.models.parameters import abstract_params

_BASE = {
    "vocab_size": 40,
    "embed_dim": 16,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 24,
    "max_positions": 32,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}


def _config(family: str, **fields) -> ModelConfig:
    return ModelConfig(family=family, **{**_BASE, **fields})


CONFIGS: dict[str, ModelConfig] = {
    "gpt2": _config(
        "gpt2",
        num_kv_heads=4,
        norm="layernorm",
        activation="gelu_tanh",
        gated=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_embeddings=True,
    ),
    "gpt_neox": _config(
        "gpt_neox",
        num_kv_heads=4,
        norm="layernorm",
        activation="gelu",
        gated=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        parallel_residual=True,
        rope=RopeConfig(partial=0.5, theta=500.0),
    ),
    "llama": _config(
        "llama",
        head_dim=6,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        eos_token_ids=(2, 3),
        rope=RopeConfig("llama3", factor=8.0, original_max_positions=16, theta=5e5),
    ),
    "mistral": _config("mistral", windows=(8,) * 3, rope=RopeConfig("linear", factor=2.0)),
    "qwen2": _config(
        "qwen2",
        attention_bias=True,
        windows=(None, 8, 8),
        rope=RopeConfig(
            "yarn",
            factor=4.0,
            original_max_positions=16,
            truncate=False,
            mscale=0.7,
            mscale_all_dim=0.9,
            attention_factor=1.1,
        ),
    ),
    "qwen3": _config("qwen3", head_dim=6, qk_norm="head", tie_embeddings=True),
    "phi3": _config(
        "phi3",
        windows=(8,) * 3,
        pad_token_id=0,
        rope=RopeConfig(
            "longrope",
            factor=2.0,
            original_max_positions=16,
            short_factor=(1.0, 1.5),
            long_factor=(2.0, 3.0),
        ),
    ),
    "gemma2": _config(
        "gemma2",
        head_dim=6,
        norm_unit_offset=True,
        post_norms=True,
        activation="gelu_tanh",
        attention_scale=24**-0.5,
        attention_softcap=20.0,
        logit_softcap=10.0,
        embed_scale=4.0,
        windows=(8, None, 8),
        tie_embeddings=True,
    ),
    "mixtral": _config("mixtral", moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=24)),
    "olmoe": _config(
        "olmoe",
        qk_norm="whole",
        clip_qkv=2.0,
        moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=24, normalize_top_k=False),
    ),
    "qwen2_moe": _config(
        "qwen2_moe",
        attention_bias=True,
        moe=MoEConfig(
            num_experts=4,
            experts_per_token=2,
            expert_dim=12,
            normalize_top_k=False,
            shared_dim=20,
            shared_gate=True,
            sparse_layers=(False, True, True),
        ),
    ),
    "qwen3_moe": _config(
        "qwen3_moe",
        qk_norm="head",
        moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=12),
    ),
    "deepseek_v2": _config(
        "deepseek_v2",
        num_kv_heads=4,
        head_dim=14,
        mla=MLAConfig(kv_rank=12, nope_dim=8, rope_dim=6, value_dim=10, q_rank=20),
        moe=MoEConfig(
            num_experts=4,
            experts_per_token=2,
            expert_dim=12,
            normalize_top_k=False,
            routed_scale=1.5,
            shared_dim=24,
            num_groups=2,
            groups_per_token=1,
            sparse_layers=(False, True, True),
        ),
    ),
    "deepseek_v2-lite": _config(
        "deepseek_v2",
        num_kv_heads=4,
        head_dim=14,
        mla=MLAConfig(kv_rank=12, nope_dim=8, rope_dim=6, value_dim=10),
        moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=12, normalize_top_k=False),
    ),
}


def random_params(config: ModelConfig):
    """Parameters of which no two values are alike, norms and biases included."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32), leaf.dtype),
        abstract_params(config),
    )
