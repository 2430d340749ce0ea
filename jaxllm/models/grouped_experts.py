"""Experts run on the tokens that chose them: a grouped feed-forward, on one device or a mesh.

The choices are sorted by expert and cut into blocks of rows of one expert. A loop over the blocks
that there really are gathers the rows, runs the expert's whole feed-forward on them and adds the
weighted result to their tokens. Nothing is dropped and nothing is padded beyond the last block of
an expert, and besides input and output only one block is held. The gradient runs the same loop and
recomputes each block, so that a mixture saves nothing for its backward pass but its arguments
(first derivatives in reverse mode only).

On a mesh every device runs its own experts. The rows of the devices along the expert axis are
gathered, and their outputs summed and scattered back: with shapes that are known when compiling, an
exchange that may drop nothing has to provide for every row going to every device, so it moves as
many bytes as this, and holds K times as much. Weights sharded over the embedding are gathered one
expert at a time, their gradients scattered likewise.

Letters: R rows (tokens), K experts a row, E experts held here, D model width, M = R K choices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.models.collectives import scatter_axis
from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context, Taps
from jaxllm.models.feedforward import dense_feedforward
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.placement import active_spec, free_axes, mesh_axes

# Reading the weights of an expert costs about as much as multiplying this many rows by them.
_ROWS_PER_READ = 64
_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 512

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How rows and weights lie on the mesh; empty on one device.

    Attributes:
      rows: spec of [B, T, ...] rows.
      experts, embed, hidden: mesh axes of the three axes of the experts' kernels.
      manual: the mesh axes to map over; the others a surrounding `shard_map` has taken already.
    """

    rows: PartitionSpec = PartitionSpec()
    experts: Axes = ()
    embed: Axes = ()
    hidden: Axes = ()
    manual: frozenset[str] = frozenset()

    @property
    def gathered(self) -> Axes:
        """Axes over which other experts are and other rows too: rows are exchanged."""
        return tuple(name for name in self.experts if name in mesh_axes(*self.rows))

    @property
    def partial(self) -> Axes:
        """Axes over which the same rows meet other weights: partial outputs are summed."""
        return tuple(n for n in self.experts + self.hidden if n not in mesh_axes(*self.rows))

    def weight_axes(self, path: tuple[Any, ...]) -> tuple[Axes, ...]:
        """Mesh axes of each axis of a parameter of the experts, the expert axis first."""
        axes = (self.embed, self.hidden) if path[0].key == "in" else (self.hidden, self.embed)
        return (self.experts, *(axes[1:] if path[-1].key == "bias" else axes))

    def weight_specs(self, nodes: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: PartitionSpec(*(axes or None for axes in self.weight_axes(path))), nodes
        )


def block_rows(rows: int, per_row: int, num_experts: int) -> int:
    """Rows of a block: a power of two near the least cost of padding and reading weights.

    With n = M / E rows an expert and blocks of b rows, an expert is read n / b + 1/2 times and
    b / 2 rows are padding: the sum is least at b = sqrt(2 n * rows a read is worth).
    """
    best = math.sqrt(2 * _ROWS_PER_READ * rows * per_row / num_experts)
    most = min(_LARGEST_BLOCK, 2 ** math.ceil(math.log2(max(rows, 1))))
    return int(min(max(2 ** round(math.log2(best)), _SMALLEST_BLOCK), max(most, _SMALLEST_BLOCK)))


def is_faster(rows: int, per_row: int, num_experts: int) -> bool:
    """Whether the grouped loop costs less than every expert on every row, by rows and reads."""
    choices, block = rows * per_row, block_rows(rows, per_row, num_experts)
    blocks = min(choices, choices / block + num_experts / 2)
    return blocks * (block + _ROWS_PER_READ) < num_experts * (rows + _ROWS_PER_READ)


def supports(nodes: Any, context: Context) -> bool:
    """Whether the experts are plain arrays without anything acting inside of them."""
    if context.inputs.per_layer.neuron_mask is not None:
        return False
    plain = isinstance(nodes, Mapping) and set(nodes) == {"in", "down"}
    if not plain or not isinstance(nodes["in"], Mapping):
        return False
    linears = (*nodes["in"].values(), nodes["down"])
    return all(
        isinstance(node, Mapping) and all(isinstance(leaf, jax.Array) for leaf in node.values())
        for node in linears
    )


def run(
    nodes: Mapping[str, Any],
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    context: Context,
) -> Float[Array, "B T D"]:
    """sum_k weights_k * expert_k(x), accumulated in float32.

    Args:
      nodes: a dense feed-forward of plain arrays with a leading expert axis.
      x, experts, weights: rows, the experts they chose, and with what weights.
      context: of the layer.
    """
    call = _Call(context.config, _layout(nodes, x), jax.tree.leaves(nodes)[0].shape[0])
    return _run(call, nodes, x, experts, weights)


def _layout(nodes: Mapping[str, Any], x: Array) -> _Layout:
    rows, manual = active_spec(x.shape, ("batch", "length", None)), free_axes()
    if not len(rows) or not manual:
        return _Layout()
    kernel = active_spec(nodes["in"]["up"]["kernel"].shape, ("expert", "embed", "mlp"))
    experts, embed, hidden = (mesh_axes(entry) for entry in kernel)
    return _Layout(rows, experts, embed, hidden, frozenset(manual))


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static facts of one call; `num_experts` counts those of all devices."""

    config: ModelConfig
    layout: _Layout
    num_experts: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: _Call, nodes, x, experts, weights):
    layout = call.layout
    specs = (layout.weight_specs(nodes), layout.rows, layout.rows, layout.rows)
    return _on_mesh(call, _forward, specs, layout.rows)(nodes, x, experts, weights)


def _run_forward(call: _Call, nodes, x, experts, weights):
    return _run(call, nodes, x, experts, weights), (nodes, x, experts, weights)


def _run_backward(call: _Call, residuals, gradient):
    layout = call.layout
    of_nodes = layout.weight_specs(residuals[0])
    specs = (of_nodes, *(layout.rows,) * 4)
    backward = _on_mesh(call, _backward, specs, (of_nodes, layout.rows, layout.rows))
    d_nodes, d_x, d_weights = backward(*residuals, gradient)
    return d_nodes, d_x, None, d_weights


_run.defvjp(_run_forward, _run_backward)


def _on_mesh(call: _Call, function: Any, in_specs: Any, out_specs: Any) -> Any:
    local = functools.partial(function, call)
    if not call.layout.manual:
        return local
    return jax.shard_map(
        local,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(call.layout.manual),
        check_vma=False,
    )


@flax.struct.dataclass
class _Plan:
    """Which choices each block runs.

    Attributes:
      order: [M] choices sorted by expert; those of experts elsewhere come last.
      starts, counts: [E] where an expert's choices start in `order`, and how many there are.
      ends: [E] number of blocks up to and including those of an expert.
      per_row: K.
      block: rows of a block.
    """

    order: Int[Array, " M"]
    starts: Int[Array, " E"]
    counts: Int[Array, " E"]
    ends: Int[Array, " E"]
    per_row: int = flax.struct.field(pytree_node=False)
    block: int = flax.struct.field(pytree_node=False)

    def rows(self, index: Array) -> tuple[Array, Array, Array]:
        """Expert, choices [block] and rows [block] of a block; out of bounds where padded."""
        expert = jnp.searchsorted(self.ends, index, side="right")
        used = -(-self.counts[expert] // self.block)
        within = (index - (self.ends[expert] - used)) * self.block + jnp.arange(self.block)
        choice = self.order.at[self.starts[expert] + within].get(mode="clip")
        choice = jnp.where(within < self.counts[expert], choice, self.order.size)
        return expert, choice, choice // self.per_row


def _plan(call: _Call, experts: Int[Array, "R K"], held: int) -> _Plan:
    """Sorts the choices of the `held` experts of this device."""
    shard: Any = jax.lax.axis_index(call.layout.experts) if call.layout.experts else 0
    local = experts.reshape(-1) - shard * held
    local = jnp.where((local >= 0) & (local < held), local, held)
    rows, per_row = experts.shape
    counts = jnp.zeros(held + 1, jnp.int32).at[local].add(1)[:held]
    block = block_rows(rows, per_row, call.num_experts)
    return _Plan(
        order=jnp.argsort(local, stable=True),
        starts=jnp.cumsum(counts) - counts,
        counts=counts,
        ends=jnp.cumsum(-(-counts // block)),
        per_row=per_row,
        block=block,
    )


def _forward(call: _Call, nodes, x, experts, weights):
    layout = call.layout
    rows, chosen, scale = (_gather_rows(layout, v) for v in (x, experts, weights))
    plan = _plan(call, chosen, jax.tree.leaves(nodes)[0].shape[0])

    def add_experts(out: Array, nodes: Any, first: Array | int) -> Array:
        def add_block(index: Array, out: Array) -> Array:
            expert, choice, row = plan.rows(index)
            y = _expert(call, _take(nodes, expert - first), *_inputs(rows, scale, choice, row))
            return out.at[row].add(y, mode="drop")

        return jax.lax.fori_loop(*_block_range(plan, nodes, first), add_block, out)

    out = jnp.zeros(rows.shape, jnp.float32)
    if not layout.embed:
        out = add_experts(out, nodes, 0)
    else:

        def step(out: Array, operand: Any) -> tuple[Array, None]:
            return add_experts(out, _gather_expert(layout, operand[0], x.dtype), operand[1]), None

        out, _ = jax.lax.scan(step, out, (nodes, jnp.arange(plan.ends.size)))
    return _scatter_rows(layout, out, x.shape).astype(x.dtype)


def _backward(call: _Call, nodes, x, experts, weights, gradient):
    layout = call.layout
    rows, chosen, scale, d_out = (_gather_rows(layout, v) for v in (x, experts, weights, gradient))
    plan = _plan(call, chosen, jax.tree.leaves(nodes)[0].shape[0])

    def add_experts(sums: Any, nodes: Any, first: Array | int) -> tuple[Any, Any]:
        """(gradients of rows and weights, with those of these experts added; of the experts)."""

        def add_block(index: Array, carry: Any) -> Any:
            (d_rows, d_scale), d_nodes = carry
            expert, choice, row = plan.rows(index)
            node, arguments = _take(nodes, expert - first), _inputs(rows, scale, choice, row)
            _, pull = jax.vjp(functools.partial(_expert, call), node, *arguments)
            d_y = d_out.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)
            d_node, d_x, d_weight = pull(d_y)
            d_rows = d_rows.at[row].add(d_x.astype(jnp.float32), mode="drop")
            d_scale = d_scale.at[choice].add(d_weight, mode="drop")
            return (d_rows, d_scale), jax.tree.map(
                lambda total, part: total.at[expert - first].add(part.astype(jnp.float32)),
                d_nodes,
                d_node,
            )

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), nodes)
        return jax.lax.fori_loop(*_block_range(plan, nodes, first), add_block, (sums, zeros))

    sums = jnp.zeros(rows.shape, jnp.float32), jnp.zeros(scale.size, jnp.float32)
    if not layout.embed:
        sums, d_nodes = add_experts(sums, nodes, 0)
        d_nodes = _reduce_weights(layout, d_nodes)
    else:

        def step(sums: Any, operand: Any) -> tuple[Any, Any]:
            node, index = operand
            sums, d_node = add_experts(sums, _gather_expert(layout, node, x.dtype), index)
            return sums, jax.tree.map(lambda d: d[0], _reduce_weights(layout, d_node))

        sums, d_nodes = jax.lax.scan(step, sums, (nodes, jnp.arange(plan.ends.size)))
    d_nodes = jax.tree.map(lambda d, w: d.astype(w.dtype), d_nodes, nodes)
    d_rows, d_scale = sums
    d_x = _scatter_rows(layout, d_rows, x.shape).astype(x.dtype)
    d_weights = _scatter_rows(layout, d_scale.reshape(scale.shape), weights.shape)
    return d_nodes, d_x, d_weights.astype(weights.dtype)


def _expert(call: _Call, node: Any, x: Array, weight: Array) -> Float[Array, "block D"]:
    """weight * expert(x); with the hidden width sharded, this device's part of it."""
    parts = math.prod(jax.lax.axis_size(name) for name in call.layout.hidden)
    if parts > 1 and "bias" in node["down"]:
        node = {**node, "down": {**node["down"], "bias": node["down"]["bias"] / parts}}
    context = Context(
        config=call.config, inputs=ModelInputs(), shared=None, layer=0, cache=None, taps=Taps(())
    )
    return dense_feedforward(node, x, context).astype(jnp.float32) * weight[:, None]


def _inputs(rows: Array, scale: Array, choice: Array, row: Array) -> tuple[Array, Array]:
    """Rows and weights of a block; weight 0 where it is padding."""
    weight = scale.reshape(-1).at[choice].get(mode="fill", fill_value=0)
    return rows.at[row].get(mode="fill", fill_value=0), weight.astype(jnp.float32)


def _take(nodes: Any, index: Array) -> Any:
    take = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, nodes)


def _block_range(plan: _Plan, nodes: Any, first: Array | int) -> tuple[Array | int, Array]:
    """Blocks of the experts in `nodes`, of which `first` is the first."""
    last = first + jax.tree.leaves(nodes)[0].shape[0] - 1
    return jnp.where(first > 0, plan.ends[first - 1], 0), plan.ends[last]


def _gather_rows(layout: _Layout, x: Float[Array, "B T ..."]) -> Float[Array, "R ..."]:
    """Rows of all devices that hold other experts for them."""
    x = x.reshape(-1, *x.shape[2:])
    return jax.lax.all_gather(x, layout.gathered, tiled=True) if layout.gathered else x


def _scatter_rows(layout: _Layout, x: Float[Array, "R ..."], shape: tuple[int, ...]) -> Array:
    """Sums what devices computed for the same rows, and gives each its own back."""
    if layout.gathered:
        x = jax.lax.psum_scatter(x, layout.gathered, tiled=True)
    return (jax.lax.psum(x, layout.partial) if layout.partial else x).reshape(shape)


def _gather_expert(layout: _Layout, node: Any, dtype: Any) -> Any:
    """One expert whole along the embedding, in the compute type, with an expert axis of one."""

    def gather(path: tuple[Any, ...], leaf: Array) -> Array:
        leaf = leaf.astype(dtype)[None]
        for axis, names in enumerate(layout.weight_axes(path)):
            if axis > 0 and names == layout.embed:
                leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
        return leaf

    return jax.tree_util.tree_map_with_path(gather, node)


def _reduce_weights(layout: _Layout, gradients: Any) -> Any:
    """Sums gradients of weights over the devices of other rows, each keeping its shard."""
    others = [name for name in mesh_axes(*layout.rows) if name not in layout.experts]

    def reduce(path: tuple[Any, ...], leaf: Array) -> Array:
        rest = set(others)
        for axis, names in enumerate(layout.weight_axes(path)):
            if axis > 0 and names and names == layout.embed:
                leaf = scatter_axis(leaf, names, axis, rest)
                rest -= set(names)
        if path[-1].key == "bias" and path[0].key == "down":
            rest |= set(layout.hidden)
        return jax.lax.psum(leaf, tuple(sorted(rest))) if rest else leaf

    return jax.tree_util.tree_map_with_path(reduce, gradients)
