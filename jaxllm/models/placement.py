"""Where a computation is being traced for: the active mesh, and how logical axes lie on it.

Parameters and activations name their dimensions logically ("embed", "heads", "batch"); a dictionary
of rules says which mesh axes each name is split over. Training and evaluation steps activate a mesh
and rules by `jaxllm.training.sharding.use`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")

AnyMesh = Mesh | AbstractMesh
Rules = Mapping[str, str | tuple[str, ...] | None]

# Earlier rules win where two names of one array want the same mesh axis.
DEFAULT_RULES: Rules = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    "act_embed": None,
    "act_heads": "tensor",
    "act_kv_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
    "act_expert": "expert",
    # parameters
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    "embed": "fsdp",
    "latent": None,
    "positions": None,
    "norm": None,
    "layers": None,
}


def on_one_device() -> bool:
    """Whether no mesh is active, so that slicing and merging axes cannot move data between devices.

    Training and evaluation steps activate theirs by `jaxllm.training.sharding.use`.
    """
    return jax.sharding.get_abstract_mesh().empty


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str | None] | None,
    mesh: AnyMesh,
    rules: Rules | None = None,
) -> PartitionSpec:
    """The mesh axes of each dimension of an array whose dimensions are named `axes`.

    A mesh axis that does not divide a dimension (together with those before it in the rule) is
    dropped.

    Raises:
      ValueError: the number of names differs from the number of dimensions, a name has no rule, or
        a rule names an unknown mesh axis.
    """
    axes = tuple(axes or (None,) * len(shape))
    rules = DEFAULT_RULES if rules is None else rules
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} do not fit an array of shape {tuple(shape)}.")
    for name in axes:
        if name is not None and name not in rules:
            raise ValueError(f"no sharding rule for {name!r}: expected one of {sorted(rules)}.")
    spec = nn.logical_to_mesh_axes(axes, flax_rules(rules))
    return PartitionSpec(*(_dividing(n, entry, mesh) for n, entry in zip(shape, spec, strict=True)))


def active_spec(shape: Sequence[int], axes: Sequence[str | None]) -> PartitionSpec:
    """`partition_spec` for the mesh and rules of the surrounding `use`; empty outside of one.

    Mesh axes that a surrounding `shard_map` already handles by hand are left out.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), dict(nn.get_logical_axis_rules())
    if mesh.empty or not rules:
        return PartitionSpec()
    manual = set(mesh.manual_axes)

    spec = partition_spec(shape, axes, mesh, rules)
    return PartitionSpec(
        *(tuple(name for name in mesh_axes(entry) if name not in manual) or None for entry in spec)
    )


def free_axes() -> set[str]:
    """Axes of the active mesh that no surrounding `shard_map` handles by hand."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def mesh_axes(*entries: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that entries of a spec (or rules) name."""
    return tuple(
        name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry or ())
    )


def flax_rules(rules: Rules | None) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Rules in the form that `flax.linen.logical_axis_rules` takes; None = `DEFAULT_RULES`."""
    return tuple((DEFAULT_RULES if rules is None else rules).items())


def _dividing(size: int, entry: str | tuple[str, ...] | None, mesh: AnyMesh):
    """The longest prefix of a rule's mesh axes that divides a dimension, without axes of size 1."""
    kept: list[str] = []
    for name in mesh_axes(entry):
        if name not in mesh.shape:
            raise ValueError(f"a sharding rule names mesh axis {name!r}: the mesh has {MESH_AXES}.")
        if mesh.shape[name] == 1:
            continue
        if size % math.prod(mesh.shape[n] for n in (*kept, name)):
            break
        kept.append(name)
    return None if not kept else kept[0] if len(kept) == 1 else tuple(kept)
