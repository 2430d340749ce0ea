"""Checkpoints of Hugging Face layout (and GGUF files) to a config and sharded parameters."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.config import config_from_hf
from jaxllm.models.hf.errors import CheckpointError
from jaxllm.models.hf.named import resolve_model
from jaxllm.models.hf.names import Family, family_of
from jaxllm.models.hf.plan import check_tensors, check_tied_head, plan_leaves, without_prefix
from jaxllm.models.hf.safetensors_io import read_json
from jaxllm.models.hf.source import SafetensorsFolder, Source
from jaxllm.models.hf.stream import load_leaf
from jaxllm.models.parameters import abstract_params, logical_axes


def load_hf(
    path_or_hub_id: str | pathlib.Path,
    mesh: Mesh | None = None,
    *,
    dtype: str | None = None,
    rules: Mapping[str, Any] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads a model; nothing from the checkpoint is ever executed.

    Tensors are read one after the other straight into the shards of the devices. On the host a
    process holds beside the parameters at most two copies of the largest stored tensor, or
    `stream.SMALL_BYTES` where that is more, whatever the size of the model; a device holds beside
    its share at most two tensors. (GGUF: while a tensor is dequantised, a few copies of it.)

    Args:
      path_or_hub_id: a folder with config.json and safetensors files, a .gguf file, a name of
        `named.MODELS`, or a hub id ("owner/name", or "owner/name@revision").
      mesh: devices to lay the parameters out over; None = the default device.
      dtype: type of the parameters; None = the stored one. Computation uses the same type, unless
        `config_overrides` sets "compute_dtype".
      rules: mesh axes by logical axis name; None = `training.sharding.DEFAULT_RULES`.
      config_overrides: fields of `ModelConfig` to set after reading config.json.

    Returns:
      (config, parameters with layers stacked as in `parameters.init_params`).

    Raises:
      CheckpointError: whatever is wrong with the checkpoint: names the file and tensor, and what to
        do.
      UnsupportedModelError: its architecture or an option is not supported.
    """
    path = resolve_model(path_or_hub_id)
    source: Source
    if path.suffix == ".gguf":
        from jaxllm.models.hf.gguf import open_gguf

        config, family, source = open_gguf(path)
    else:
        config = _with_generation_stops(config_from_hf(read_json(path / "config.json")), path)
        family, source = family_of(config), SafetensorsFolder(path)
    try:
        return _load(config, family, source, mesh, dtype, rules, dict(config_overrides or {}))
    finally:
        source.close()


def _with_generation_stops(config: ModelConfig, folder: pathlib.Path) -> ModelConfig:
    """The config with the end-of-sequence tokens of generation_config.json, if there are any.

    Generation in transformers stops at these, which often are more than those of config.json (the
    end of a turn in a chat).
    """
    path = folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.exists() else None
    if stops is None:
        return config
    stops = stops if isinstance(stops, list) else [stops]
    if not all(isinstance(stop, int) and 0 <= stop < config.vocab_size for stop in stops):
        raise CheckpointError(
            f"{path} has eos_token_id {stops}, expected ids below {config.vocab_size}."
        )
    return config.replace(eos_token_ids=tuple(stops))


def _load(
    config: ModelConfig,
    family: Family,
    source: Source,
    mesh: Mesh | None,
    dtype: str | None,
    rules: Mapping[str, Any] | None,
    overrides: dict[str, Any],
) -> tuple[ModelConfig, dict[str, Any]]:
    names = set(source.names())
    if family.prefix and not any(name.startswith(family.prefix) for name in names):
        family = without_prefix(family)
    dtype = str(dtype or overrides.get("param_dtype") or _stored_dtype(family, source))
    try:
        config = config.replace(**{"param_dtype": dtype, "compute_dtype": dtype} | overrides)
    except TypeError as error:
        raise CheckpointError(f"config_overrides: {error}.") from error
    leaves = plan_leaves(config, family, names)
    check_tensors(config, family, leaves, source)
    if config.tie_embeddings:
        check_tied_head(family, leaves, source)
    params = abstract_params(config)
    shardings = _shardings(config, params, mesh, rules)
    arrays = [
        load_leaf(leaf, source, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return config, jax.tree.unflatten(jax.tree.structure(params), arrays)


def _stored_dtype(family: Family, source: Source) -> np.dtype:
    """Type of the token embeddings in the checkpoint."""
    embedding = next(e.name for e in family.entries if e.path == ("embed", "tokens"))
    stored = source.dtype(embedding) if embedding in source.names() else np.dtype(np.float32)
    return np.dtype(np.float32) if stored == np.float64 else stored


def _shardings(
    config: ModelConfig, params: Any, mesh: Mesh | None, rules: Mapping[str, Any] | None
) -> list[NamedSharding | None]:
    if mesh is None:
        return [None] * len(jax.tree.leaves(params))
    from jaxllm.training.sharding import named_shardings

    return jax.tree.leaves(named_shardings(params, logical_axes(config), mesh, rules))
