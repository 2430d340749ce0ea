"""Configs of well-known models, for training from random weights and for compiling at scale."""

from __future__ import annotations

from jaxllm.models.config import ModelConfig, MoEConfig, RopeConfig


def llama_15m() -> ModelConfig:
    """A 15 M Llama (llama2.c's stories15M shape), the benchmark model."""
    return ModelConfig(
        vocab_size=32000,
        embed_dim=288,
        num_layers=6,
        num_heads=6,
        mlp_dim=768,
        max_positions=256,
        tie_embeddings=True,
        remat="all_dots",
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2 135M (arXiv:2502.02737)."""
    return ModelConfig(
        vocab_size=49152,
        embed_dim=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        mlp_dim=1536,
        max_positions=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e5),
        tie_embeddings=True,
        remat="all_dots",
    )


def llama3_8b() -> ModelConfig:
    """Llama 3 8B (arXiv:2407.21783, table 3)."""
    return ModelConfig(
        vocab_size=128256,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14336,
        max_positions=8192,
        rope=RopeConfig(theta=500000.0),
        compute_dtype="bfloat16",
        remat="dots",
    )


def llama3_70b() -> ModelConfig:
    """Llama 3 70B (arXiv:2407.21783, table 3)."""
    return llama3_8b().replace(
        embed_dim=8192, num_layers=80, num_heads=64, head_dim=128, mlp_dim=28672, remat="full"
    )


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B (arXiv:2401.04088, table 1)."""
    return ModelConfig(
        family="mixtral",
        vocab_size=32000,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14336,
        max_positions=32768,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_dim=14336),
        compute_dtype="bfloat16",
        remat="dots",
    )


def olmoe_7b() -> ModelConfig:
    """OLMoE 1B-7B (arXiv:2409.02060, table 10)."""
    return ModelConfig(
        family="olmoe",
        vocab_size=50304,
        embed_dim=2048,
        num_layers=16,
        num_heads=16,
        mlp_dim=1024,
        max_positions=4096,
        qk_norm="whole",
        moe=MoEConfig(num_experts=64, experts_per_token=8, expert_dim=1024, normalize_top_k=False),
        compute_dtype="bfloat16",
        remat="dots",
    )


PRESETS = {
    "llama_15m": llama_15m,
    "smollm2_135m": smollm2_135m,
    "llama3_8b": llama3_8b,
    "llama3_70b": llama3_70b,
    "mixtral_8x7b": mixtral_8x7b,
    "olmoe_7b": olmoe_7b,
}


def preset(name: str) -> ModelConfig:
    """A config by name.

    Raises:
      KeyError: an unknown name.
    """
    if name not in PRESETS:
        raise KeyError(f"unknown preset {name!r}: expected one of {sorted(PRESETS)}.")
    return PRESETS[name]()
