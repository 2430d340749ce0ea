"""Causal attention on a mesh: tiles of keys, and a ring of them where the sequence is sharded.

The softmax is carried from tile to tile of keys as a running maximum and sum, and the gradient goes
over the tiles once more (FlashAttention, arXiv:2205.14135), so that nothing of the size of queries
times keys is ever held or saved. The first derivative must be one in reverse mode.

Where the sequence is sharded in time, every device keeps its queries, and the keys and values of
the others pass by, one shard a step (Ring Attention, arXiv:2310.01889). Backwards they pass by once
more, with their gradients travelling beside them. No device ever holds more than two shards of keys
and values. Shards are contiguous pieces of the sequence, and steps in which nothing is visible are
skipped. So the last shard works most under a causal mask: it sets the time, up to twice the mean.
(An order of tokens that balances the shards would have to be made by the data pipeline.) Where it
is not, queries are cut into blocks as well, and the pairs of a block and a tile in which nothing is
visible are left out.

Letters: B batch, T local time, S local keys, H query heads, K key heads, G = H / K, D, E head
widths.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.models.context import Context
from jaxllm.models.placement import active_spec, free_axes, mesh_axes

_UNBOUNDED = 2**30
_MASKED = -1e30  # Finite: a row that has seen nothing yet must not become NaN.
_TILE = 512  # Queries and keys whose logits are held at once.


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static facts of one call: the layout, the size of the ring, the form of the logits."""

    query_spec: PartitionSpec
    key_spec: PartitionSpec
    axis: str | None
    size: int
    scale: float
    softcap: float | None
    reach: int

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """Of (q, k, v, segment ids, window)."""
        rows = PartitionSpec(*self.query_spec[:2])
        return self.query_spec, self.key_spec, self.key_spec, rows, PartitionSpec()

    @property
    def row_spec(self) -> PartitionSpec:
        """Of [B, H, T] statistics of the softmax."""
        batch, time, heads, _ = self.query_spec
        return PartitionSpec(batch, heads, time)


def applies(q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], context: Context) -> bool:
    """Whether a mesh is active, q and k are one sequence, and nobody wants the probabilities."""
    if context.taps.wants("attention_probs") or q.shape[1] != k.shape[1] or not free_axes():
        return False
    spec = active_spec(q.shape, ("batch", "length", "act_heads", None))
    return len(spec) > 0 and len(mesh_axes(spec[1])) <= 1


def attend(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K E"],
    context: Context,
    *,
    scale: float,
) -> Float[Array, "B T H E"]:
    """Causal attention within the context's segments and window.

    Args:
      q, k, v: global arrays, rotated; T is the whole sequence.
      context: of the layer.
      scale: factor on q.k.
    """
    query_spec = active_spec(q.shape, ("batch", "length", "act_heads", None))
    key_spec = active_spec(k.shape, ("batch", "length", "act_kv_heads", None))
    if query_spec[2] != key_spec[2]:
        # A query head must lie with its key head: if only one divides, neither is cut.
        query_spec, key_spec = (
            PartitionSpec(*spec[:2], None, None) for spec in (query_spec, key_spec)
        )
    axis = next(iter(mesh_axes(query_spec[1])), None)
    window = _UNBOUNDED if context.window is None else context.window
    ring = _Ring(
        query_spec=query_spec,
        key_spec=key_spec,
        axis=axis,
        size=1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis],
        scale=scale,
        softcap=context.config.attention_softcap,
        reach=window if isinstance(window, int) else _UNBOUNDED,
    )
    segment_ids = context.shared.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    return _attend(ring, q, k, v, segment_ids, jnp.asarray(window, jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, segment_ids, window):
    return _attend_forward(ring, q, k, v, segment_ids, window)[0]


def _attend_forward(ring: _Ring, q, k, v, segment_ids, window):
    forward = _on_mesh(ring, _local_forward, ring.specs, (ring.query_spec, ring.row_spec))
    out, normalizer = forward(q, k, v, segment_ids, window)
    return out, (q, k, v, segment_ids, window, out, normalizer)


def _attend_backward(ring: _Ring, residuals, gradient):
    in_specs = (*ring.specs, ring.query_spec, ring.row_spec, ring.query_spec)
    backward = _on_mesh(ring, _local_backward, in_specs, ring.specs[:3])
    return (*backward(*residuals, gradient), None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _on_mesh(ring: _Ring, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """function(ring, *arrays), run by every device on its shards."""
    return jax.shard_map(
        functools.partial(function, ring),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free_axes(),
        check_vma=False,
    )


def _local_forward(ring: _Ring, q, k, v, segment_ids, window):
    """(out [B, T, H, E], log of the softmax's normaliser [B, H, T]) of this device's queries."""
    batch, time, heads, _ = q.shape
    grid = _Grid.of(ring, time)
    blocks = _group(grid.split(q, grid.rows), k.shape[2])
    query_ids = grid.split(segment_ids, grid.rows)
    shape = blocks.shape[:-1]
    softmax = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v.shape[-1]), jnp.float32),
    )

    def step(softmax: Any, passing: Any, owner: Array | int) -> tuple[Any, Any]:
        def see_tile(softmax: Any, place: Any) -> tuple[Any, None]:
            row, column = place
            (highest, total, out), block, ids = _take((softmax, blocks, query_ids), row)
            k, v, key_ids = _take(passing, column)
            mask = _mask(ring, grid, owner, place, ids, key_ids, window)
            logits = jnp.where(mask, _logits(ring, block, k), _MASKED)
            higher = jnp.maximum(highest, logits.max(axis=-1))
            weights = jnp.where(mask, jnp.exp(logits - higher[..., None]), 0)
            shrink = jnp.exp(highest - higher)
            seen = _product("bkgts,bskd->bkgtd", weights.astype(v.dtype), v)
            total = total * shrink + weights.sum(axis=-1)
            return _put(softmax, (higher, total, out * shrink[..., None] + seen), row), None

        def see(softmax: Any) -> Any:
            return jax.lax.scan(see_tile, softmax, grid.places(ring))[0]

        return _where_reachable(ring, owner, time, window, see, softmax), passing

    passing = tuple(grid.split(x, grid.columns) for x in (k, v, segment_ids))
    (highest, total, out), _ = _around(ring, step, softmax, passing)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = grid.join(_ungroup(out / total[..., None])).astype(v.dtype)
    normalizer = jnp.moveaxis(
        (highest + jnp.log(total)).reshape(len(blocks), batch, heads, -1), 0, 2
    )
    return out, normalizer.reshape(batch, heads, -1)[..., :time]


def _local_backward(ring: _Ring, q, k, v, segment_ids, window, out, normalizer, gradient):
    """Gradients of this device's q, k and v; those of k and v come home with them."""
    kv_heads, time = k.shape[2], q.shape[1]
    grid = _Grid.of(ring, time)

    def blocks_of(x: Array) -> Array:
        return _group(grid.split(x, grid.rows), kv_heads)

    # sum_s p_s dp_s, the part of the softmax's gradient that all keys of a query share.
    common = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    per_query = jnp.moveaxis(normalizer, 1, 2)[..., None]
    blocks = (
        blocks_of(q),
        blocks_of(gradient),
        blocks_of(per_query)[..., 0],
        blocks_of(common)[..., 0],
        grid.split(segment_ids, grid.rows),
    )

    def step(d_q: Array, passing: Any, owner: Array | int) -> tuple[Array, Any]:
        k, v, ids, d_k, d_v = passing

        def see_tile(gradients: Any, place: Any) -> tuple[Any, None]:
            row, column = place
            block, d_out, normalizer, common, query_ids = _take(blocks, row)
            key, value, key_ids = _take((k, v, ids), column)
            mask = _mask(ring, grid, owner, place, query_ids, key_ids, window)
            logits = _logits(ring, block, key)
            weights = jnp.where(mask, jnp.exp(logits - normalizer[..., None]), 0)
            d_weights = _product("bkgtd,bskd->bkgts", d_out, value)
            d_logits = weights * (d_weights - common[..., None])
            if ring.softcap is not None:
                d_logits = d_logits * (1 - jnp.square(logits / ring.softcap))
            d_logits = (d_logits * ring.scale).astype(q.dtype)
            more = (
                _product("bkgts,bskd->bkgtd", d_logits, key),
                _product("bkgts,bkgtd->bskd", d_logits, block),
                _product("bkgts,bkgtd->bskd", weights.astype(v.dtype), d_out),
            )
            sums = (
                _put(total, _take(total, index) + part, index)
                for total, part, index in zip(gradients, more, (row, column, column), strict=True)
            )
            return tuple(sums), None

        def see(gradients: Any) -> Any:
            return jax.lax.scan(see_tile, gradients, grid.places(ring))[0]

        d_q, d_k, d_v = _where_reachable(ring, owner, time, window, see, (d_q, d_k, d_v))
        return d_q, (k, v, ids, d_k, d_v)

    tiles = tuple(grid.split(x, grid.columns) for x in (k, v, segment_ids))
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (blocks[0], *tiles[:2])]
    d_q, passing = _around(ring, step, zeros[0], (*tiles, *zeros[1:]), home=True)
    d_k, d_v = (grid.join(x).astype(k.dtype) for x in passing[3:])
    return grid.join(_ungroup(d_q)).astype(q.dtype), d_k, d_v


def _around(ring: _Ring, step: Any, carry: Any, passing: Any, *, home: bool = False):
    """step(carry, passing, owner of what passes) for every shard, its own first.

    Args:
      home: also hand on what passes after the last step, so that it ends where it started.
    """
    if ring.size == 1:
        return step(carry, passing, 0)
    here = jax.lax.axis_index(ring.axis)
    onward = [(i, (i + 1) % ring.size) for i in range(ring.size)]

    def hand_on(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, onward), tree)

    def turn(state: Any, index: Array) -> tuple[Any, None]:
        carry, passing = step(*state, (here - index) % ring.size)
        return (carry, hand_on(passing)), None

    state, _ = jax.lax.scan(turn, (carry, passing), jnp.arange(ring.size - 1))
    carry, passing = step(*state, (here - (ring.size - 1)) % ring.size)
    return carry, hand_on(passing) if home else passing


def _where_reachable(
    ring: _Ring, owner: Array | int, time: int, window: Array, see: Any, state: Any
) -> Any:
    """see(state) where any query of this device can see any key of the owner's."""
    if ring.size == 1:
        return see(state)
    here = jax.lax.axis_index(ring.axis)
    nearest = (here - owner - 1) * time + 1  # From our first query to its last key.
    return jax.lax.cond((owner <= here) & (nearest < window), see, lambda same: same, state)


def _mask(
    ring: _Ring,
    grid: _Grid,
    owner: Array | int,
    place: tuple[Array, Array],
    query_ids: Int[Array, "B rows"],
    key_ids: Int[Array, "B columns"],
    window: Array,
) -> Array:
    """What is visible between a block of queries and a tile of keys: [B, 1, 1, rows, columns]."""
    here = 0 if ring.size == 1 else jax.lax.axis_index(ring.axis)
    row, column = place
    local = column * grid.columns + jnp.arange(grid.columns)
    queries = here * grid.time + row * grid.rows + jnp.arange(grid.rows)
    distance = queries[:, None] - (owner * grid.time + local)
    near = (distance >= 0) & (distance < window) & (local < grid.time)
    return (near & (query_ids[:, :, None] == key_ids[:, None, :]))[:, None, None]


def _logits(ring: _Ring, q: Array, k: Array) -> Float[Array, "B K G T S"]:
    logits = _product("bkgtd,bskd->bkgts", q, k) * ring.scale
    return logits if ring.softcap is None else ring.softcap * jnp.tanh(logits / ring.softcap)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How local time is cut: blocks of so many rows of queries, tiles of so many columns of keys.

    The last of each are filled up.
    """

    time: int
    rows: int
    columns: int

    @classmethod
    def of(cls, ring: _Ring, time: int) -> _Grid:
        """Equal tiles; queries in one block where the keys of other devices pass by.

        Those lie wholly before or after them all.
        """
        size = -(-time // -(-time // _TILE))
        return cls(time, size if ring.size == 1 else time, size)

    def places(self, ring: _Ring) -> tuple[np.ndarray, np.ndarray]:
        """(block, tile) of all pairs that may see each other, one after the other."""
        blocks, tiles = (-(-self.time // size) for size in (self.rows, self.columns))
        row, column = np.divmod(np.arange(blocks * tiles, dtype=np.int32), tiles)
        if ring.size == 1:
            last_query, first_key = (row + 1) * self.rows - 1, column * self.columns
            nearest = row * self.rows - (first_key + self.columns - 1)
            seen = (first_key <= last_query) & (nearest < ring.reach)
            row, column = row[seen], column[seen]
        return row, column

    def split(self, x: Float[Array, "B T ..."], size: int) -> Float[Array, "parts B size ..."]:
        """Parts of time, the last one filled up with zeros."""
        parts = -(-self.time // size)
        widths = [(0, 0), (0, parts * size - self.time)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths).reshape(x.shape[0], parts, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(self, x: Float[Array, "parts B size ..."]) -> Float[Array, "B T ..."]:
        """Undoes `split`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.time]


def _take(tree: Any, index: Array) -> Any:
    take = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, tree)


def _put(tree: Any, part: Any, index: Array) -> Any:
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return jax.tree.map(put, tree, part)


def _group(q: Float[Array, "n B T H D"], kv_heads: int) -> Float[Array, "n B K G T D"]:
    """Query heads under their key heads, heads before time."""
    *lead, time, heads, width = q.shape
    q = q.reshape(*lead, time, kv_heads, heads // kv_heads, width)
    return jnp.moveaxis(q, -4, -2)


def _ungroup(x: Float[Array, "n B K G T D"]) -> Float[Array, "n B T H D"]:
    x = jnp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
