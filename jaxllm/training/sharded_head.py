"""The fused cross-entropy of a head that lies on a mesh, in blocks of the vocabulary.

A device holds some rows of hidden states, and of the head [D, V] a shard along either axis. With
all its rows and one block of the vocabulary at a time it never holds the whole head, nor the whole
gradient of it: each block is gathered along D when it is needed, and its gradient summed over the
devices and scattered back at once. The normalisers take one round over the blocks, the gradients a
second, in which the logits are formed again: one product with the head more than in chunks of rows,
where gradient and head would be whole on every device.

Letters: N rows of a device, D model width, V local vocabulary, C columns of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.models.collectives import scatter_axis
from jaxllm.models.placement import active_spec, free_axes, mesh_axes


class Options(NamedTuple):
    """Static facts of a call, as the arguments of `losses.fused_cross_entropy` name them."""

    vocab_axis: int
    softcap: float | None
    z_loss: float
    chunk: int


class Rows(NamedTuple):
    """Per-token values: -log p(target), log-normaliser, whether the target has the top logit."""

    nll: Array
    log_normalizer: Array
    correct: Array


class _Layout(NamedTuple):
    """Mesh axes of the rows, and of the two axes of the head."""

    rows: PartitionSpec
    embed: tuple[str, ...]
    vocab: tuple[str, ...]

    def head_spec(self, vocab_axis: int) -> PartitionSpec:
        entries = (self.embed or None, self.vocab or None)
        return PartitionSpec(*entries if vocab_axis == 1 else entries[::-1])


def applies(shape: tuple[int, ...]) -> bool:
    """Whether a mesh with sharding rules is active for rows of this shape [B, T]."""
    return len(active_spec(shape, ("batch", "length"))) > 0 and bool(free_axes())


def rows(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, ...],
    targets: Int[Array, "B T"],
) -> Rows:
    """Values of every row, without gradients."""
    layout = _layout(options, head, targets)

    def local(hidden, head, targets):
        found = _normalize(options, layout, _flat(hidden), head, targets.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(targets.shape), found)

    specs = (PartitionSpec(*layout.rows, None), layout.head_spec(options.vocab_axis), layout.rows)
    return _on_mesh(local, specs, layout.rows)(hidden, head, targets)


def rows_and_gradients(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, ...],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Rows, Float[Array, "B T D"], Float[Array, ...]]:
    """Values of every row, and the gradients of the weighted total by hidden states and head.

    Gradients of the head are summed over devices in the type of the products, as those of any other
    weight are.
    """
    layout = _layout(options, head, targets)

    def local(hidden, head, targets, weights):
        flat, t = _flat(hidden), targets.reshape(-1)
        found = _normalize(options, layout, flat, head, t)
        d_hidden, d_head = _gradients(options, layout, flat, head, t, weights.reshape(-1), found)
        found = jax.tree.map(lambda x: x.reshape(targets.shape), found)
        return found, d_hidden.reshape(hidden.shape), d_head

    of_hidden, of_head = PartitionSpec(*layout.rows, None), layout.head_spec(options.vocab_axis)
    in_specs = (of_hidden, of_head, layout.rows, layout.rows)
    out_specs = (layout.rows, of_hidden, of_head)
    return _on_mesh(local, in_specs, out_specs)(hidden, head, targets, weights)


def _layout(options: Options, head: Array, targets: Array) -> _Layout:
    by_row = active_spec(targets.shape, ("batch", "length"))
    names = ("embed", "vocab") if options.vocab_axis == 1 else ("vocab", "embed")
    spec = dict(zip(names, active_spec(head.shape, names), strict=True))
    # Devices with other rows must see the same columns.
    vocab = tuple(n for n in mesh_axes(spec["vocab"]) if n not in mesh_axes(*by_row))
    return _Layout(by_row, mesh_axes(spec["embed"]), vocab)


def _on_mesh(function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=free_axes(), check_vma=False
    )


def _flat(hidden: Float[Array, "B T D"]) -> Float[Array, "N D"]:
    return hidden.reshape(-1, hidden.shape[-1])


class _Block(NamedTuple):
    """Some columns of the head.

    Attributes:
      start: first column, among those of this device.
      kernel: [D, C], gathered, in the type of the hidden states.
      columns: [C] token ids; -1 for columns that belong to the block before.
    """

    start: Array
    kernel: Array
    columns: Array

    def holds(self, targets: Int[Array, " N"]) -> Array:
        """[N, C] whether a column is the target of a row."""
        return (self.columns == targets[:, None]) & (self.columns >= 0)


def _blocks(options: Options, layout: _Layout, flat: Array, head: Array) -> tuple[int, Any]:
    """The number of blocks, and a function of the index that gives each."""
    size = head.shape[options.vocab_axis]
    # As many logits as `chunk` rows of the whole vocabulary are.
    width = min(size, max(1, options.chunk * size // max(1, flat.shape[0])))
    shard: Any = jax.lax.axis_index(layout.vocab) if layout.vocab else 0

    def block(index: Array) -> _Block:
        start = jnp.minimum(index * width, size - width)
        kernel = jax.lax.dynamic_slice_in_dim(head, start, width, options.vocab_axis)
        kernel = kernel.astype(flat.dtype)
        if layout.embed:
            kernel = jax.lax.all_gather(
                kernel, layout.embed, axis=1 - options.vocab_axis, tiled=True
            )
        columns = start + jnp.arange(width)
        columns = jnp.where(columns >= index * width, columns + shard * size, -1)
        return _Block(start, kernel if options.vocab_axis == 1 else kernel.T, columns)

    return -(-size // width), block


def _logits(options: Options, flat: Array, block: _Block) -> tuple[Array, Array | None]:
    """Logits [N, C] in at least float32, and d(capped)/d(raw) (None without a cap)."""
    dtype = jnp.promote_types(flat.dtype, jnp.float32)
    logits = jnp.einsum("nd,dc->nc", flat, block.kernel, preferred_element_type=dtype)
    slope = None
    if options.softcap is not None:
        ratio = jnp.tanh(logits / options.softcap)
        logits, slope = options.softcap * ratio, 1.0 - ratio**2
    return jnp.where(block.columns >= 0, logits, -jnp.inf), slope


def _normalize(options: Options, layout: _Layout, flat: Array, head: Array, targets: Array) -> Rows:
    count, block_at = _blocks(options, layout, flat, head)

    def add(carry: Any, index: Array) -> tuple[Any, None]:
        largest, total, at_target = carry
        block = block_at(index)
        logits, _ = _logits(options, flat, block)
        larger = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - larger) + jnp.exp(logits - larger[:, None]).sum(-1)
        hit = block.holds(targets)
        return (larger, total, at_target + jnp.where(hit, logits, 0.0).sum(-1)), None

    dtype = jnp.promote_types(flat.dtype, jnp.float32)
    zeros = jnp.zeros(targets.shape, dtype)
    start = (jnp.full(targets.shape, jnp.finfo(dtype).min, dtype), zeros, zeros)
    (largest, total, at_target), _ = jax.lax.scan(add, start, jnp.arange(count))
    if layout.vocab:
        everywhere = jax.lax.pmax(largest, layout.vocab)
        total = jax.lax.psum(total * jnp.exp(largest - everywhere), layout.vocab)
        at_target = jax.lax.psum(at_target, layout.vocab)
        largest = everywhere
    log_normalizer = largest + jnp.log(total)
    correct = (at_target >= largest).astype(dtype)
    return Rows(log_normalizer - at_target, log_normalizer, correct)


def _gradients(
    options: Options, layout: _Layout, flat, head, targets, weights, found: Rows
) -> tuple[Array, Array]:
    count, block_at = _blocks(options, layout, flat, head)
    pull = weights * (1.0 + 2.0 * options.z_loss * found.log_normalizer)
    summed = set(mesh_axes(*layout.rows))

    def add(carry: Any, index: Array) -> tuple[Any, None]:
        d_flat, d_head = carry
        block = block_at(index)
        logits, slope = _logits(options, flat, block)
        probs = jnp.exp(logits - found.log_normalizer[:, None])
        hit = block.holds(targets)
        grad = probs * pull[:, None] - jnp.where(hit, weights[:, None], 0.0)
        grad = (grad if slope is None else grad * slope).astype(flat.dtype)
        d_flat += jnp.einsum("nc,dc->nd", grad, block.kernel, preferred_element_type=d_flat.dtype)
        form = "nd,nc->dc" if options.vocab_axis == 1 else "nd,nc->cd"
        part = jnp.einsum(form, flat, grad, preferred_element_type=d_flat.dtype)
        part = _reduce(part.astype(flat.dtype) if summed else part, layout, options, summed)
        # Columns of the block before add nothing: their gradients are 0.
        return (d_flat, _add_columns(d_head, part, block.start, options.vocab_axis)), None

    d_flat = jnp.zeros(flat.shape, jnp.promote_types(flat.dtype, jnp.float32))
    (d_flat, d_head), _ = jax.lax.scan(add, (d_flat, jnp.zeros_like(head)), jnp.arange(count))
    d_flat = d_flat.astype(flat.dtype)
    return (jax.lax.psum(d_flat, layout.vocab) if layout.vocab else d_flat), d_head


def _reduce(part: Array, layout: _Layout, options: Options, summed: set[str]) -> Array:
    """This device's shard along the embedding, summed over the devices with other rows."""
    if layout.embed:
        part = scatter_axis(part, layout.embed, 1 - options.vocab_axis, summed)
    rest = tuple(sorted(summed - set(layout.embed)))
    return jax.lax.psum(part, rest) if rest else part


def _add_columns(head: Array, part: Array, start: Array, axis: int) -> Array:
    old = jax.lax.dynamic_slice_in_dim(head, start, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(head, old + part.astype(head.dtype), start, axis)
