"""Static description of a decoder: one frozen dataclass for every supported family."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_NORMS = ("rmsnorm", "layernorm")
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_QK_NORMS = (None, "head", "whole")
_POSITIONS = ("rope", "learned")
_REMAT = ("none", "all_dots", "dots", "full")
_SCORINGS = ("softmax", "sigmoid")
_EXECUTIONS = ("auto", "grouped", "every")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    _require(value in allowed, f"{name}={value!r} is not supported: expected one of {allowed}.")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding and its context extension, with the meaning of HF `rope_scaling`.

    Attributes:
      type: which rescaling of the frequencies.
      theta: base b of the frequencies b^(-2i/d).
      partial: fraction of the head dimension that is rotated (the first dimensions).
      factor: context extension s (linear, dynamic, yarn, llama3; longrope uses it for the
        temperature).
      original_max_positions: context length of pre-training, from which the extension starts.
      attention_factor: multiplier of cos and sin; None = the default of the type.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      low_freq_factor, high_freq_factor: llama3.
      short_factor, long_factor: longrope, one value per rotated pair.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    partial: float = 1.0
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _one_of("rope.type", self.type, _ROPE_TYPES)
        _require(self.theta > 0, f"rope.theta={self.theta} must be positive.")
        _require(0 < self.partial <= 1, f"rope.partial={self.partial} must lie in (0, 1].")
        _require(self.factor >= 1, f"rope.factor={self.factor} must be at least 1.")
        if self.type in ("dynamic", "yarn", "llama3", "longrope"):
            _require(
                self.original_max_positions is not None,
                f"rope.type={self.type!r} needs rope.original_max_positions.",
            )
        if self.type == "longrope":
            _require(
                self.short_factor is not None and self.long_factor is not None,
                "rope.type='longrope' needs rope.short_factor and rope.long_factor.",
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of the dense feed-forward.

    Attributes:
      num_experts, experts_per_token, expert_dim: E, K and the hidden width of one expert.
      scoring: how router logits become scores: over all experts, before the top K are taken.
      normalize_top_k: divide the K chosen scores by their sum.
      routed_scale: factor on the routed output.
      shared_dim: hidden width of the always-active shared expert; 0 = none.
      shared_gate: the shared expert is multiplied by a sigmoid gate of the token (Qwen2-MoE).
      selection_bias: the router has a bias that acts on the choice only (DeepSeek-V3's balancing).
      num_groups, groups_per_token: choose K experts only within the best groups (DeepSeek-V2).
      sparse_layers: which layers are mixtures; None = all.
      execution: how experts run: "grouped" on the tokens that chose them (plain arrays only; first
        derivatives in reverse mode), "every" one on every token (any weights, any derivatives),
        or "auto", whichever is faster where both can be.
      bias_update_rate: after every training step the selection bias of each expert moves by this
        much towards equal load, by `jaxllm.training.balance` (arXiv:2408.15664); 0 = it stays.
    """

    num_experts: int
    experts_per_token: int
    expert_dim: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    routed_scale: float = 1.0
    shared_dim: int = 0
    shared_gate: bool = False
    selection_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    sparse_layers: tuple[bool, ...] | None = None
    execution: Literal["auto", "grouped", "every"] = "auto"
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        _one_of("moe.scoring", self.scoring, _SCORINGS)
        _one_of("moe.execution", self.execution, _EXECUTIONS)
        _require(
            self.bias_update_rate == 0 or (self.bias_update_rate > 0 and self.selection_bias),
            f"moe.bias_update_rate={self.bias_update_rate} must be 0, or positive with "
            "moe.selection_bias.",
        )
        _require(
            1 <= self.experts_per_token <= self.num_experts,
            f"moe.experts_per_token={self.experts_per_token} must lie in "
            f"[1, num_experts={self.num_experts}].",
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"moe.num_experts={self.num_experts} is not divisible by "
            f"moe.num_groups={self.num_groups}.",
        )
        reachable = self.groups_per_token * (self.num_experts // self.num_groups)
        _require(
            self.groups_per_token <= self.num_groups and reachable >= self.experts_per_token,
            f"moe.groups_per_token={self.groups_per_token} of {self.num_groups} groups leaves "
            f"{reachable} experts, fewer than experts_per_token={self.experts_per_token}.",
        )


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
      kv_rank, q_rank: widths of the compressed key/value and query (None: queries uncompressed).
      nope_dim, rope_dim, value_dim: per-head widths of the plain part, the rotated part, the value.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything static about a decoder; the defaults describe a Llama.

    Attributes:
      family: Hugging Face `model_type`, which decides names and layout on disk.
      vocab_size, embed_dim, num_layers: V, D, L.
      num_heads, num_kv_heads, head_dim: H, K (defaults to H), hd (defaults to D / H;
        with latent attention it is the width of a key).
      mlp_dim: hidden width F of the dense feed-forward.
      max_positions: longest sequence the checkpoint was made for.
      norm, norm_eps: kind of normalisation and its epsilon.
      norm_unit_offset: RMSNorm multiplies by 1 + scale (Gemma).
      activation, gated: non-linearity, and whether the feed-forward is act(gate) * up.
      attention_bias, attention_out_bias, mlp_bias: which linears have biases.
      qk_norm: RMSNorm of queries and keys, per "head" (Qwen3) or over the "whole" width (OLMoE).
      parallel_residual: attention and feed-forward read the same stream (GPT-NeoX).
      post_norms: the outputs of both halves are normalised too (Gemma-2).
      positions: rotary or learned absolute positions.
      attention_scale: factor on q.k; None = head_dim^-0.5.
      attention_softcap, logit_softcap: c in c * tanh(x / c); None = off.
      windows: per layer, how many positions (itself included) a token sees; None = all.
      embed_scale: factor on token embeddings (Gemma: sqrt(D)).
      clip_qkv: clamp of queries, keys and values after their norm (OLMoE); None = off.
      moe, mla: mixture of experts, latent attention; None = off.
      param_dtype, compute_dtype: storage of parameters; inputs of matrix products. Norms, softmax,
        router and logits are float32 always, products accumulate in float32.
      remat: what the backward pass of a layer recomputes: nothing; all but matrix products; also
        the products of attention; everything.
      initializer_range: standard deviation of random initial weights.
      bos_token_id, eos_token_ids, pad_token_id: as the checkpoint states them.
    """

    family: str = "llama"
    vocab_size: int = 32000
    embed_dim: int = 288
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int = 768
    max_positions: int = 2048
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    norm_unit_offset: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    parallel_residual: bool = False
    post_norms: bool = False
    positions: Literal["rope", "learned"] = "rope"
    rope: RopeConfig = RopeConfig()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] | None = None
    embed_scale: float = 1.0
    clip_qkv: float | None = None
    tie_embeddings: bool = False
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: Literal["none", "all_dots", "dots", "full"] = "none"
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.mla is not None:
            object.__setattr__(self, "head_dim", self.mla.nope_dim + self.mla.rope_dim)
        if self.head_dim is None:
            _require(
                self.embed_dim % self.num_heads == 0,
                f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}: "
                "give head_dim.",
            )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        for name in (
            "vocab_size",
            "embed_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_positions",
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and value > 0,
                f"{name}={value!r} must be a positive integer.",
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}.",
        )
        _one_of("norm", self.norm, _NORMS)
        _one_of("activation", self.activation, _ACTIVATIONS)
        _one_of("qk_norm", self.qk_norm, _QK_NORMS)
        _one_of("positions", self.positions, _POSITIONS)
        _one_of("remat", self.remat, _REMAT)
        for name in ("param_dtype", "compute_dtype"):
            value = getattr(self, name)
            _require(
                jnp.issubdtype(jnp.dtype(value), jnp.floating),
                f"{name}={value!r} must be a floating-point type.",
            )
        for name, per_layer in (
            ("windows", self.windows),
            ("moe.sparse_layers", self.moe.sparse_layers if self.moe else None),
        ):
            _require(
                per_layer is None or len(per_layer) == self.num_layers,
                f"{name} must have one entry per layer ({self.num_layers}): got {per_layer}.",
            )
        pairs = self.rotary_dim // 2
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            _require(
                factors is None or len(factors) == pairs,
                f"rope.{name} must have one value per rotated pair ({pairs}): "
                f"got {len(factors or ())}.",
            )

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that are rotated (even)."""
        if self.mla is not None:
            return self.mla.rope_dim
        return int(self.head_dim * self.rope.partial) // 2 * 2

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` is a mixture of experts."""
        if self.moe is None:
            return False
        return self.moe.sparse_layers is None or self.moe.sparse_layers[layer]

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed (validated again)."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe nested dictionary; `from_dict` undoes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Builds a config from `to_dict` (or parsed JSON); unknown keys are refused by name."""
        nested = {"rope": RopeConfig, "moe": MoEConfig, "mla": MLAConfig}
        values = dict(values)
        for name, kind in nested.items():
            if values.get(name) is not None:
                values[name] = _from_fields(kind, values[name], prefix=f"{name}.")
        return _from_fields(cls, values, prefix="")


def _from_fields(kind: type, values: dict[str, Any], prefix: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    _require(
        not unknown,
        f"unknown model option {prefix + unknown[0] if unknown else ''!r}: "
        f"expected one of {sorted(known)}.",
    )
    frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**frozen)
