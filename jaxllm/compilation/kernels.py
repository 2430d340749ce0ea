"""The kernels of a traced program: their grids, and the bytes that their blocks move."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """One `pallas_call` of a traced program.

    Attributes:
      name: as given to `pallas_call`.
      grid: steps along each of its dimensions.
      blocks: shapes of the blocks of its operands and results, without ones.
      shared: whether the cores of a chip can share the grid.
      moved_bytes: between HBM and blocks: a block counts in each step that needs another one than
        the step before. None where that depends on values (scalar prefetch).
      claimed_bytes: of the kernel's own cost estimate; None = it has none.
      block_bytes: of two copies of its blocks, and of scratch.
    """

    name: str
    grid: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    shared: bool
    moved_bytes: int | None
    claimed_bytes: int | None
    block_bytes: int

    @property
    def steps(self) -> int:
        """Steps of the grid."""
        return math.prod(self.grid)


def calls(program: Any) -> list[Call]:
    """The kernels of what `jax.make_jaxpr` returns; not to be called while a mesh is set."""
    return [_call(eqn.params) for eqn in _pallas_calls(program.jaxpr)]


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _pallas_calls(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _call(params: dict[str, Any]) -> Call:
    mapping, options = params["grid_mapping"], params["compiler_params"]
    grid, estimate = tuple(mapping.grid), params["cost_estimate"]
    order = getattr(options, "dimension_semantics", None) or ()
    blocks = [block.transformed_block_aval for block in mapping.block_mappings]
    return Call(
        name=params["name"],
        grid=grid,
        blocks=tuple(tuple(n for n in block.shape if n != 1) for block in blocks),
        shared=any(
            str(getattr(kind, "value", kind)).lower() == "parallel" and size > 1
            for kind, size in zip(order, grid, strict=False)
        ),
        moved_bytes=None if mapping.num_index_operands else _moved(mapping, grid),
        claimed_bytes=None if estimate is None else estimate.bytes_accessed,
        block_bytes=sum(2 * _bytes(block) for block in blocks if not _stays(block))
        + sum(_bytes(scratch) for scratch in mapping.scratch_avals if not _stays(scratch)),
    )


def _moved(mapping: Any, grid: tuple[int, ...]) -> int:
    steps = np.unravel_index(np.arange(math.prod(grid), dtype=np.int32), grid) if grid else ()
    moved = 0
    for block in mapping.block_mappings:
        aval, whole = block.transformed_block_aval, block.array_aval
        if _stays(aval):  # The kernel copies parts of it by itself: once, as far as can be known.
            moved += whole.size * whole.dtype.itemsize
            continue
        changes = 1
        if steps:
            places = np.stack(jax.vmap(block.to_block_spec().index_map)(*steps))
            changes += int((places[:, 1:] != places[:, :-1]).any(axis=0).sum())
        moved += changes * _bytes(aval)
    return moved


def _stays(aval: Any) -> bool:
    """Whether an operand or scratch is no block in VMEM: left in HBM, or scalars, or semaphores."""
    space = str(getattr(aval, "memory_space", "")).lower()
    return any(kind in space for kind in ("any", "hbm", "smem", "semaphore"))


def _bytes(aval: Any) -> int:
    inner = getattr(aval, "inner_aval", aval)
    return inner.size * inner.dtype.itemsize
