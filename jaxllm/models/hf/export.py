"""`ModelConfig` to the config.json that transformers reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.config import config_from_hf
from jaxllm.models.hf.defaults import DEFAULTS
from jaxllm.models.hf.rope import rope_to_hf

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
# Fields that say how to run the model, not what it is.
_FREE = ("param_dtype", "compute_dtype", "remat")


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in the classic spelling that every transformers version reads.

    Raises:
      ValueError: the family has no setting for something that the config asks for; names the field.
    """
    if config.family not in ARCHITECTURES:
        raise ValueError(
            f"family {config.family!r} cannot be saved: expected one of {sorted(ARCHITECTURES)}."
        )
    eos = config.eos_token_ids
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.param_dtype,
    }
    write = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(config.family, _llama_like)
    values |= write(config)
    _check(config, values)
    return values


def _check(config: ModelConfig, values: dict[str, Any]) -> None:
    """Reads the result back: what the family cannot express would come back changed."""
    wanted, found = (_effective(c).to_dict() for c in (config, config_from_hf(values)))
    for name in ("moe", "mla", *wanted):
        if name not in _FREE and found[name] != wanted[name]:
            raise ValueError(
                f"family {config.family!r} cannot express {name}={wanted[name]!r}: its config.json "
                f"would be read back as {name}={found[name]!r}."
            )


def _effective(config: ModelConfig) -> ModelConfig:
    """The same model with defaults spelt out, so that equal models compare equal."""
    changes: dict[str, Any] = {
        "attention_scale": config.attention_scale or config.head_dim**-0.5,
        "windows": config.windows or (None,) * config.num_layers,
    }
    if config.moe is not None:
        sparse = tuple(config.is_sparse(layer) for layer in range(config.num_layers))
        # How experts run, and how their biases are trained, is no part of a checkpoint.
        changes["moe"] = dataclasses.replace(
            config.moe, sparse_layers=sparse, execution="auto", bias_update_rate=0.0
        )
        if all(sparse):  # no layer has the dense width
            changes["mlp_dim"] = config.moe.expert_dim
    return config.replace(**changes)


def _activation(config: ModelConfig) -> str:
    if config.activation != "gelu_tanh":
        return config.activation
    return "gelu_new" if config.family == "gpt2" else "gelu_pytorch_tanh"


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.max_positions,
        "n_ctx": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _activation(config),
        "scale_attn_weights": config.attention_scale != 1.0,
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        **rope_to_hf(config.family, config.rope, config.max_positions),
    }


def _gpt_neox(config: ModelConfig) -> dict[str, Any]:
    return _sizes(config) | {
        "layer_norm_eps": config.norm_eps,
        "hidden_act": _activation(config),
        "attention_bias": config.attention_bias,
        "use_parallel_residual": config.parallel_residual,
    }


def _llama_like(config: ModelConfig) -> dict[str, Any]:
    family = config.family
    values = _sizes(config) | {
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation" if family == "gemma2" else "hidden_act": _activation(config),
    }
    if family != "deepseek_v2":
        values["head_dim"] = config.head_dim
    if "attention_bias" in DEFAULTS[family]:
        values["attention_bias"] = config.attention_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if family == "qwen2_moe":
        values["qkv_bias"] = config.attention_bias
    if family == "olmoe":
        values["clip_qkv"] = config.clip_qkv
    if family == "gemma2":
        scalar = round((config.attention_scale or config.head_dim**-0.5) ** -2, 6)
        values |= {
            "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    values |= _windows(config)
    if family in _MIXTURES:
        values |= _MIXTURES[family](config)
    if family == "deepseek_v2":
        mla = config.mla
        values |= {
            "kv_lora_rank": mla.kv_rank,
            "q_lora_rank": mla.q_rank,
            "qk_nope_head_dim": mla.nope_dim,
            "qk_rope_head_dim": mla.rope_dim,
            "v_head_dim": mla.value_dim,
        }
    return values


def _windows(config: ModelConfig) -> dict[str, Any]:
    family, windows = config.family, config.windows
    if "sliding_window" not in DEFAULTS[family]:
        return {}
    sizes = {w for w in windows or () if w is not None}
    window = sizes.pop() if sizes else None
    values: dict[str, Any] = {"sliding_window": window}
    if family.startswith("qwen"):
        values["use_sliding_window"] = windows is not None
    if "layer_types" in DEFAULTS[family] and family != "qwen3_moe":
        values["layer_types"] = [
            "full_attention" if w is None else "sliding_attention"
            for w in windows or (None,) * config.num_layers
        ]
    return values


def _qwen_mixture(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"mlp_only_layers": list(range(config.num_layers))}
    values = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if not config.is_sparse(i)],
    }
    if config.family == "qwen2_moe":
        values["shared_expert_intermediate_size"] = moe.shared_dim
    return values


def _deepseek_mixture(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"first_k_dense_replace": config.num_layers}
    grouped = moe.num_groups > 1
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_dim,
        "routed_scaling_factor": moe.routed_scale,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": moe.num_groups if grouped else None,
        "topk_group": moe.groups_per_token if grouped else None,
        "norm_topk_prob": False,
        "first_k_dense_replace": sum(not config.is_sparse(i) for i in range(config.num_layers)),
    }


_MIXTURES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "mixtral": lambda config: {
        "intermediate_size": config.moe.expert_dim,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
    },
    "olmoe": lambda config: {
        "intermediate_size": config.moe.expert_dim,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "norm_topk_prob": config.moe.normalize_top_k,
    },
    "qwen2_moe": _qwen_mixture,
    "qwen3_moe": _qwen_mixture,
    "deepseek_v2": _deepseek_mixture,
}
