"""Device meshes, logical axis rules, and how parameters and batches are laid out over them.

Parameters and activations name their dimensions logically ("embed", "heads", "batch"); a dictionary
of rules says which mesh axes each name is split over. The decoder constrains its activations with
`flax.linen.with_logical_constraint`, which does nothing unless `use(mesh, rules)` is active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.models.parameters import path_name

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


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; one of them may be -1: whatever is left.

    Attributes:
      data: replicas of the parameters that see different rows.
      fsdp: shards of parameters (along the embedding) and of rows.
      tensor: shards of heads, hidden neurons and vocabulary.
      expert: shards of experts; dense layers use it for rows.
      context: shards of the sequence.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh.{name}={size} must be positive, or -1 for what is left.")
        filled = [name for name, size in dataclasses.asdict(self).items() if size == -1]
        if len(filled) > 1:
            raise ValueError(f"only one mesh axis may be -1, got {filled}.")

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Axis sizes whose product is `num_devices`.

        Raises:
          ValueError: the sizes do not fit the number of devices.
        """
        sizes = {name: getattr(self, name) for name in MESH_AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        if -1 in sizes.values():
            if num_devices % fixed:
                raise ValueError(
                    f"the mesh ({asked}) needs a multiple of {fixed} devices, "
                    f"there are {num_devices}."
                )
            return {n: num_devices // fixed if s == -1 else s for n, s in sizes.items()}
        if fixed != num_devices:
            raise ValueError(f"the mesh ({asked}) needs {fixed} devices, there are {num_devices}.")
        return sizes


def create_mesh(
    config: MeshConfig | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over all devices (or the given ones), laid out for the hardware by `jax.make_mesh`.

    Raises:
      ValueError: the sizes do not fit the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (config or MeshConfig()).sizes(len(devices))
    shape = tuple(sizes[name] for name in MESH_AXES)
    types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)


@contextlib.contextmanager
def use(mesh: Mesh | None, rules: Rules | None = None) -> Iterator[None]:
    """Gives logical constraints in code that is traced inside this mesh and these rules."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh), nn.logical_axis_rules(_flax_rules(rules)):
        yield


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
    spec = nn.logical_to_mesh_axes(axes, _flax_rules(rules))
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


def mesh_axes(*entries: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that entries of a spec (or rules) name."""
    return tuple(
        name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry or ())
    )


def named_shardings(tree: Any, axes: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """A `NamedSharding` for every leaf of a parameter tree.

    Args:
      tree: parameters, or their `ShapeDtypeStruct`s.
      axes: logical axes in the structure of the tree, a `PartitionSpec` of names a leaf. Parameters
        with containers or with segments cut elsewhere have theirs from
        `models.parameters.logical_axes(config, params)`. None = everything is replicated.
      mesh: the mesh.
      rules: mesh axes by logical name; None = `DEFAULT_RULES`.

    Raises:
      ValueError: the trees do not match or a name is unknown, with the path of the parameter.
    """
    if axes is None:
        return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec()), tree)

    def place(path: tuple[Any, ...], leaf: Any, names: Any) -> NamedSharding:
        try:
            return NamedSharding(mesh, partition_spec(leaf.shape, names, mesh, rules))
        except ValueError as error:
            raise ValueError(f"{path_name(path)}: {error}") from error

    return jax.tree_util.tree_map_with_path(place, tree, axes)


def batch_sharding(
    shape: Sequence[int], mesh: Mesh, rules: Rules | None = None, *, processes: int = 1
) -> NamedSharding:
    """Sharding of a batch array [B, T, ...]: rows over the batch axes, time over the context axis.

    Raises:
      ValueError: the rows do not divide over the devices of the batch axes.
    """
    rules = DEFAULT_RULES if rules is None else rules
    whole = (shape[0] * processes, *shape[1:])
    names = ("batch", "length") + (None,) * len(shape)
    spec = partition_spec(whole, names[: len(shape)], mesh, rules)
    wanted = _size(rules["batch"], mesh)
    if _size(spec[0], mesh) != wanted:
        raise ValueError(
            f"a batch of {whole[0]} rows does not divide over the {wanted} devices of the mesh "
            f"axes {rules['batch']}: choose a multiple of {wanted}."
        )
    return NamedSharding(mesh, spec)


def shard_batch(batch: Any, mesh: Mesh | None, rules: Rules | None = None) -> Any:
    """Puts a host batch on the devices.

    Args:
      batch: tree of NumPy arrays [B, T, ...]; with several processes each gives its contiguous
        block of rows.
      mesh: the mesh; None = the default device.
      rules: mesh axes by logical name.

    Returns:
      The tree as global arrays.
    """
    if mesh is None:
        return jax.device_put(batch)
    processes = jax.process_count()

    def place(x: np.ndarray) -> jax.Array:
        sharding = batch_sharding(x.shape, mesh, rules, processes=processes)
        if processes == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(
            sharding, x, (x.shape[0] * processes, *x.shape[1:])
        )

    return jax.tree.map(place, batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds everything."""
    return NamedSharding(mesh, PartitionSpec())


def _flax_rules(rules: Rules | None) -> tuple[tuple[str, Any], ...]:
    return tuple((DEFAULT_RULES if rules is None else rules).items())


def _size(entry: str | tuple[str, ...] | None, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[name] for name in mesh_axes(entry))


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
