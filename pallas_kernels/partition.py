"""Kernels inside `jit` over a mesh: every device runs the kernel on its part of the arrays.

XLA cannot cut a kernel by itself. An operation names the dimensions of its arrays by a rule like
that of an einsum, "m k, k n -> m n", and a caller says over which axes of the mesh they lie, as in
`{"m": "data", "n": "tensor"}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

# Names of dimensions -> mesh axes that they are cut over.
Partition = Mapping[str, str | tuple[str, ...] | None]


def free_axes() -> tuple[str, ...]:
    """Axes of the active mesh with more than one device that no `shard_map` around handles."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in mesh.axis_names if n not in mesh.manual_axes and mesh.shape[n] > 1)


def over_mesh(
    name: str,
    function: Callable[..., Any],
    rule: str,
    partition: Partition,
    *,
    whole: Sequence[str] = (),
    summed: Sequence[str] = (),
) -> Callable[..., Any]:
    """`function` of local arrays as a function of global ones, by `jax.shard_map`.

    Args:
      name: of the operation, for messages.
      function: computes an array or a tuple of arrays.
      rule: dimensions of the arguments and results; a name that occurs several times is cut in the
        same way everywhere.
      partition: the mesh axes of the names; those left out are not cut.
      whole: names that must not be cut.
      summed: names of arguments only, over which partial results are added.

    Raises:
      ValueError: partition names an unknown dimension or mesh axis, uses a mesh axis twice, cuts
        what must stay whole, or does not divide a dimension.
    """
    inputs, outputs = ([part.split() for part in side.split(",")] for side in rule.split("->"))
    mesh = jax.sharding.get_abstract_mesh()
    axes = {
        key: (entry,) if isinstance(entry, str) else entry or () for key, entry in partition.items()
    }
    known = {key for names in inputs for key in names}
    for key, entry in axes.items():
        if key not in known or (entry and key in whole):
            can = sorted(known - set(whole))
            raise ValueError(f"{name}: cannot cut {key!r}: expected dimensions among {can}.")
        if unknown := set(entry) - set(mesh.axis_names):
            raise ValueError(
                f"{name}: partition of {key!r} names mesh axes {sorted(unknown)}: the mesh has "
                f"{mesh.axis_names}."
            )
    used = [axis for entry in axes.values() for axis in entry]
    if len(used) != len(set(used)):
        raise ValueError(f"{name}: partition {dict(partition)} uses a mesh axis twice.")
    added = tuple(axis for key in summed for axis in axes.get(key, ()))

    def local(*parts):
        result = function(*parts)
        return jax.lax.psum(result, added) if added else result

    def spec(names):
        return PartitionSpec(*(axes.get(key) or None for key in names))

    def call(*arguments):
        for names, argument in zip(inputs, arguments, strict=True):
            for key, size in zip(names, argument.shape, strict=True):
                parts = math.prod(mesh.shape[axis] for axis in axes.get(key, ()))
                if size % parts:
                    raise ValueError(
                        f"{name}: dimension {key!r} of size {size} cannot be cut into {parts} over "
                        f"mesh axes {axes[key]}."
                    )
        out_specs = tuple(spec(names) for names in outputs)
        mapped = jax.shard_map(
            local,
            in_specs=tuple(spec(names) for names in inputs),
            out_specs=out_specs if len(out_specs) > 1 else out_specs[0],
            # A kernel says nothing of which axes its results vary over.
            check_vma=False,
        )
        return mapped(*arguments)

    return call
