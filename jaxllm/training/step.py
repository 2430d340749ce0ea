"""One jitted training step and one jitted evaluation step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxllm.training import optimizers, partition, sharding
from jaxllm.training.metrics import Mean, Metrics
from jaxllm.training.state import TrainState, step_key

# loss(params, batch, rng) -> (scalar, metrics); the scalar is a mean whose weight is
# metrics["loss"].weight.
Loss = Callable[[Any, Any, Array], tuple[Float[Array, ""], Metrics]]


class TrainStep:
    """`step(state, batch) -> (state, metrics)`, compiled on the first call. The state given is
    freed.
    """

    def __init__(self, function: Callable, mesh: Mesh | None, rules: sharding.Rules | None):
        self._function, self._mesh, self._rules = function, mesh, rules
        self._jitted: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Mean]]:
        with sharding.use(self._mesh, self._rules):
            return self._jit(state)(state, batch)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lowers for concrete or abstract arguments (`ShapeDtypeStruct`s with shardings)."""
        with sharding.use(self._mesh, self._rules):
            return self._jit(state).lower(state, batch)

    def _jit(self, state: TrainState):
        if self._jitted is None:
            out = None
            if self._mesh is not None:
                layout = jax.tree.map(lambda x: x.sharding, state)
                out = (layout, sharding.replicated(self._mesh))
            self._jitted = jax.jit(self._function, donate_argnums=0, out_shardings=out)
        return self._jitted


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    accumulate: int = 1,
    trainable: partition.Predicate = partition.trainable,
    schedule: optax.Schedule | None = None,
    ema_decay: float | None = None,
) -> TrainStep:
    """A compiled step for a loss and an optimizer.

    The gradient of a batch is the mean over its tokens, whatever `accumulate` is: microbatch i,
    with weight w_i = metrics["loss"].weight, enters as sum_i w_i g_i / sum_i w_i before anything is
    clipped.

    If the loss or the gradient is not finite, the update is left out: parameters, optimizer state
      and
    average stay as they were (the step still counts), and the metric "nonfinite" is 1.

    Args:
      loss: see `Loss`.
      optimizer: what `optimizers.create_optimizer` returns, or any optax transformation.
      mesh: where it runs; None = one device.
      rules: mesh axes by logical name.
      accumulate: number of microbatches, which must divide the rows of a batch. Row r belongs to
        microbatch r modulo `accumulate`.
      trainable: which leaves are trained; must be what the state was created with.
      schedule: if given, its value is reported as "learning_rate".
      ema_decay: decay of the moving average, for states created with `ema=True`.

    Returns:
      The step. Metrics are those of the loss, and "gradient_norm" (before clipping), "nonfinite".
    """
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be at least 1.")

    def gradients(trained: Any, frozen: Any, batch: Any, key: Array):
        def weighted(trained: Any):
            scalar, metrics = loss(partition.combine(trained, frozen), batch, key)
            weight = jax.lax.stop_gradient(_loss_weight(metrics))
            return scalar * weight, (weight, metrics)

        (total, (weight, metrics)), grads = jax.value_and_grad(weighted, has_aux=True)(trained)
        return grads, (total, weight, dict(metrics))

    def accumulated(trained: Any, frozen: Any, batch: Any, key: Array):
        if accumulate == 1:
            return gradients(trained, frozen, batch, key)
        batches = _microbatches(batch, accumulate)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(accumulate))

        def add(carry: Any, part: Any):
            parts = gradients(trained, frozen, *part)
            return jax.tree.map(jnp.add, carry, parts), None

        first = jax.tree.map(lambda x: x[0], (batches, keys))
        shapes = jax.eval_shape(gradients, trained, frozen, *first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (batches, keys))[0]

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Mean]]:
        trained, frozen = partition.partition(state.params, trainable)
        key = step_key(state.seed, state.step, "loss")
        grads, (total, weight, metrics) = accumulated(trained, frozen, batch, key)
        scale = 1.0 / jnp.where(weight == 0, 1.0, weight)
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(total)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        updated = optax.apply_updates(trained, updates)
        ema = state.ema
        if ema is not None and ema_decay is not None:
            ema = optimizers.update_ema(ema, updated, ema_decay)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        after = dataclasses.replace(
            state,
            step=state.step + 1,
            params=partition.combine(keep(updated, trained), frozen),
            opt_state=keep(opt_state, state.opt_state),
            ema=keep(ema, state.ema),
        )
        metrics["gradient_norm"] = Mean.of(norm)
        metrics["nonfinite"] = Mean.of(1.0 - finite.astype(jnp.float32))
        if schedule is not None:
            metrics["learning_rate"] = Mean.of(jnp.asarray(schedule(state.step)))
        return after, metrics

    return TrainStep(step, mesh, rules)


def make_eval_step(
    loss: Loss, *, mesh: Mesh | None = None, rules: sharding.Rules | None = None
) -> Callable[[Any, Any], dict[str, Mean]]:
    """`step(params, batch) -> metrics`, without gradients, with the same random key for every
    batch.
    """

    @jax.jit
    def step(params: Any, batch: Any) -> dict[str, Mean]:
        _, metrics = loss(params, batch, step_key(0, 0, "evaluation"))
        return dict(metrics)

    def run(params: Any, batch: Any) -> dict[str, Mean]:
        with sharding.use(mesh, rules):
            return step(params, batch)

    return run


def _loss_weight(metrics: Metrics) -> Array:
    if not isinstance(metrics.get("loss"), Mean):
        raise ValueError(f"a loss needs metrics with a Mean named 'loss': {sorted(metrics)}.")
    return metrics["loss"].weight


def _microbatches(batch: Any, count: int) -> Any:
    """[B, ...] -> [count, B / count, ...]; strided, so that shards of rows stay on their
    devices.
    """

    def split(x: Array) -> Array:
        if x.shape[0] % count:
            raise ValueError(
                f"a batch of {x.shape[0]} rows does not divide into {count} microbatches."
            )
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)
