"""Stored tensors to sharded parameters, one tensor at a time.

A parameter smaller than `SMALL_BYTES` is put together on the host. A larger one is allocated on the
devices and filled tensor by tensor: each process reads the rows that its devices hold of one
layer's (or one expert's) tensor, and the devices transpose, cast and write them into place. On the
host there is never more than one tensor (a second copy while rows are reordered), or SMALL_BYTES.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.models.hf.errors import CheckpointError
from jaxllm.models.hf.plan import Leaf
from jaxllm.models.hf.source import Source

SMALL_BYTES = 1 << 25

Index = tuple[slice, ...]


def load_leaf(leaf: Leaf, source: Source, sharding: NamedSharding | None) -> jax.Array:
    """Reads one parameter into its shards.

    Args:
      leaf: the parameter.
      source: the checkpoint.
      sharding: of the parameter; None = the default device.

    Raises:
      CheckpointError: the values are not finite; names the tensor.
    """
    size = int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize
    if size <= SMALL_BYTES:
        return _on_host(leaf, source, sharding)
    return _on_device(leaf, source, sharding)


def _bounds(index: slice, size: int) -> tuple[int, int]:
    start, stop, _ = index.indices(size)
    return start, stop


def _take(array: np.ndarray, rows: np.ndarray, axis: int) -> np.ndarray:
    """Selects rows; without a copy where they are consecutive."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        window = slice(int(rows[0]), int(rows[0]) + len(rows))
        return array[window] if axis == 0 else array[..., window]
    return np.take(array, rows, axis=axis)


def read_slab(
    leaf: Leaf,
    source: Source,
    position: tuple[int, ...],
    index: Index,
    cache: dict[tuple[str, int, int], np.ndarray] | None = None,
) -> np.ndarray:
    """A part of one stored tensor: our outputs in our order, in the stored orientation.

    Args:
      leaf: the parameter.
      source: the checkpoint.
      position: on the stack axes.
      index: ranges of the parameter's own axes (the matrix), in our orientation.
      cache: keeps what was read, for parts that share rows.
    """
    name, expert = leaf.stored(position)
    start, stop = _bounds(index[-1], leaf.matrix[-1])
    rows = np.arange(start, stop) if leaf.rows is None else leaf.rows[start:stop]
    inputs = _bounds(index[0], leaf.matrix[0])
    outputs_first = leaf.entry.transpose or len(leaf.matrix) == 1
    if outputs_first:
        low, high = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
    else:
        low, high = inputs
    if expert is not None:
        array = _read(source, name, expert, expert + 1, cache)[0][low:high]
    else:
        array = _read(source, name, low, high, cache)
    if not outputs_first:
        return _take(array, rows, -1)
    array = _take(array, rows - low, 0)
    return array[:, inputs[0] : inputs[1]] if array.ndim == 2 else array


def _read(source, name, start, stop, cache):
    if cache is None:
        return source.read(name, start, stop)
    key = (name, start, stop)
    if key not in cache:
        cache[key] = source.read(name, start, stop)
    return cache[key]


def _not_finite(leaf: Leaf, source: Source, position: tuple[int, ...]) -> CheckpointError:
    name, _ = leaf.stored(position)
    return CheckpointError(
        f"tensor {name!r} in {source.where(name)} holds NaN or infinite values (as {leaf.dtype}): "
        "the "
        "file is corrupt, or the type too narrow for it."
    )


def _on_host(leaf: Leaf, source: Source, sharding: NamedSharding | None) -> jax.Array:
    depth = len(leaf.stack)

    def part(index: Index) -> np.ndarray:
        ranges = [range(*_bounds(i, n)) for i, n in zip(index, leaf.stack, strict=False)]
        matrix = [_bounds(i, n) for i, n in zip(index[depth:], leaf.matrix, strict=True)]
        out = np.empty((*map(len, ranges), *(stop - start for start, stop in matrix)), leaf.dtype)
        for place in np.ndindex(*out.shape[:depth]):
            position = tuple(r[i] for r, i in zip(ranges, place, strict=True))
            slab = read_slab(leaf, source, position, index[depth:])
            with np.errstate(over="ignore"):  # reported by name, next
                out[place] = slab.T if leaf.entry.transpose else slab
            if not np.isfinite(out[place]).all():
                raise _not_finite(leaf, source, position)
        return out

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(leaf.shape)))
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def shared(index: Index) -> np.ndarray:  # devices that hold the same part share its memory
        key = tuple(_bounds(i, n) for i, n in zip(index, leaf.shape, strict=True))
        if key not in parts:
            parts[key] = part(index)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, sharding, shared)


def _on_device(leaf: Leaf, source: Source, sharding: NamedSharding | None) -> jax.Array:
    depth, transpose = len(leaf.stack), leaf.entry.transpose
    shard = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    # One tensor of every shard of the stack axes is placed at a time: `counts` of them.
    counts = tuple(n // s for n, s in zip(leaf.stack, shard, strict=False))
    matrix = leaf.matrix[::-1] if transpose else leaf.matrix
    placed = None if sharding is None else _piece_sharding(sharding, depth, transpose)
    place = _placer(leaf.shape, leaf.dtype, depth, transpose, sharding)
    buffer = _zeros(leaf.shape, leaf.dtype, sharding) if depth else None
    for offset in itertools.product(*(range(s) for s in shard[:depth])):
        read = _piece_reader(leaf, source, offset, shard)
        if placed is None:
            piece = jnp.asarray(read((slice(0, 1),) * depth + (slice(None),) * len(matrix)))
        else:
            piece = jax.make_array_from_callback((*counts, *matrix), placed, read)
        buffer, finite = place(buffer, piece, jnp.asarray(offset, jnp.int32))
        del piece, read
        if not bool(finite):  # also waits, so that host memory is free before the next tensor
            raise _not_finite(leaf, source, offset)
    return buffer


def _piece_reader(leaf: Leaf, source: Source, offset: tuple[int, ...], shard: tuple[int, ...]):
    """Callback for the pieces (one a shard of the stack axes) at one offset within the shards."""
    depth = len(leaf.stack)
    cache: dict[tuple[str, int, int], np.ndarray] = {}

    def read(index: Index) -> np.ndarray:
        position = tuple(
            (i.start or 0) * s + o for i, s, o in zip(index[:depth], shard, offset, strict=False)
        )
        matrix = index[depth:][::-1] if leaf.entry.transpose else index[depth:]
        slab = read_slab(leaf, source, position, matrix, cache)
        if slab.dtype == np.float64:
            slab = slab.astype(np.float32)
        return slab.reshape((1,) * depth + slab.shape)

    return read


def _piece_sharding(sharding: NamedSharding, depth: int, transpose: bool) -> NamedSharding:
    stack, matrix = sharding.spec[:depth], sharding.spec[depth:]
    return NamedSharding(sharding.mesh, P(*stack, *(matrix[::-1] if transpose else matrix)))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding | None) -> jax.Array:
    make = functools.partial(jnp.zeros, shape, dtype)
    return make() if sharding is None else jax.jit(make, out_shardings=sharding)()


@functools.lru_cache(maxsize=64)
def _placer(
    shape: tuple[int, ...],
    dtype: np.dtype,
    depth: int,
    transpose: bool,
    sharding: NamedSharding | None,
) -> Callable[..., Any]:
    """Compiled (buffer, piece, offset) -> (buffer with the piece in place, is it finite)."""

    def write(buffer: jax.Array, piece: jax.Array, offset: jax.Array) -> jax.Array:
        starts = [offset[i] for i in range(depth)] + [jnp.int32(0)] * (buffer.ndim - depth)
        return jax.lax.dynamic_update_slice(buffer, piece, starts)

    def place(buffer, piece, offset):
        piece = piece.astype(dtype)
        piece = jnp.swapaxes(piece, -1, -2) if transpose else piece
        finite = jnp.isfinite(piece).all()
        if depth == 0:
            return piece, finite
        if sharding is None:
            return write(buffer, piece, offset), finite
        # Every shard writes its own part: no shard ever sees the others'.
        local = jax.shard_map(
            write,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec, P()),
            out_specs=sharding.spec,
            check_vma=False,
        )
        return local(buffer, piece, offset), finite

    donate = (0,) if depth else ()
    if sharding is None:
        return jax.jit(place, donate_argnums=donate)
    outputs = (sharding, NamedSharding(sharding.mesh, P()))
    return jax.jit(place, donate_argnums=donate, out_shardings=outputs)
