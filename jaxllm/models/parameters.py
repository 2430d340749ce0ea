"""The parameter tree of a config, declared once: shapes, logical axes and initial values.

Kernels are (in, out). Axis names: "vocab", "embed", "heads" (H * head_dim), "kv_heads" (K *
head_dim), "mlp", "expert", "positions", "latent", "norm", and "layers" for the axis over which a
segment is stacked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Axes
from jaxtyping import Array, PRNGKeyArray

from jaxllm.models.attention import LatentAttention
from jaxllm.models.config import ModelConfig
from jaxllm.models.moe import MoE
from jaxllm.models.segments import segment_length
from jaxllm.models.weights import Node


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical name of each axis, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "zeros", "ones"] = "normal"


def _linear(d_in: int, d_out: int, axes: tuple[str, str], bias: bool = False) -> dict[str, Any]:
    node = {"kernel": ParamSpec((d_in, d_out), axes)}
    return {**node, "bias": ParamSpec((d_out,), axes[1:], "zeros")} if bias else node


def _norm(config: ModelConfig, width: int | None = None) -> dict[str, ParamSpec]:
    width = config.embed_dim if width is None else width
    node = {"scale": ParamSpec((width,), ("norm",), "zeros" if config.norm_unit_offset else "ones")}
    if config.norm == "layernorm":
        node["bias"] = ParamSpec((width,), ("norm",), "zeros")
    return node


def _rms(width: int) -> dict[str, ParamSpec]:
    return {"scale": ParamSpec((width,), ("norm",), "ones")}


def _attention(config: ModelConfig) -> dict[str, Any]:
    width, head = config.embed_dim, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    bias = config.attention_bias
    node: dict[str, Any] = {
        "qkv": {
            "q": _linear(width, q, ("embed", "heads"), bias),
            "k": _linear(width, kv, ("embed", "kv_heads"), bias),
            "v": _linear(width, kv, ("embed", "kv_heads"), bias),
        },
        "o": _linear(q, width, ("heads", "embed"), config.attention_out_bias),
    }
    if config.qk_norm is not None:
        whole = config.qk_norm == "whole"
        node["q_norm"] = _rms(q if whole else head)
        node["k_norm"] = _rms(kv if whole else head)
    return node


def _latent_attention(config: ModelConfig) -> LatentAttention:
    mla, width, heads = config.mla, config.embed_dim, config.num_heads
    q = heads * config.head_dim
    bias, compressed = config.attention_bias, mla.q_rank is not None
    return LatentAttention(
        down={
            "q": _linear(width, mla.q_rank, ("embed", "latent"), bias)
            if compressed
            else _linear(width, q, ("embed", "heads")),
            "kv": _linear(width, mla.kv_rank + mla.rope_dim, ("embed", "latent"), bias),
        },
        kv_norm=_rms(mla.kv_rank),
        kv_up=_linear(mla.kv_rank, heads * (mla.nope_dim + mla.value_dim), ("latent", "heads")),
        o=_linear(heads * mla.value_dim, width, ("heads", "embed"), config.attention_out_bias),
        q_norm=_rms(mla.q_rank) if compressed else None,
        q_up=_linear(mla.q_rank, q, ("latent", "heads")) if compressed else None,
    )


def _feedforward(config: ModelConfig, hidden: int) -> dict[str, Any]:
    width, bias = config.embed_dim, config.mlp_bias
    names = ("gate", "up") if config.gated else ("up",)
    return {
        "in": {name: _linear(width, hidden, ("embed", "mlp"), bias) for name in names},
        "down": _linear(hidden, width, ("mlp", "embed"), bias),
    }


def _mixture(config: ModelConfig) -> MoE:
    moe = config.moe

    def per_expert(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(
            spec, shape=(moe.num_experts, *spec.shape), axes=("expert", *spec.axes)
        )

    router = {"kernel": ParamSpec((config.embed_dim, moe.num_experts), ("embed", "expert"))}
    if moe.selection_bias:
        router["bias"] = ParamSpec((moe.num_experts,), ("expert",), "zeros")
    return MoE(
        router=router,
        experts=jax.tree.map(per_expert, _feedforward(config, moe.expert_dim)),
        shared=_feedforward(config, moe.shared_dim) if moe.shared_dim else None,
        shared_gate=_linear(config.embed_dim, 1, ("embed", "norm")) if moe.shared_gate else None,
    )


def layer_specs(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Declaration of one layer."""
    node = {
        "attention_norm": _norm(config),
        "attention": _attention(config) if config.mla is None else _latent_attention(config),
        "feedforward_norm": _norm(config),
        "feedforward": _mixture(config)
        if config.is_sparse(layer)
        else _feedforward(config, config.mlp_dim),
    }
    if config.post_norms:
        node["attention_post_norm"] = _norm(config)
        node["feedforward_post_norm"] = _norm(config)
    return node


def parameter_specs(config: ModelConfig) -> dict[str, Any]:
    """Declaration of all parameters; "layers" is a tuple with one tree a layer, not yet stacked."""
    width = config.embed_dim
    specs: dict[str, Any] = {
        "embed": {"tokens": ParamSpec((config.vocab_size, width), ("vocab", "embed"))},
        "layers": tuple(layer_specs(config, layer) for layer in range(config.num_layers)),
        "final_norm": _norm(config),
    }
    if config.positions == "learned":
        shape = (config.max_positions, width)
        specs["embed"]["positions"] = ParamSpec(shape, ("positions", "embed"))
    if not config.tie_embeddings:
        specs["lm_head"] = _linear(width, config.vocab_size, ("embed", "vocab"))
    return specs


def _build(
    config: ModelConfig, make: Callable[[list[str], ParamSpec, bool], Any]
) -> dict[str, Any]:
    """Maps make(paths, spec, stacked) over the declaration, runs of equal layers stacked.

    A stacked parameter has one path a layer.
    """
    specs = parameter_specs(config)

    def build(tree: Any, prefixes: list[str], stacked: bool) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, spec: make([p + path_name(path) for p in prefixes], spec, stacked), tree
        )

    segments = []
    for layer, run in itertools.groupby(range(config.num_layers), key=specs["layers"].__getitem__):
        segments.append(build(layer, [f"layers/{index}/" for index in run], True))
    rest = {
        name: build(node, [f"{name}/"], False) for name, node in specs.items() if name != "layers"
    }
    return {**rest, "layers": tuple(segments)}


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: PRNGKeyArray) -> dict[str, Any]:
    """Random parameters in the config's parameter type.

    Every parameter of every layer has a key of its own, folded from its path, so that its value
    depends neither on how layers are stacked nor on how many devices there are.
    """
    dtype = jnp.dtype(config.param_dtype)

    def make(paths: list[str], spec: ParamSpec, stacked: bool) -> Array:
        if spec.init != "normal":
            shape = (len(paths), *spec.shape) if stacked else spec.shape
            return getattr(jnp, spec.init)(shape, dtype)
        names = jnp.asarray([zlib.crc32(path.encode()) for path in paths], jnp.uint32)
        keys = jax.vmap(lambda name: jax.random.fold_in(key, name))(names)
        values = jax.vmap(lambda own: jax.random.normal(own, spec.shape))(keys)
        return (config.initializer_range * (values if stacked else values[0])).astype(dtype)

    return _build(config, make)


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """`jax.ShapeDtypeStruct`s of the parameters, layers stacked."""
    dtype = jnp.dtype(config.param_dtype)

    def make(paths: list[str], spec: ParamSpec, stacked: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(paths), *spec.shape) if stacked else spec.shape, dtype)

    return _build(config, make)


def path_name(path: tuple[Any, ...]) -> str:
    """ "layers/0/attention/qkv/q/kernel" for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def count_params(params: Any) -> int:
    """Number of values in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def logical_axes(config: ModelConfig, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Logical axes of every leaf, as `PartitionSpec`s of axis names, in the parameters' structure.

    Args:
      config: the model's.
      params: parameters whose segments may be cut elsewhere and that may hold `Node`s in place of
        arrays; None = those of `init_params`.
    """
    base = jax.tree.map(lambda spec: Axes(*spec.axes), parameter_specs(config))
    params = abstract_params(config) if params is None else params
    segments, start = [], 0
    for segment in params["layers"]:
        segments.append(
            jax.tree.map(
                lambda axes: Axes("layers", *axes), _axes_of(segment, base["layers"][start])
            )
        )
        start += segment_length(segment)
    rest = {name: _axes_of(node, base[name]) for name, node in params.items() if name != "layers"}
    return {**rest, "layers": tuple(segments)}


def _axes_of(node: Any, base: Any) -> Any:
    """The axes of a node, asking it where it stands for something else than the declaration."""
    if isinstance(node, Node) and type(node) is not type(base):
        return node.axes(base)
    if isinstance(node, Mapping):
        return {name: _axes_of(child, base[name]) for name, child in node.items()}
    if isinstance(node, Node):
        members = {
            name: _axes_of(getattr(node, name), getattr(base, name))
            for name in node.field_names(static=False)
        }
        return node.replace(**members)
    return base
