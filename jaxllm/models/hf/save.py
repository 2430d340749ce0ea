"""Parameters to a folder that transformers loads."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.errors import CheckpointError
from jaxllm.models.hf.export import config_to_hf
from jaxllm.models.hf.names import family_of
from jaxllm.models.hf.plan import Leaf, plan_leaves
from jaxllm.models.hf.safetensors_io import DTYPES, INDEX, plan_shards, write_file
from jaxllm.models.host import to_host
from jaxllm.models.parameters import path_name
from jaxllm.models.segments import segment_length
from jaxllm.models.weights import Weight

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def save_hf(
    path: str | pathlib.Path,
    config: ModelConfig,
    params: dict[str, Any],
    *,
    max_shard_bytes: float = 5e9,
    dtype: str | None = None,
    tokenizer_from: str | pathlib.Path | None = None,
    dequantize: bool = False,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes a checkpoint of Hugging Face layout, one tensor at a time.

    The folder appears under its name when it is complete. With several processes all of them must
    call this; the first one writes.

    Args:
      path: the folder to create.
      config, params: the model; segments may be cut anywhere.
      max_shard_bytes: largest size of one file.
      dtype: of the stored tensors; None = the config's `param_dtype`.
      tokenizer_from: a folder whose tokenizer files are copied.
      dequantize: store what `Weight`s (quantised, low-rank, ...) stand for as plain arrays; without
        it they are refused, because their own form would be lost.
      overwrite: replace an existing folder.

    Returns:
      The path.

    Raises:
      CheckpointError: the parameters do not have the config's structure or shapes, or hold
        `Weight`s.
      FileExistsError: the folder exists.
      ValueError: the family cannot express the config.
    """
    path = pathlib.Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists already: choose another path, or pass overwrite=True."
        )
    stored = np.dtype(jax.numpy.dtype(dtype or config.param_dtype))
    if stored not in DTYPES.values():
        raise CheckpointError(
            f"dtype={dtype!r} cannot be stored: expected one of {sorted(DTYPES)}."
        )
    values = config_to_hf(config) | {"torch_dtype": stored.name}
    leaves = plan_leaves(config, family_of(config))
    read = _reader(config, params, leaves, dequantize)
    parts = _parts(leaves)
    sizes = {name: members[0][0].stored_shape for name, members in parts.items()}
    shards = plan_shards(
        ((n, int(np.prod(s, dtype=np.int64)) * stored.itemsize) for n, s in sizes.items()),
        max_shard_bytes,
    )

    def produce(name: str) -> np.ndarray:
        return _assemble(parts[name], read, stored)

    if jax.process_index() != 0:  # takes part in gathering what is spread over the processes
        for name in (n for names in shards.values() for n in names):
            produce(name)
    else:
        _write(path, values, shards, sizes, stored, produce, tokenizer_from)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"save_hf {path}")
    return path


def _write(
    path: pathlib.Path,
    values: dict[str, Any],
    shards: dict[str, list[str]],
    sizes: dict[str, tuple[int, ...]],
    stored: np.dtype,
    produce: Callable[[str], np.ndarray],
    tokenizer_from: str | pathlib.Path | None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for file, names in shards.items():
            write_file(partial / file, {name: (stored, sizes[name]) for name in names}, produce)
        if len(shards) > 1:
            total = sum(int(np.prod(s, dtype=np.int64)) * stored.itemsize for s in sizes.values())
            where = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if tokenizer_from is not None:
            _copy_tokenizer(pathlib.Path(tokenizer_from), partial)
        if path.exists():
            old = path.parent / f".{path.name}.old-{uuid.uuid4().hex[:8]}"
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old)
        else:
            os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{source} holds no tokenizer files: expected some of {_TOKENIZER_FILES}."
        )
    for file in found:
        shutil.copyfile(file, target / file.name)


Part = tuple[Leaf, tuple[int, ...]]
Read = Callable[[Leaf, tuple[int, ...]], np.ndarray]


def _parts(leaves: list[Leaf]) -> dict[str, list[Part]]:
    """Which parameters (at which layer and expert) make up each stored tensor, layer by layer."""
    order = [
        (-1 if leaf.first_layer is None else leaf.first_layer + position[0], leaf, position)
        for leaf in leaves
        for position in leaf.positions()
    ]
    parts: dict[str, list[Part]] = {}
    for _, leaf, position in sorted(order, key=lambda item: item[0]):
        parts.setdefault(leaf.stored(position)[0], []).append((leaf, position))
    return parts


def _assemble(parts: list[Part], read: Read, stored: np.dtype) -> np.ndarray:
    """One stored tensor from the parameters that lie in it."""
    out = np.empty(parts[0][0].stored_shape, stored)
    filled = 0
    for leaf, position in parts:
        values = read(leaf, position)
        rows = slice(None) if leaf.rows is None else leaf.rows
        filled += values.shape[-1]
        if leaf.entry.transpose or values.ndim == 1:
            out[rows] = values.T.astype(stored)
        else:
            out[:, rows] = values.astype(stored)
    if filled != parts[0][0].total:
        raise AssertionError(f"{parts[0][0].entry.name}: {filled} of {parts[0][0].total} outputs.")
    return out


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def _paths(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_weight)
    return {path_name(p): leaf for p, leaf in leaves}


def _reader(
    config: ModelConfig, params: dict[str, Any], leaves: list[Leaf], dequantize: bool
) -> Read:
    """Checks the parameters against the plan; gives access to one layer's (and expert's) values."""
    top = _paths({name: node for name, node in params.items() if name != "layers"})
    layers: list[tuple[dict[str, Any], int]] = []
    for segment in params["layers"]:
        paths = _paths(segment)
        layers.extend((paths, index) for index in range(segment_length(segment)))
    if len(layers) != config.num_layers:
        raise CheckpointError(
            f"the parameters hold {len(layers)} layers, the config {config.num_layers}."
        )

    def locate(leaf: Leaf, layer: int | None) -> tuple[dict[str, Any], str, int | None, str]:
        if layer is None:
            return top, leaf.path, None, leaf.path
        inner = leaf.path.split("/", 2)[2]
        return layers[layer][0], inner, layers[layer][1], f"layer {layer}: {inner}"

    expected: list[set[str]] = [set() for _ in layers]
    expected_top: set[str] = set()
    for leaf in leaves:
        if leaf.first_layer is None:
            expected_top.add(leaf.path)
        for layer in () if leaf.first_layer is None else range(leaf.stack[0]):
            expected[leaf.first_layer + layer].add(leaf.path.split("/", 2)[2])
    _compare("the parameters", set(top), expected_top)
    for layer, (paths, _) in enumerate(layers):
        _compare(f"layer {layer}", set(paths), expected[layer])

    def take(leaf: Leaf, layer: int | None) -> Any:
        tree, name, index, where = locate(leaf, layer)
        node = tree[name]
        if _is_weight(node):
            if not dequantize:
                raise CheckpointError(
                    f"{where} is a {type(node).__name__}: pass dequantize=True to store what it "
                    "stands "
                    "for as a plain array, or save it with the training checkpoints to keep its "
                    "form."
                )
            node = node if index is None else jax.tree.map(lambda x: x[index], node)
            return node.materialize()
        return node if index is None else node[index]

    for leaf in leaves:
        shape = leaf.shape if leaf.first_layer is None else leaf.shape[1:]
        for layer in (
            (None,)
            if leaf.first_layer is None
            else range(leaf.first_layer, leaf.first_layer + leaf.stack[0])
        ):
            found = jax.eval_shape(lambda: take(leaf, layer)).shape  # noqa: B023 (called at once)
            if found != shape:
                raise CheckpointError(
                    f"{locate(leaf, layer)[3]} has shape {found}, the config says {shape}: a model "
                    "whose widths were changed needs a config that says so."
                )

    def read(leaf: Leaf, position: tuple[int, ...]) -> np.ndarray:
        layer = None if leaf.first_layer is None else leaf.first_layer + position[0]
        values = take(leaf, layer)
        return to_host(values[position[-1]] if leaf.experts else values)

    return read


def _compare(what: str, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise CheckpointError(f"{what} lacks {missing[0]!r}, which the config asks for.")
    if extra := sorted(found - expected):
        raise CheckpointError(
            f"{what} has {extra[0]!r}, which the family's checkpoints have no place for."
        )
