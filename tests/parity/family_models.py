"""Random tiny transformers models: one or more a family, with every option that matters."""

from __future__ import annotations

import zlib

TIME, ORIGINAL = 24, 16

# Widths differ from each other, so that a transposed or misplaced matrix cannot fit.
_BASE = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = _BASE | {"head_dim": 12}
_SPARSE = _BASE | {"num_experts": 6, "num_experts_per_tok": 2}
_MLA = _BASE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}


def _rope(kind: str, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **settings}}


_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 4.0}

CASES: dict[str, tuple[str, dict]] = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 53,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "n_inner": 44,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt2-unscaled-untied": (
        "gpt2",
        {
            "vocab_size": 53,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", _BASE | _rope("default", partial_rotary_factor=0.25)),
    "gpt_neox-serial-linear": (
        "gpt_neox",
        _BASE
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
        }
        | _rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "llama": ("llama", _LLAMA),
    "llama-biases-tied": (
        "llama",
        _LLAMA
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
    ),
    "llama-linear": ("llama", _LLAMA | _rope("linear", factor=3.0)),
    "llama-dynamic": (
        "llama",
        _LLAMA | {"max_position_embeddings": ORIGINAL} | _rope("dynamic", factor=2.0),
    ),
    "llama-yarn": ("llama", _LLAMA | _rope("yarn", **_YARN)),
    "llama-yarn-mscale": (
        "llama",
        _LLAMA | _rope("yarn", **_YARN, mscale=0.7, mscale_all_dim=1.2, truncate=False),
    ),
    "llama-llama3": (
        "llama",
        _LLAMA
        | _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=ORIGINAL,
        ),
    ),
    "llama-longrope": ("llama", _LLAMA | _rope("longrope", factor=4.0, **_LONGROPE)),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 7}),
    "qwen2": (
        "qwen2",
        _BASE
        | {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", _LLAMA | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        _LLAMA
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", _BASE | {"sliding_window": 9} | _rope("default", partial_rotary_factor=0.75)),
    "phi3-longrope": (
        "phi3",
        _BASE
        | {
            "hidden_size": 48,
            "original_max_position_embeddings": ORIGINAL,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": _LONGROPE["short_factor"],
                "long_factor": _LONGROPE["long_factor"],
            },
        },
    ),
    "gemma2": (
        "gemma2",
        _LLAMA
        | {
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mixtral": (
        "mixtral",
        _LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "olmoe": ("olmoe", _SPARSE | {"clip_qkv": 0.8}),
    "olmoe-normalised": ("olmoe", _SPARSE | {"norm_topk_prob": True, "attention_bias": True}),
    "qwen2_moe": (
        "qwen2_moe",
        _SPARSE
        | {
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        _SPARSE
        | {
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _MLA
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        }
        | _rope("yarn", **_YARN, mscale=0.7, mscale_all_dim=0.9),
    ),
    "deepseek_v2-lite": ("deepseek_v2", _MLA | {"q_lora_rank": None, "first_k_dense_replace": 0}),
}
# There transformers decides by the longest row of the batch; we decide by each sequence.
LENGTH_DEPENDENT = {"llama-dynamic", "llama-longrope", "phi3-longrope"}


def build(name: str):
    """A random transformers model whose every tensor matters."""
    import torch
    import transformers

    family, settings = CASES[name]
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(zlib.crc32(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.normal_(0, 0.25)
            if "norm" in key and key.endswith("weight") and family != "gemma2":
                tensor.add_(1.0)
    return model
