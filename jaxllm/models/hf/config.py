"""config.json of every supported family to `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxllm.models.config import MLAConfig, ModelConfig, MoEConfig
from jaxllm.models.hf.defaults import ALIASES, COMMON, DEFAULTS, ONLY
from jaxllm.models.hf.errors import UnsupportedModelError
from jaxllm.models.hf.rope import rope_from_hf

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def config_from_hf(values: dict[str, Any]) -> ModelConfig:
    """Translates a parsed config.json.

    Args:
      values: the parsed file, in the classic or the transformers 5 spelling. What it leaves out
        takes the default of the family's transformers class.

    Returns:
      The config; both dtypes are the checkpoint's ("dtype" or "torch_dtype"), else float32.

    Raises:
      UnsupportedModelError: unknown architecture, or an option that is not supported; names it.
    """
    family = values.get("model_type")
    if family not in DEFAULTS:
        raise UnsupportedModelError(
            f"model_type {family!r} is not supported: expected one of {sorted(DEFAULTS)}."
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the weights are quantised (quantization_config, method {method!r}): load the "
            "original "
            "floating-point checkpoint and quantise it here."
        )
    aliases = ALIASES.get(family, {})
    values = {aliases.get(name, name): value for name, value in values.items()}
    for name, allowed in ONLY.get(family, {}).items():
        if values.get(name, allowed[0]) not in allowed:
            raise UnsupportedModelError(
                f"{family} option {name}={values[name]!r} is not supported: expected one of "
                f"{allowed}."
            )
    c = {**COMMON, **DEFAULTS[family], **values}
    eos = c["eos_token_id"]
    dtype = str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch.")
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": c["vocab_size"],
        "initializer_range": c["initializer_range"],
        "tie_embeddings": bool(c["tie_word_embeddings"]),
        "bos_token_id": c["bos_token_id"],
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "pad_token_id": c["pad_token_id"],
        "param_dtype": dtype,
        "compute_dtype": dtype,
    }
    read = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(family, _llama_like)
    try:
        return ModelConfig(**fields, **read(c))
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(f"config.json of a {family} model: {error}") from error


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported: expected one of {sorted(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def _gpt2(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "embed_dim": c["n_embd"],
        "num_layers": c["n_layer"],
        "num_heads": c["n_head"],
        "mlp_dim": c["n_inner"] or 4 * c["n_embd"],
        "max_positions": c["n_positions"],
        "norm": "layernorm",
        "norm_eps": c["layer_norm_epsilon"],
        "activation": _activation(c["activation_function"]),
        "gated": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "attention_scale": None if c["scale_attn_weights"] else 1.0,
    }


def _sizes(c: dict[str, Any]) -> dict[str, Any]:
    max_positions = c["max_position_embeddings"]
    return {
        "embed_dim": c["hidden_size"],
        "num_layers": c["num_hidden_layers"],
        "num_heads": c["num_attention_heads"],
        "mlp_dim": c["intermediate_size"],
        "max_positions": max_positions,
        "rope": rope_from_hf(
            c["model_type"],
            c,
            theta=c["default_theta"],
            partial=c["default_partial"],
            max_positions=max_positions,
        ),
    }


def _gpt_neox(c: dict[str, Any]) -> dict[str, Any]:
    return _sizes(c) | {
        "norm": "layernorm",
        "norm_eps": c["layer_norm_eps"],
        "activation": _activation(c["hidden_act"]),
        "gated": False,
        "attention_bias": c["attention_bias"],
        "attention_out_bias": c["attention_bias"],
        "mlp_bias": True,
        "parallel_residual": c["use_parallel_residual"],
    }


def _llama_like(c: dict[str, Any]) -> dict[str, Any]:
    family = c["model_type"]
    fields = _sizes(c) | {
        "num_kv_heads": c["num_key_value_heads"],
        "head_dim": c["head_dim"],
        "norm_eps": c["rms_norm_eps"],
        "activation": _activation(c["hidden_activation" if family == "gemma2" else "hidden_act"]),
        "windows": _windows(c),
    }
    if family == "qwen2":
        fields |= {"attention_bias": True}
    elif family == "qwen2_moe":
        fields |= {"attention_bias": c["qkv_bias"]}
    else:
        bias = bool(c.get("attention_bias", False)) and family not in ("mistral", "mixtral", "phi3")
        fields |= {"attention_bias": bias, "attention_out_bias": bias}
    if family == "llama":
        fields |= {"mlp_bias": c["mlp_bias"]}
    if family in ("qwen3", "qwen3_moe"):
        fields |= {"qk_norm": "head"}
    if family == "olmoe":
        fields |= {"qk_norm": "whole", "clip_qkv": c["clip_qkv"]}
    if family == "gemma2":
        fields |= {
            "norm_unit_offset": True,
            "post_norms": True,
            "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
            "attention_softcap": c["attn_logit_softcapping"],
            "logit_softcap": c["final_logit_softcapping"],
            "embed_scale": c["hidden_size"] ** 0.5,
        }
    if family in _MIXTURES:
        fields |= {"moe": _MIXTURES[family](c)}
    if family == "deepseek_v2":
        fields |= _latent(c, fields)
    return fields


def _windows(c: dict[str, Any]) -> tuple[int | None, ...] | None:
    """Per layer, how many positions a token sees; None where every layer sees all."""
    family, layers = c["model_type"], c["num_hidden_layers"]
    window = c.get("sliding_window")
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        on = window is not None and (family != "qwen3_moe" or c["use_sliding_window"])
        return (window,) * layers if on else None
    if family not in ("qwen2", "qwen3", "qwen2_moe", "gemma2"):
        return None
    kinds = c["layer_types"]
    if family != "gemma2" and not c["use_sliding_window"]:
        window = None
    if kinds is None:
        first_full = {"gemma2": layers, "qwen2_moe": c.get("max_window_layers")}.get(family)
        if first_full is not None:
            slides = [i % 2 == 0 and i < first_full for i in range(layers)]
        else:
            slides = [i >= c["max_window_layers"] for i in range(layers)]
    else:
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown:
            raise UnsupportedModelError(
                f"layer type {unknown[0]!r} is not supported: expected 'sliding_attention' or "
                "'full_attention'."
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(slides):
        return None
    return tuple(window if slide else None for slide in slides)


def _qwen_mixture(c: dict[str, Any]) -> MoEConfig | None:
    dense = set(c["mlp_only_layers"] or ())
    layers, step = c["num_hidden_layers"], c["decoder_sparse_step"]
    sparse = tuple(
        i not in dense and c["num_experts"] > 0 and (i + 1) % step == 0 for i in range(layers)
    )
    if not any(sparse):
        return None
    qwen2 = c["model_type"] == "qwen2_moe"
    return MoEConfig(
        num_experts=c["num_experts"],
        experts_per_token=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        normalize_top_k=c["norm_topk_prob"],
        shared_dim=c["shared_expert_intermediate_size"] if qwen2 else 0,
        shared_gate=qwen2,
        sparse_layers=None if all(sparse) else sparse,
    )


def _deepseek_mixture(c: dict[str, Any]) -> MoEConfig | None:
    layers, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
    if dense >= layers or not c["n_routed_experts"]:
        return None
    grouped = c["topk_method"] == "group_limited_greedy"
    return MoEConfig(
        num_experts=c["n_routed_experts"],
        experts_per_token=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        normalize_top_k=False,
        routed_scale=float(c["routed_scaling_factor"]),
        shared_dim=c["moe_intermediate_size"] * (c["n_shared_experts"] or 0),
        num_groups=c["n_group"] if grouped else 1,
        groups_per_token=c["topk_group"] if grouped else 1,
        sparse_layers=tuple(i >= dense for i in range(layers)) if dense else None,
    )


_MIXTURES: dict[str, Callable[[dict[str, Any]], MoEConfig | None]] = {
    "mixtral": lambda c: MoEConfig(
        c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"]
    ),
    "olmoe": lambda c: MoEConfig(
        c["num_experts"],
        c["num_experts_per_tok"],
        c["intermediate_size"],
        normalize_top_k=c["norm_topk_prob"],
    ),
    "qwen2_moe": _qwen_mixture,
    "qwen3_moe": _qwen_mixture,
    "deepseek_v2": _deepseek_mixture,
}


def _latent(c: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    mla = MLAConfig(
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=c["qk_rope_head_dim"],
        value_dim=c["v_head_dim"],
        q_rank=c["q_lora_rank"],
    )
    width = mla.nope_dim + mla.rope_dim
    rope, scale = fields["rope"], None
    if rope.type != "default" and rope.mscale_all_dim and rope.factor > 1:
        # YaRN's temperature acts on the plain part of queries and keys too.
        scale = width**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return {
        "mla": mla,
        "head_dim": width,
        "num_kv_heads": c["num_attention_heads"],
        "attention_scale": scale,
    }
