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
is not, queries go in blocks, each over the keys before its end.

Letters: B batch, T local time, S local keys, H query heads, K key heads, G = H / K, D, E head
widths.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxllm.models.context import Context
from jaxllm.models.placement import active_spec, free_axes, mesh_axes

_UNBOUNDED = 2**30
_MASKED = -1e30  # Finite: a row that has seen nothing yet must not become NaN.
_TILE = 512  # Keys whose logits are held at once.
# n blocks of queries leave (n + 1) / 2n of the work on a sequence that is not sharded.
_QUERY_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static facts of one call: the layout, the size of the ring, the form of the logits."""

    query_spec: PartitionSpec
    key_spec: PartitionSpec
    axis: str | None
    size: int
    scale: float
    softcap: float | None

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
    ring = _Ring(
        query_spec=query_spec,
        key_spec=key_spec,
        axis=axis,
        size=1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis],
        scale=scale,
        softcap=context.config.attention_softcap,
    )
    segment_ids = context.shared.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    window = _UNBOUNDED if context.window is None else context.window
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
    parts = [
        _forward_block(ring, block, q, k, v, segment_ids, window)
        for block in _query_blocks(ring, q.shape[1])
    ]
    outs, normalizers = zip(*parts, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(normalizers, axis=2)


def _query_blocks(ring: _Ring, time: int) -> list[slice]:
    """Blocks of queries, each of which sees the local keys before its end only."""
    # In a ring the keys of other devices lie wholly before or after all queries.
    count = 1 if ring.size > 1 else min(_QUERY_BLOCKS, -(-time // _TILE))
    edges = [time * block // count for block in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def _forward_block(ring: _Ring, block: slice, q, k, v, segment_ids, window):
    k, v, key_ids = (x[:, : block.stop] for x in (k, v, segment_ids))
    q, query_ids = q[:, block], segment_ids[:, block]
    grouped = _group(q, k.shape[2])
    shape = grouped.shape[:-1]
    softmax = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v.shape[-1]), jnp.float32),
    )

    def see_tile(softmax: Any, tile: Any) -> Any:
        highest, total, out = softmax
        (k, v), mask = tile
        logits = jnp.where(mask, _logits(ring, grouped, k), _MASKED)
        higher = jnp.maximum(highest, logits.max(axis=-1))
        weights = jnp.where(mask, jnp.exp(logits - higher[..., None]), 0)
        shrink = jnp.exp(highest - higher)
        seen = _product("bkgts,bskd->bkgtd", weights.astype(v.dtype), v)
        return higher, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + seen

    def step(softmax: Any, passing: Any, owner: Array | int) -> tuple[Any, Any]:
        def see(softmax: Any) -> Any:
            masks = _masks(ring, owner, block, query_ids, passing[2], window)
            parts = (_tiles(passing[0]), _tiles(passing[1])), masks
            return jax.lax.scan(lambda s, tile: (see_tile(s, tile), None), softmax, parts)[0]

        return _where_reachable(ring, owner, q.shape[1], window, see, softmax), passing

    softmax, _ = _around(ring, step, softmax, (k, v, key_ids))
    highest, total, out = softmax
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    normalizer = (highest + jnp.log(total)).reshape(q.shape[0], q.shape[2], q.shape[1])
    return _ungroup(out / total[..., None]).astype(v.dtype), normalizer


def _local_backward(ring: _Ring, q, k, v, segment_ids, window, out, normalizer, gradient):
    """Gradients of this device's q, k and v; those of k and v come home with them."""
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for block in _query_blocks(ring, q.shape[1]):
        part, more_k, more_v = _backward_block(
            ring, block, q, k, v, segment_ids, window, out, normalizer, gradient
        )
        d_q.append(part)
        seen = slice(None, block.stop)
        d_k, d_v = d_k.at[:, seen].add(more_k), d_v.at[:, seen].add(more_v)
    return jnp.concatenate(d_q, axis=1).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _backward_block(
    ring: _Ring, block: slice, q, k, v, segment_ids, window, out, normalizer, gradient
):
    kv_heads = k.shape[2]
    k, v, key_ids = (x[:, : block.stop] for x in (k, v, segment_ids))
    query_ids = segment_ids[:, block]
    grouped, d_out = _group(q[:, block], kv_heads), _group(gradient[:, block], kv_heads)
    normalizer = normalizer[:, :, block].reshape(grouped.shape[:-1])
    # sum_s p_s dp_s, the part of the softmax's gradient that all keys of a query share.
    common = (d_out.astype(jnp.float32) * _group(out[:, block], kv_heads).astype(jnp.float32)).sum(
        axis=-1
    )

    def see_tile(d_q: Array, tile: Any) -> tuple[Array, Any]:
        (k, v), mask = tile
        logits = _logits(ring, grouped, k)
        weights = jnp.where(mask, jnp.exp(logits - normalizer[..., None]), 0)
        d_weights = _product("bkgtd,bskd->bkgts", d_out, v)
        d_logits = weights * (d_weights - common[..., None])
        if ring.softcap is not None:
            d_logits = d_logits * (1 - jnp.square(logits / ring.softcap))
        d_logits = (d_logits * ring.scale).astype(q.dtype)
        d_v = _product("bkgts,bkgtd->bskd", weights.astype(v.dtype), d_out)
        d_k = _product("bkgts,bkgtd->bskd", d_logits, grouped)
        return d_q + _product("bkgts,bskd->bkgtd", d_logits, k), (d_k, d_v)

    def step(d_q: Array, passing: Any, owner: Array | int) -> tuple[Array, Any]:
        k, v, ids, d_k, d_v = passing

        def see(state: Any) -> Any:
            d_q, d_k, d_v = state
            masks = _masks(ring, owner, block, query_ids, ids, window)
            d_q, more = jax.lax.scan(see_tile, d_q, ((_tiles(k), _tiles(v)), masks))
            return d_q, d_k + _untile(more[0]), d_v + _untile(more[1])

        state = _where_reachable(ring, owner, grouped.shape[3], window, see, (d_q, d_k, d_v))
        return state[0], (k, v, ids, *state[1:])

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (grouped, k, v)]
    d_q, passing = _around(ring, step, zeros[0], (k, v, key_ids, *zeros[1:]), home=True)
    return _ungroup(d_q), passing[3], passing[4]


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


def _masks(
    ring: _Ring,
    owner: Array | int,
    block: slice,
    query_ids: Array,
    key_ids: Array,
    window: Array,
) -> Array:
    """What is visible, a tile of keys at a time: [tiles, B, 1, 1, T, keys]."""
    time = key_ids.shape[1]
    here = 0 if ring.size == 1 else jax.lax.axis_index(ring.axis)
    queries = here * time + jnp.arange(block.start, block.stop)
    keys = _tiles((owner * time + jnp.arange(time))[None])  # [tiles, 1, keys]
    distance = queries[None, None, :, None] - keys[:, :, None, :]
    same = query_ids[None, :, :, None] == _tiles(key_ids)[:, :, None, :]
    return ((distance >= 0) & (distance < window) & same)[:, :, None, None]


def _logits(ring: _Ring, q: Array, k: Array) -> Float[Array, "B K G T S"]:
    logits = _product("bkgtd,bskd->bkgts", q, k) * ring.scale
    return logits if ring.softcap is None else ring.softcap * jnp.tanh(logits / ring.softcap)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _tiles(x: Float[Array, "B S ..."]) -> Float[Array, "tiles B keys ..."]:
    """Cuts time into the fewest equal tiles of at most `_TILE` keys."""
    time = x.shape[1]
    count = next(n for n in range(-(-time // _TILE), time + 1) if time % n == 0)
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _untile(x: Float[Array, "tiles B keys ..."]) -> Float[Array, "B S ..."]:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _group(x: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K G T D"]:
    """Query heads under their key heads, heads before time."""
    batch, time, _, width = x.shape
    return x.reshape(batch, time, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)


def _ungroup(x: Float[Array, "B K G T D"]) -> Float[Array, "B T H D"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])
