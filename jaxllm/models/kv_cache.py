"""Keys and values as a value: `attend(cache, q, k, v) -> (out, cache)`.

A `KVCache` belongs to one layer. Given the queries, keys and values of the new tokens it returns
what they attend to and the cache that holds them. Whatever a method does to keys, values and
queries after the rotary embedding (transforming, quantising, evicting) is an implementation of this
class. A `CachePolicy` says which cache each layer has, and makes the empty ones.

What a cache may rely on, and what it owes:

- The new tokens of a row have consecutive positions, `context.shared.positions`, and go on where
  the row ended. Rows may be at different positions.
- Tokens of segment id 0 (`new_tokens`) are padding behind the real ones, or rows that stand idle:
  they leave no trace, and what they attend to is finite but means nothing.
- A row's result depends on that row only. Every leaf has the batch first, [B, ...], and where it
  has three axes or more the key heads second, so that rows can be picked, repeated and put into
  another cache (`take_rows`, `put_rows`), and shards lie over batch and heads (`constrain`).
- Stacked over the layers of a segment every leaf gains a leading axis.
- Numbers that a policy has learned are no state: a cache reads them from
  `context.inputs.per_layer.extras`.

Letters: B batch, T new tokens, S visible keys, H query heads, K key heads, G = H / K, D, E head
widths.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.models import mesh_attention
from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context
from jaxllm.models.placement import active_spec, on_one_device
from jaxllm.models.segments import cut, segment_length


class KVCache:
    """Base of all caches; subclasses are `flax.struct.dataclass`es."""

    if TYPE_CHECKING:  # Every subclass has it from flax.struct.dataclass.

        def replace(self, **changes: Any) -> Self: ...

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K E"],
        context: Context,
    ) -> tuple[Float[Array, "B T H E"], KVCache]:
        """What the new tokens attend to, and the cache with them in it."""
        raise NotImplementedError

    def compact(self) -> KVCache:
        """What decoding goes on with after the prompt; the same unless a method drops or packs."""
        return self


class CachePolicy:
    """Which cache each layer has; subclasses are `flax.struct.dataclass`es with static fields."""

    def init_layer(
        self, config: ModelConfig, layer: int, batch_size: int, num_slots: int
    ) -> KVCache:
        """The empty cache of one layer.

        Args:
          config: the model's.
          layer: index of the layer.
          batch_size, num_slots: B, and the longest sequence that must fit.
        """
        raise NotImplementedError

    def split(self, config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with segments cut where the caches of neighbouring layers differ in kind.

        Returns them as they are where nothing needs to be cut. Cutting copies the layers: who
        generates often does it once.
        """
        return cut(
            params,
            [self._kind(config, layer, config.max_positions) for layer in range(config.num_layers)],
        )

    def init(
        self, config: ModelConfig, params: Mapping[str, Any], batch_size: int, num_slots: int
    ) -> tuple[KVCache, ...]:
        """Empty caches for a model, one stacked cache a segment of `params`.

        Args:
          config: the model's.
          params: its parameters; only the lengths of the segments are read.
          batch_size, num_slots: as for `init_layer`.

        Raises:
          ValueError: a segment holds layers whose caches differ in kind (see `split`).
        """
        caches, start = [], 0
        for segment in params["layers"]:
            stop = start + segment_length(segment)
            kinds = {self._kind(config, layer, num_slots) for layer in range(start, stop)}
            if len(kinds) > 1:
                raise ValueError(
                    f"{type(self).__name__} gives the layers {start} to {stop - 1}, one segment, "
                    "caches of different kinds: pass params through policy.split(config, params)."
                )
            layer = self.init_layer(config, start, batch_size, num_slots)
            caches.append(_repeat(layer, stop - start))
            start = stop
        return constrain(tuple(caches))

    def _kind(self, config: ModelConfig, layer: int, num_slots: int) -> Any:
        """What layers must share for their caches to be stacked."""
        empty = jax.eval_shape(lambda: self.init_layer(config, layer, 1, num_slots))
        leaves, structure = jax.tree.flatten(empty)
        return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _repeat(layer: KVCache, count: int) -> KVCache:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), layer)


def compact(caches: tuple[KVCache, ...]) -> tuple[KVCache, ...]:
    """`KVCache.compact` of every layer: called once, between the prompt and decoding."""
    return constrain(tuple(jax.vmap(lambda layer: layer.compact())(cache) for cache in caches))


def take_rows(caches: tuple[KVCache, ...], rows: Int[Array, " R"]) -> tuple[KVCache, ...]:
    """The caches of chosen rows (repeated or reordered)."""
    return constrain(jax.tree.map(lambda leaf: leaf[:, rows], caches))


def put_rows(
    caches: tuple[KVCache, ...], rows: Int[Array, " R"], other: tuple[KVCache, ...]
) -> tuple[KVCache, ...]:
    """Replaces rows by the R rows of `other`, caches of the same kind with as many slots.

    A row number outside of the batch drops that row of `other`.
    """

    def put(leaf: Array, new: Array) -> Array:
        return leaf.at[:, rows].set(new.astype(leaf.dtype), mode="drop")

    return constrain(jax.tree.map(put, caches, other))


def constrain(caches: tuple[KVCache, ...]) -> tuple[KVCache, ...]:
    """Lays stacked caches over the active mesh by its rules for rows and key heads."""

    def place(leaf: Array) -> Array:
        return jax.lax.with_sharding_constraint(leaf, stacked_spec(leaf))

    return caches if on_one_device() else jax.tree.map(place, caches)


def stacked_spec(leaf: Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    """How a leaf [L, B, ...] of stacked caches lies on the active mesh."""
    heads = "act_kv_heads" if leaf.ndim > 3 else None
    names = (None, "batch", heads, *(None,) * leaf.ndim)[: leaf.ndim]
    return active_spec(leaf.shape, names)


def new_tokens(context: Context) -> Bool[Array, "B T"]:
    """Which of the new tokens are real: all, or those whose segment id is not 0."""
    segment_ids = context.shared.segment_ids
    if segment_ids is None:
        return jnp.ones(context.shared.positions.shape, bool)
    return segment_ids != 0


def write_slots(
    buffer: Shaped[Array, "B K S ..."], slots: Int[Array, "B M"], new: Shaped[Array, "B K M ..."]
) -> Shaped[Array, "B K S ..."]:
    """buffer[b, :, slots[b, m]] = new[b, :, m]; a slot beyond the last writes nothing."""
    write = jax.vmap(lambda row, index, x: row.at[:, index].set(x, mode="drop"))
    return write(buffer, slots, new.astype(buffer.dtype))


def visible(
    query_index: Int[Array, "... T"],
    key_index: Int[Array, "... S"],
    window: Int[Array, ""] | int | None,
) -> Bool[Array, "... T S"]:
    """Causal mask: keys at or before the query, and within `window` tokens, itself included."""
    distance = query_index[..., :, None] - key_index[..., None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def attention_logits(
    q: Float[Array, "B T H D"], k: Float[Array, "B S K D"], scale: float
) -> Float[Array, "B K G T S"]:
    """scale q.k in float32; key head j serves queries jG .. jG + G - 1."""
    batch, time, _, width = q.shape
    kv_heads, slots = k.shape[2], k.shape[1]
    # One product a key head: the queries of its group lie one after the other along time.
    q = (q * scale).reshape(batch, time, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, -1, width)
    k = k.swapaxes(1, 2)
    logits = jnp.einsum("bknd,bksd->bkns", q, k, preferred_element_type=jnp.float32)
    return logits.reshape(batch, kv_heads, -1, time, slots)


def attend_logits(
    logits: Float[Array, "B K G T S"],
    v: Float[Array, "B S K E"],
    mask: Bool[Array, "B ... T S"],
    *,
    softcap: float | None = None,
    context: Context | None = None,
) -> Float[Array, "B T H E"]:
    """Softmax in float32 of what the mask, [B, T, S] or [B, K, T, S], shows, times the values."""
    batch, kv_heads, group, time, slots = logits.shape
    value_width = v.shape[-1]
    v = v.swapaxes(1, 2)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    mask = mask[:, None, None] if mask.ndim == 3 else mask[:, :, None]
    # A finite minimum: rows of padding see nothing, and must not become NaN.
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    # The product is divided by the sum, not the weights: a pass over [T, S] less in each direction.
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    heads = kv_heads * group
    if context is not None and context.taps.wants("attention_probs"):
        context.tap("attention_probs", (weights / total).reshape(batch, heads, time, slots))
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, -1, slots)
    out = jnp.einsum("bkns,bksd->bknd", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, -1, time, value_width) / total
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, value_width)
    return out.astype(v.dtype)


def dot_product_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    mask: Bool[Array, "B ... T S"],
    *,
    scale: float,
    softcap: float | None = None,
    context: Context | None = None,
) -> Float[Array, "B T H E"]:
    """Grouped-query attention: `attention_logits`, then `attend_logits`."""
    return attend_logits(attention_logits(q, k, scale), v, mask, softcap=softcap, context=context)


def attention_scale(config: ModelConfig) -> float:
    """Factor on q.k: the config's, or head_dim^-0.5."""
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


@flax.struct.dataclass
class NoCache(KVCache):
    """Keeps nothing: the new tokens are the whole sequence (training, perplexity, calibration).

    Attributes:
      any_derivative: keep to operations that have derivatives of any kind. Otherwise a mesh has
        `mesh_attention`, whose memory does not grow with the square of the sequence, and which is
        not differentiated in forward mode (its gradient is).
    """

    any_derivative: bool = flax.struct.field(pytree_node=False, default=False)

    def attend(self, q, k, v, context):
        if not self.any_derivative and mesh_attention.applies(q, k, context):
            return mesh_attention.attend(
                q, k, v, context, scale=attention_scale(context.config)
            ), self
        time = q.shape[1]
        whole = context.taps.wants("attention_probs") or not on_one_device()
        blocks = 1 if whole else min(_QUERY_BLOCKS, max(1, time // _MIN_QUERY_BLOCK))
        edges = [time * block // blocks for block in range(blocks + 1)]
        parts = [
            self._attend_block(q, k, v, context, start, stop)
            for start, stop in itertools.pairwise(edges)
        ]
        return jnp.concatenate(parts, axis=1) if blocks > 1 else parts[0], self

    def _attend_block(self, q, k, v, context, start, stop):
        """Queries start .. stop - 1 over the keys that any of them can see."""
        window = context.window
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        mask = visible(jnp.arange(start, stop)[None], jnp.arange(first, stop)[None], window)
        segment_ids = context.shared.segment_ids
        if segment_ids is not None:
            queries, keys = segment_ids[:, start:stop], segment_ids[:, first:stop]
            mask = mask & (queries[:, :, None] == keys[:, None, :])
        return dot_product_attention(
            q[:, start:stop],
            k[:, first:stop],
            v[:, first:stop],
            mask,
            scale=attention_scale(context.config),
            softcap=context.config.attention_softcap,
            context=context,
        )


# Causal attention wastes half of its work on what is masked. Cutting the queries into n blocks,
# each over the keys before its end, leaves (n + 1) / 2n of it.
_QUERY_BLOCKS = 4
_MIN_QUERY_BLOCK = 32


@flax.struct.dataclass
class DenseCache(KVCache):
    """Keeps every key and value at the slot of its position.

    Tokens may be written again at positions already seen: slots beyond a query are invisible to it,
    and overwritten before a later query may see them (speculative decoding).

    Attributes:
      k, v: [B, K, S, D] and [B, K, S, E]; heads before slots, so that a decoding step writes
        contiguously.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S E"]

    def attend(self, q, k, v, context):
        positions, slots = context.shared.positions, self.k.shape[2]
        target = jnp.where(new_tokens(context), positions, slots)
        cache = self.replace(
            k=write_slots(self.k, target, k.swapaxes(1, 2)),
            v=write_slots(self.v, target, v.swapaxes(1, 2)),
        )
        mask = visible(positions, jnp.arange(slots)[None], context.window)
        return cache_attention(q, cache.k, cache.v, mask, context), cache


def cache_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    mask: Bool[Array, "B ... T S"],
    context: Context,
) -> Float[Array, "B T H E"]:
    """`dot_product_attention` over keys and values laid out, and stored, as caches do."""
    return dot_product_attention(
        q,
        k.swapaxes(1, 2).astype(q.dtype),
        v.swapaxes(1, 2).astype(q.dtype),
        mask,
        scale=attention_scale(context.config),
        softcap=context.config.attention_softcap,
        context=context,
    )


def cache_widths(config: ModelConfig) -> tuple[int, int]:
    """D and E, the widths of the keys and values of one head."""
    return config.head_dim, config.head_dim if config.mla is None else config.mla.value_dim


@flax.struct.dataclass
class DensePolicy(CachePolicy):
    """Every layer keeps everything.

    Attributes:
      dtype: of keys and values; None = the compute type.
    """

    dtype: str | None = flax.struct.field(pytree_node=False, default=None)

    def init_layer(self, config, layer, batch_size, num_slots):
        key_dim, value_dim = cache_widths(config)
        dtype = config.compute_dtype if self.dtype is None else self.dtype
        shape = (batch_size, config.num_kv_heads, num_slots)
        return DenseCache(
            k=jnp.zeros((*shape, key_dim), dtype), v=jnp.zeros((*shape, value_dim), dtype)
        )
