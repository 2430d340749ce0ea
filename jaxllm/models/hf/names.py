"""Where each of our parameters lies in a checkpoint: one table a family, used to load and to save.

An `Entry` ties one leaf of a layer (or of the top level) to one stored tensor. `{layer}` and
`{expert}` in a name stand for numbers. Tables list everything that a family may have; which entries
a model uses follows from the leaves that its config has.
"""

from __future__ import annotations

import dataclasses

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.rows import Concatenated, PerHead, RotaryPairs, Rows

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of the parameter tree and the tensor that holds it.

    Attributes:
      path: of the leaf, within its layer where the name has `{layer}`.
      name: of the stored tensor.
      transpose: stored (out, in), as torch's Linear; ours is (in, out).
      rows: which of the stored outputs are ours; None = all, in order.
      stacked: the stored tensor itself has a leading expert axis.
    """

    path: Path
    name: str
    transpose: bool = False
    rows: Rows | None = None
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family names and lays out its tensors.

    Attributes:
      entries: as written on disk.
      alternatives: other layouts that are accepted when loading, by the path that they serve.
      prefix: what checkpoints of the bare model (without head) leave out of the names.
      ignorable: regular expressions of stored buffers that hold no parameters.
      head: name of the output head's tensor, also where the embeddings are tied.
    """

    entries: tuple[Entry, ...]
    alternatives: tuple[Entry, ...] = ()
    prefix: str = "model."
    ignorable: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    head: str = "lm_head.weight"


def _linear(path: Path, name: str, rows: Rows | None = None) -> tuple[Entry, ...]:
    return (
        Entry((*path, "kernel"), f"{name}.weight", transpose=True, rows=rows),
        Entry((*path, "bias"), f"{name}.bias", rows=rows),
    )


def _conv1d(path: Path, name: str, rows: Rows | None = None) -> tuple[Entry, ...]:
    """GPT-2's Conv1D is stored (in, out) already."""
    return (
        Entry((*path, "kernel"), f"{name}.weight", rows=rows),
        Entry((*path, "bias"), f"{name}.bias", rows=rows),
    )


def _norm(path: Path, name: str) -> tuple[Entry, ...]:
    return (Entry((*path, "scale"), f"{name}.weight"), Entry((*path, "bias"), f"{name}.bias"))


_LAYER = "model.layers.{layer}."
_QKV = ("attention", "qkv")
_TOP = (
    Entry(("embed", "tokens"), "model.embed_tokens.weight"),
    *_norm(("final_norm",), "model.norm"),
    Entry(("lm_head", "kernel"), "lm_head.weight", transpose=True),
)
_NORMS = (
    *_norm(("attention_norm",), _LAYER + "input_layernorm"),
    *_norm(("feedforward_norm",), _LAYER + "post_attention_layernorm"),
)
_OUT = _linear(("attention", "o"), _LAYER + "self_attn.o_proj")
_ATTENTION = (
    *_linear((*_QKV, "q"), _LAYER + "self_attn.q_proj"),
    *_linear((*_QKV, "k"), _LAYER + "self_attn.k_proj"),
    *_linear((*_QKV, "v"), _LAYER + "self_attn.v_proj"),
    *_OUT,
    Entry(("attention", "q_norm", "scale"), _LAYER + "self_attn.q_norm.weight"),
    Entry(("attention", "k_norm", "scale"), _LAYER + "self_attn.k_norm.weight"),
)
_DOWN = _linear(("feedforward", "down"), _LAYER + "mlp.down_proj")


def _gated(path: Path, name: str) -> tuple[Entry, ...]:
    return (
        *_linear((*path, "in", "gate"), f"{name}.gate_proj"),
        *_linear((*path, "in", "up"), f"{name}.up_proj"),
        *_linear((*path, "down"), f"{name}.down_proj"),
    )


_DENSE = _gated(("feedforward",), _LAYER + "mlp")


def _experts(name: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    path = ("feedforward", "experts")
    return (
        Entry((*path, "in", "gate", "kernel"), f"{name}.{{expert}}.{gate}.weight", transpose=True),
        Entry((*path, "in", "up", "kernel"), f"{name}.{{expert}}.{up}.weight", transpose=True),
        Entry((*path, "down", "kernel"), f"{name}.{{expert}}.{down}.weight", transpose=True),
    )


def _fused_experts(name: str) -> tuple[Entry, ...]:
    """As transformers holds experts in memory: gate and up in one [E, 2F, D] tensor."""
    path = ("feedforward", "experts")
    both = ("expert", "expert")
    return (
        Entry(
            (*path, "in", "gate", "kernel"),
            f"{name}.gate_up_proj",
            transpose=True,
            rows=Concatenated(both, 0),
            stacked=True,
        ),
        Entry(
            (*path, "in", "up", "kernel"),
            f"{name}.gate_up_proj",
            transpose=True,
            rows=Concatenated(both, 1),
            stacked=True,
        ),
        Entry((*path, "down", "kernel"), f"{name}.down_proj", transpose=True, stacked=True),
    )


_ROUTER = ("feedforward", "router", "kernel")
_MLP_ROUTER = Entry(_ROUTER, _LAYER + "mlp.gate.weight", transpose=True)
_MLP_EXPERTS = (
    _MLP_ROUTER,
    *_experts(_LAYER + "mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
_FUSED = _fused_experts(_LAYER + "mlp.experts")
_SHARED = ("feedforward", "shared")

_LLAMA = Family(_TOP + _NORMS + _ATTENTION + _DENSE)
_SPARSE = Family(_TOP + _NORMS + _ATTENTION + _DENSE + _MLP_EXPERTS, alternatives=_FUSED)

_PHI3_QKV = ("q", "kv", "kv")
_PHI3 = Family(
    _TOP
    + _NORMS
    + _linear((*_QKV, "q"), _LAYER + "self_attn.qkv_proj", Concatenated(_PHI3_QKV, 0))
    + _linear((*_QKV, "k"), _LAYER + "self_attn.qkv_proj", Concatenated(_PHI3_QKV, 1))
    + _linear((*_QKV, "v"), _LAYER + "self_attn.qkv_proj", Concatenated(_PHI3_QKV, 2))
    + _OUT
    + _linear(
        ("feedforward", "in", "gate"), _LAYER + "mlp.gate_up_proj", Concatenated(("mlp", "mlp"), 0)
    )
    + _linear(
        ("feedforward", "in", "up"), _LAYER + "mlp.gate_up_proj", Concatenated(("mlp", "mlp"), 1)
    )
    + _DOWN
)

_GEMMA2 = Family(
    _TOP
    + _norm(("attention_norm",), _LAYER + "input_layernorm")
    + _norm(("attention_post_norm",), _LAYER + "post_attention_layernorm")
    + _norm(("feedforward_norm",), _LAYER + "pre_feedforward_layernorm")
    + _norm(("feedforward_post_norm",), _LAYER + "post_feedforward_layernorm")
    + _ATTENTION
    + _DENSE
)

_MIXTRAL = Family(
    _TOP
    + _NORMS
    + _ATTENTION
    + (Entry(_ROUTER, _LAYER + "block_sparse_moe.gate.weight", transpose=True),)
    + _experts(_LAYER + "block_sparse_moe.experts", "w1", "w3", "w2"),
    alternatives=(_MLP_ROUTER, *_FUSED),
)

_QWEN2_MOE = Family(
    _SPARSE.entries
    + _gated(_SHARED, _LAYER + "mlp.shared_expert")
    + (
        Entry(
            ("feedforward", "shared_gate", "kernel"),
            _LAYER + "mlp.shared_expert_gate.weight",
            transpose=True,
        ),
    ),
    alternatives=_FUSED,
)

_MLA_PAIRS = RotaryPairs("rope", plain="nope")


def _deepseek_v2(queries: tuple[Entry, ...]) -> Family:
    return Family(
        _TOP
        + _NORMS
        + queries
        + _linear(
            ("attention", "down", "kv"),
            _LAYER + "self_attn.kv_a_proj_with_mqa",
            RotaryPairs("rope", plain="kv_rank"),
        )
        + _norm(("attention", "kv_norm"), _LAYER + "self_attn.kv_a_layernorm")
        + _linear(("attention", "kv_up"), _LAYER + "self_attn.kv_b_proj")
        + _OUT
        + _DENSE
        + _MLP_EXPERTS
        + _gated(_SHARED, _LAYER + "mlp.shared_experts"),
        alternatives=_FUSED,
    )


_DEEPSEEK_V2 = _deepseek_v2(
    _linear(("attention", "down", "q"), _LAYER + "self_attn.q_a_proj")
    + _norm(("attention", "q_norm"), _LAYER + "self_attn.q_a_layernorm")
    + _linear(("attention", "q_up"), _LAYER + "self_attn.q_b_proj", _MLA_PAIRS)
)
# The Lite models project queries without compressing them.
_DEEPSEEK_V2_LITE = _deepseek_v2(
    _linear(("attention", "down", "q"), _LAYER + "self_attn.q_proj", _MLA_PAIRS)
)

_GPT2_LAYER = "transformer.h.{layer}."
_GPT2_QKV = ("q", "kv", "kv")
_GPT2 = Family(
    (
        Entry(("embed", "tokens"), "transformer.wte.weight"),
        Entry(("embed", "positions"), "transformer.wpe.weight"),
        *_norm(("final_norm",), "transformer.ln_f"),
        Entry(("lm_head", "kernel"), "lm_head.weight", transpose=True),
    )
    + _norm(("attention_norm",), _GPT2_LAYER + "ln_1")
    + _norm(("feedforward_norm",), _GPT2_LAYER + "ln_2")
    + _conv1d((*_QKV, "q"), _GPT2_LAYER + "attn.c_attn", Concatenated(_GPT2_QKV, 0))
    + _conv1d((*_QKV, "k"), _GPT2_LAYER + "attn.c_attn", Concatenated(_GPT2_QKV, 1))
    + _conv1d((*_QKV, "v"), _GPT2_LAYER + "attn.c_attn", Concatenated(_GPT2_QKV, 2))
    + _conv1d(("attention", "o"), _GPT2_LAYER + "attn.c_proj")
    + _conv1d(("feedforward", "in", "up"), _GPT2_LAYER + "mlp.c_fc")
    + _conv1d(("feedforward", "down"), _GPT2_LAYER + "mlp.c_proj"),
    prefix="transformer.",
    ignorable=(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$",),
)

_NEOX_LAYER = "gpt_neox.layers.{layer}."
_GPT_NEOX = Family(
    (
        Entry(("embed", "tokens"), "gpt_neox.embed_in.weight"),
        *_norm(("final_norm",), "gpt_neox.final_layer_norm"),
        Entry(("lm_head", "kernel"), "embed_out.weight", transpose=True),
    )
    + _norm(("attention_norm",), _NEOX_LAYER + "input_layernorm")
    + _norm(("feedforward_norm",), _NEOX_LAYER + "post_attention_layernorm")
    + _linear((*_QKV, "q"), _NEOX_LAYER + "attention.query_key_value", PerHead(3, 0))
    + _linear((*_QKV, "k"), _NEOX_LAYER + "attention.query_key_value", PerHead(3, 1))
    + _linear((*_QKV, "v"), _NEOX_LAYER + "attention.query_key_value", PerHead(3, 2))
    + _linear(("attention", "o"), _NEOX_LAYER + "attention.dense")
    + _linear(("feedforward", "in", "up"), _NEOX_LAYER + "mlp.dense_h_to_4h")
    + _linear(("feedforward", "down"), _NEOX_LAYER + "mlp.dense_4h_to_h"),
    alternatives=(Entry(("lm_head", "kernel"), "lm_head.weight", transpose=True),),
    prefix="gpt_neox.",
    ignorable=(r"\.attention\.(bias|masked_bias)$", r"\.rotary_emb\.inv_freq$"),
    head="embed_out.weight",
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
    "mixtral": _MIXTRAL,
    "olmoe": _SPARSE,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _SPARSE,
    "deepseek_v2": _DEEPSEEK_V2,
}


def family_of(config: ModelConfig) -> Family:
    """The table of a config's family.

    Raises:
      ValueError: the family has no table.
    """
    if config.family not in FAMILIES:
        raise ValueError(
            f"family {config.family!r} has no checkpoint layout: expected one of "
            f"{sorted(FAMILIES)}."
        )
    if config.family == "deepseek_v2" and config.mla.q_rank is None:
        return _DEEPSEEK_V2_LITE
    return FAMILIES[config.family]


_BLK = "blk.{layer}."
_PAIRS = RotaryPairs("head")
GGUF_ENTRIES = (
    (
        Entry(("embed", "tokens"), "token_embd.weight"),
        *_norm(("final_norm",), "output_norm"),
        Entry(("lm_head", "kernel"), "output.weight", transpose=True),
    )
    + _norm(("attention_norm",), _BLK + "attn_norm")
    + _norm(("feedforward_norm",), _BLK + "ffn_norm")
    + _linear((*_QKV, "v"), _BLK + "attn_v")
    + _linear(("attention", "o"), _BLK + "attn_output")
    + _norm(("attention", "q_norm"), _BLK + "attn_q_norm")
    + _norm(("attention", "k_norm"), _BLK + "attn_k_norm")
    + _linear(("feedforward", "in", "gate"), _BLK + "ffn_gate")
    + _linear(("feedforward", "in", "up"), _BLK + "ffn_up")
    + _linear(("feedforward", "down"), _BLK + "ffn_down")
)


def _gguf(rows: Rows | None) -> Family:
    return Family(
        GGUF_ENTRIES
        + _linear((*_QKV, "q"), _BLK + "attn_q", rows)
        + _linear((*_QKV, "k"), _BLK + "attn_k", rows),
        prefix="",
        ignorable=(r"^rope_freqs\.weight$", r"\.attn_rot_embd$"),
        head="output.weight",
    )


# Only llama's converter interleaves rotary partners; the others keep halves.
GGUF_FAMILIES: dict[str, Family] = {
    "llama": _gguf(_PAIRS),
    "qwen2": _gguf(None),
    "qwen3": _gguf(None),
}
