"""Device meshes, and how parameters and batches are laid out over them.

The rules that map logical axes to mesh axes are in `jaxllm.models.placement`. The decoder
constrains its activations with `flax.linen.with_logical_constraint`, which does nothing unless
`use(mesh, rules)` is active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.models.parameters import path_name
from jaxllm.models.placement import (
    DEFAULT_RULES,
    MESH_AXES,
    AnyMesh,
    Rules,
    active_spec,
    flax_rules,
    mesh_axes,
    partition_spec,
)
from jaxllm.training import distributed

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "AnyMesh",
    "MeshConfig",
    "Rules",
    "active_spec",
    "batch_sharding",
    "create_mesh",
    "mesh_axes",
    "named_shardings",
    "partition_spec",
    "replicated",
    "shard_batch",
    "use",
]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; one of them may be -1: whatever is left.

    Attributes:
      data: replicas of the parameters that see different rows.
      fsdp: shards of parameters (along the embedding) and of rows.
      tensor: shards of heads, hidden neurons and vocabulary.
      expert: shards of experts; dense layers use it for rows.
      context: shards of the sequence.
      across_slices: the axis that is laid over the network between slices, where the devices are of
        several TPU slices. Its traffic should be the least: "data" sums gradients once a step.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    across_slices: str = "data"

    def __post_init__(self) -> None:
        axes = {name: getattr(self, name) for name in MESH_AXES}
        for name, size in axes.items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh.{name}={size} must be positive, or -1 for what is left.")
        if self.across_slices not in MESH_AXES:
            raise ValueError(
                f"mesh.across_slices={self.across_slices!r} is unknown: expected one of "
                f"{MESH_AXES}."
            )
        filled = [name for name, size in axes.items() if size == -1]
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
    """A mesh over all devices (or the given ones), laid out for the hardware.

    Devices of one slice are ordered by `jax.make_mesh`. Those of several slices (by their
    `slice_index`) are ordered within each slice, and `config.across_slices` is laid over the
    slices, outermost.

    Raises:
      ValueError: the sizes do not fit the number of devices, or of slices.
    """
    config = config or MeshConfig()
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.sizes(len(devices))
    shape = tuple(sizes[name] for name in MESH_AXES)
    types = (AxisType.Auto,) * len(MESH_AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        try:
            return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)
        except NotImplementedError:
            # No product of whole axes of the torus has the size of some mesh axis (8 on 4x4x4).
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
            return Mesh(grid, MESH_AXES, axis_types=types)
    outer = config.across_slices
    if sizes[outer] % slices:
        raise ValueError(
            f"the devices are of {slices} slices: mesh.{outer}={sizes[outer]}, the axis across "
            f"slices, must be a multiple of {slices}."
        )
    inside = tuple(size // slices if n == outer else size for n, size in sizes.items())
    between = tuple(slices if name == outer else 1 for name in MESH_AXES)
    grid = mesh_utils.create_hybrid_device_mesh(
        inside, between, devices, allow_split_physical_axes=True
    )
    return Mesh(grid, MESH_AXES, axis_types=types)


@contextlib.contextmanager
def use(mesh: Mesh | None, rules: Rules | None = None) -> Iterator[None]:
    """Gives logical constraints in code that is traced inside this mesh and these rules."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh), nn.logical_axis_rules(flax_rules(rules)):
        yield


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
    shape: Sequence[int], mesh: Mesh, rules: Rules | None = None, *, blocks: int = 1
) -> NamedSharding:
    """Sharding of a batch array [B, T, ...]: rows over the batch axes, time over the context axis.

    `shape` is that of one of `blocks` equal parts of the rows.

    Raises:
      ValueError: the rows do not divide over the devices of the batch axes.
    """
    rules = DEFAULT_RULES if rules is None else rules
    whole = (shape[0] * blocks, *shape[1:])
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
      batch: tree of NumPy arrays [B, T, ...]; with several processes each gives the rows of its
        `distributed.row_block`.
      mesh: the mesh; None = the default device.
      rules: mesh axes by logical name.

    Returns:
      The tree as global arrays.
    """
    if mesh is None:
        return jax.device_put(batch)
    _, blocks = distributed.row_block(mesh, rules)

    def place(x: np.ndarray) -> jax.Array:
        sharding = batch_sharding(x.shape, mesh, rules, blocks=blocks)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(
            sharding, x, (x.shape[0] * blocks, *x.shape[1:])
        )

    return jax.tree.map(place, batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds everything."""
    return NamedSharding(mesh, PartitionSpec())


def _size(entry: str | tuple[str, ...] | None, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[name] for name in mesh_axes(entry))
