"""Everything a training run carries from step to step, created in place on its mesh."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt

from jaxllm.training import partition, sharding


@flax.struct.dataclass
class TrainState:
    """The carried state; a pytree of arrays only.

    Attributes:
      step: number of steps done, which is also the index of the next batch.
      params: all parameters, trained and frozen.
      opt_state: optimizer state of the trained ones.
      ema: moving average of the trained parameters (None holes for the frozen), or None.
      seed: seed of all randomness in the step; see `step_key`.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    ema: Any
    seed: UInt[Array, ""]


def step_key(seed: Array | int, step: Array | int, purpose: str) -> Array:
    """The key of one purpose in one step: the same on any number of devices and after a resume."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()))


def create_state(
    params: Any | Callable[[], Any],
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    ema: bool = False,
    trainable: partition.Predicate = partition.trainable,
    mesh: Mesh | None = None,
    axes: Any = None,
    rules: sharding.Rules | None = None,
) -> TrainState:
    """A state at step 0, every part created on its own shard.

    Args:
      params: the parameter tree (moved to the mesh if it is not there; the state takes copies,
        because a training step frees the state it is given), or a function that makes it.
      optimizer: its state is made for the trainable leaves only.
      seed: of everything random during training.
      ema: also keep a moving average of the trained parameters, in float32.
      trainable: which leaves are trained, by path and leaf.
      mesh: None = the default device.
      axes: logical axes of the parameters (`models.parameters.logical_axes`); None = replicated.
      rules: mesh axes by logical name.
    """
    build, given = _builder(params, optimizer, seed, ema, trainable)
    if mesh is None:
        return jax.jit(build)(given)
    shardings = state_shardings(jax.eval_shape(build, given), mesh, axes, rules)
    if given is not None:
        given = jax.device_put(given, shardings.params)
    with sharding.use(mesh, rules):
        return jax.jit(build, out_shardings=shardings)(given)


def abstract_state(
    params: Any | Callable[[], Any],
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    ema: bool = False,
    trainable: partition.Predicate = partition.trainable,
    mesh: Mesh | None = None,
    axes: Any = None,
    rules: sharding.Rules | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of what `create_state` makes, without making it.

    A target to restore a checkpoint into, and an argument to compile ahead of time for. `params`
    may be `ShapeDtypeStruct`s.
    """
    shapes = jax.eval_shape(*_builder(params, optimizer, seed, ema, trainable))
    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = jax.tree.map(lambda x: here, shapes)
    else:
        placed = state_shardings(shapes, mesh, axes, rules)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, placed
    )


def _builder(params, optimizer, seed, ema, trainable):
    """(function, argument) whose value is the state."""
    make = params if callable(params) else None

    def build(given: Any) -> TrainState:
        tree = make() if make else jax.tree.map(jnp.copy, given)
        trained, _ = partition.partition(tree, trainable)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=tree,
            opt_state=optimizer.init(trained),
            ema=jax.tree.map(lambda x: x.astype(jnp.float32), trained) if ema else None,
            seed=jnp.asarray(seed, jnp.uint32),
        )

    return build, None if make else params


def state_shardings(
    state: TrainState, mesh: Mesh, axes: Any, rules: sharding.Rules | None = None
) -> TrainState:
    """A sharding for every leaf: whatever has a parameter's path and shape lies as the parameter
    does.

    Optimizer states hold trees like the parameters (moments) beside counters; leaves that match no
    parameter (counters, factored moments) are replicated.

    Args:
      state: a state, concrete or abstract.
      mesh: the mesh.
      axes: logical axes of the parameters; None = replicated.
      rules: mesh axes by logical name.
    """
    params = sharding.named_shardings(state.params, axes, mesh, rules)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.params)
    by_path = {
        path: (leaf.shape, placed)
        for (path, leaf), placed in zip(leaves, jax.tree.leaves(params), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.NamedSharding:
        for start in range(len(path)):
            shape, placed = by_path.get(path[start:], (None, None))
            if shape == leaf.shape:
                return placed
        return sharding.replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state).replace(params=params)
