"""Which stored tensors make up each parameter, and whether the checkpoint has exactly those."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.errors import CheckpointError
from jaxllm.models.hf.names import Entry, Family, Path
from jaxllm.models.hf.source import Source
from jaxllm.models.parameters import abstract_params, path_name


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and where its values are stored.

    Attributes:
      path: "layers/0/attention/qkv/q/kernel".
      shape: of the parameter; the stack axes (layers, experts) come first.
      dtype: of the parameter.
      entry: its line in the family's table.
      first_layer: global index of the first layer of its segment; None outside of the layers.
      experts: it has an expert axis (after the layer axis).
      total: number of stored outputs in the tensor; more than ours where tensors are fused.
      rows: stored output of each of ours; None = the same.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    entry: Entry
    first_layer: int | None
    experts: bool
    total: int
    rows: np.ndarray | None

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the stack axes."""
        return self.shape[: (self.first_layer is not None) + self.experts]

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape without the stack axes."""
        return self.shape[len(self.stack) :]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one stored tensor."""
        shape = (*self.matrix[:-1], self.total)
        shape = shape[::-1] if self.entry.transpose else shape
        return (self.stack[-1], *shape) if self.entry.stacked else shape

    def stored(self, position: tuple[int, ...]) -> tuple[str, int | None]:
        """Name of the tensor at a position of the stack axes, and its own expert index if any."""
        numbers = {}
        if self.first_layer is not None:
            numbers["layer"] = self.first_layer + position[0]
        if self.experts:
            numbers["expert"] = position[-1]
        return self.entry.name.format(**numbers), position[-1] if self.entry.stacked else None

    def positions(self) -> Iterator[tuple[int, ...]]:
        """All positions of the stack axes."""
        return np.ndindex(*self.stack)


def plan_leaves(config: ModelConfig, family: Family, present: set[str] | None = None) -> list[Leaf]:
    """One `Leaf` a parameter, in the order of `abstract_params(config)`'s leaves.

    Args:
      config: of the model.
      family: its table.
      present: names in the checkpoint, which decide between the table and its alternatives; None =
        the table.

    Raises:
      CheckpointError: the table has no line for a parameter.
    """
    tables: dict[Path, list[Entry]] = {}
    for entry in (*family.entries, *family.alternatives):
        tables.setdefault(entry.path, []).append(entry)
    leaves, starts, layer = [], [], 0
    params = abstract_params(config)
    for segment in params["layers"]:
        starts.append(layer)
        layer += jax.tree.leaves(segment)[0].shape[0]
    for keys, struct in jax.tree_util.tree_leaves_with_path(params):
        path = path_name(keys)
        parts: Path = tuple(path.split("/"))
        first_layer = None
        if parts[0] == "layers":
            first_layer, parts = starts[int(parts[1])], parts[2:]
        if parts not in tables:
            raise CheckpointError(f"family {config.family!r} has no stored name for {path!r}.")
        options = [_leaf(config, path, struct, entry, first_layer) for entry in tables[parts]]
        start = (0,) * len(options[0].stack)
        there = [o for o in options if present is not None and o.stored(start)[0] in present]
        leaves.append((there or options)[0])
    return leaves


def _leaf(
    config: ModelConfig, path: str, struct: Any, entry: Entry, first_layer: int | None
) -> Leaf:
    size = struct.shape[-1]
    return Leaf(
        path=path,
        shape=struct.shape,
        dtype=np.dtype(struct.dtype),
        entry=entry,
        first_layer=first_layer,
        experts="experts" in entry.path,
        total=size if entry.rows is None else entry.rows.total(config, size),
        rows=None if entry.rows is None else entry.rows.index(config, size),
    )


def without_prefix(family: Family) -> Family:
    """The table of a checkpoint of the bare model, whose names lack the family's prefix."""

    def strip(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(
            dataclasses.replace(e, name=e.name.removeprefix(family.prefix)) for e in entries
        )

    return dataclasses.replace(
        family, entries=strip(family.entries), alternatives=strip(family.alternatives)
    )


def check_tensors(config: ModelConfig, family: Family, leaves: list[Leaf], source: Source) -> None:
    """Compares the names and shapes of a checkpoint with what the config needs.

    Raises:
      CheckpointError: tensors are missing, left over or of another shape; names them.
    """
    needed = {leaf.stored(position)[0]: leaf for leaf in leaves for position in leaf.positions()}
    present = set(source.names())
    missing = [name for name in needed if name not in present]
    if missing:
        heads = [n for n in missing if needed[n].path == "lm_head/kernel"]
        if heads and len(missing) == len(heads):
            raise CheckpointError(
                f"the output head {heads[0]!r} is missing, but the config says that it is not "
                "tied to "
                'the embeddings: if it should be, pass config_overrides={"tie_embeddings": True}.'
            )
        raise CheckpointError(
            f"{len(missing)} tensors that a {config.family} model of this config needs are "
            "missing: "
            f"{_some(missing)}. The checkpoint is incomplete, or config.json is another model's."
        )
    extra = [
        name
        for name in sorted(present - set(needed))
        if not any(re.search(pattern, name) for pattern in family.ignorable)
        and not (config.tie_embeddings and name in (family.head, "lm_head.weight"))
    ]
    if extra:
        raise CheckpointError(
            f"{len(extra)} tensors have no place in a {config.family} model of this config: "
            f"{_some(extra)}. config.json is another model's, or has an option switched off."
        )
    for name, leaf in needed.items():
        if tuple(source.shape(name)) != leaf.stored_shape:
            raise CheckpointError(
                f"tensor {name!r} in {source.where(name)} has shape {list(source.shape(name))}, "
                f"expected {list(leaf.stored_shape)} for {leaf.path!r}."
            )
        source.dtype(name)


def check_tied_head(family: Family, leaves: list[Leaf], source: Source) -> None:
    """With tied embeddings, a stored head must repeat the embeddings.

    Raises:
      CheckpointError: it differs.
    """
    embedding = next(leaf for leaf in leaves if leaf.path == "embed/tokens").stored(())[0]
    for head in {family.head, "lm_head.weight"} & set(source.names()):
        same = source.shape(head) == source.shape(embedding)
        step = max(1, (1 << 24) // max(1, int(np.prod(source.shape(embedding)[1:]))))
        for start in range(0, source.shape(embedding)[0], step) if same else ():
            stop = min(start + step, source.shape(embedding)[0])
            stored = source.read(head, start, stop)
            if not np.array_equal(stored, source.read(embedding, start, stop)):
                same = False
                break
        if not same:
            raise CheckpointError(
                f"the config ties the output head to the embeddings, but {head!r} differs from "
                f"{embedding!r}: to use the stored head, pass "
                'config_overrides={"tie_embeddings": False}.'
            )


def _some(names: list[str], count: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:count])
    return shown + (f" and {len(names) - count} more" if len(names) > count else "")
