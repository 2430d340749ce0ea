"""The training step: exact accumulation, guard, randomness, average, and independence of the
mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.training import metrics, optimizers, sharding, state, step
from jaxllm.training.metrics import Mean
from tests.training import toy

SGD = optimizers.create_optimizer(
    optimizers.OptimizerConfig(
        "sgd", optimizers.ScheduleConfig("constant", peak=0.1), momentum=0.0, clip_norm=0.2
    )
)
ADAM = optimizers.create_optimizer(
    optimizers.OptimizerConfig(schedule=optimizers.ScheduleConfig("constant", peak=0.02))
)


def _close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize("accumulate", [4, 8])
def test_accumulation_weighs_tokens_exactly(accumulate):
    batch = toy.batch(5)
    batch["weights"][::4] = 0.0  # with 8 microbatches some have no token at all
    results = []
    for count in (1, accumulate):
        carried = state.create_state(toy.init, SGD)
        results.append(step.make_train_step(toy.loss, SGD, accumulate=count)(carried, batch))
    (one, one_metrics), (many, many_metrics) = results
    _close(one.params, many.params, rtol=0, atol=1e-6)
    assert (
        set(one_metrics) == set(many_metrics) == {"loss", "accuracy", "gradient_norm", "nonfinite"}
    )
    _close(metrics.compute(one_metrics), metrics.compute(many_metrics), rtol=1e-6)
    assert float(many_metrics["loss"].weight) == batch["weights"].sum()


def test_gradient_is_clipped_after_accumulation():
    carried = state.create_state(toy.init, SGD)
    before = jax.device_get(carried.params)
    carried, made = step.make_train_step(toy.loss, SGD, accumulate=4)(carried, toy.batch(1))
    moved = jax.tree.map(lambda a, b: (a - b) / 0.1, jax.device_get(carried.params), before)
    norm = float(np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved))))
    assert made["gradient_norm"].compute() > 0.2
    np.testing.assert_allclose(norm, 0.2, rtol=1e-4)


def test_nonfinite_update_is_left_out():
    carried = state.create_state(toy.init, ADAM, ema=True)
    before = jax.device_get(carried)
    batch = toy.batch(0)
    batch["weights"][0, 0] = np.inf
    carried, made = step.make_train_step(toy.loss, ADAM, ema_decay=0.5)(carried, batch)
    assert float(made["nonfinite"].compute()) == 1.0
    assert int(carried.step) == 1
    after = jax.device_get(carried.replace(step=before.step))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_randomness_differs_by_step_and_repeats_by_seed():
    train_step = step.make_train_step(lambda p, b, r: _random_loss(p, r), SGD)

    def run(seed):
        carried = state.create_state(toy.init, SGD, seed=seed)
        values = []
        for _ in range(3):
            carried, made = train_step(carried, toy.batch(0))
            values.append(float(made["loss"].compute()))
        return values

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert len(set(first)) == 3 and not set(first) & set(other)


def _random_loss(params, rng):
    value = jax.random.uniform(rng) + 0.0 * params["lm_head"]["kernel"].sum()
    return value, {"loss": Mean.of(value)}


def test_ema_follows_the_formula():
    carried = state.create_state(toy.init, ADAM, ema=True)
    train_step = step.make_train_step(toy.loss, ADAM, ema_decay=0.75)
    expected = np.asarray(toy.init()["lm_head"]["kernel"])
    for i in range(3):
        carried, _ = train_step(carried, toy.batch(i))
        expected = 0.75 * expected + 0.25 * np.asarray(carried.params["lm_head"]["kernel"])
    np.testing.assert_allclose(carried.ema["lm_head"]["kernel"], expected, rtol=1e-5)


def test_learning_rate_is_reported():
    schedule = optimizers.create_schedule(optimizers.ScheduleConfig("linear", 1.0, 0, 10))
    carried = state.create_state(toy.init, SGD)
    train_step = step.make_train_step(toy.loss, SGD, schedule=schedule)
    carried, _ = train_step(carried, toy.batch(0))
    _, made = train_step(carried, toy.batch(1))
    np.testing.assert_allclose(made["learning_rate"].compute(), 0.91, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mesh_gives_the_same_numbers(accumulate):
    mesh = sharding.create_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    states = []
    for where in (None, mesh):
        carried = state.create_state(toy.init, ADAM, mesh=where, axes=toy.AXES, ema=True)
        train_step = step.make_train_step(
            toy.loss, ADAM, mesh=where, accumulate=accumulate, ema_decay=0.9
        )
        for i in range(4):
            carried, _ = train_step(carried, sharding.shard_batch(toy.batch(i, noise=0.1), where))
        states.append(carried)
    _close(jax.device_get(states[0]), jax.device_get(states[1]), rtol=1e-4, atol=1e-6)
    specs = {"params": states[1].params, "mu": states[1].opt_state[1].mu, "ema": states[1].ema}
    for tree in specs.values():
        assert tree["layers"][0]["o"]["kernel"].sharding.spec == P(None, "tensor", "fsdp")
        assert tree["embed"]["tokens"].sharding.spec == P(None, "fsdp")  # 13 words do not divide


def test_state_given_is_freed_and_parameters_given_are_not():
    params = toy.init()
    carried = state.create_state(params, SGD)
    step.make_train_step(toy.loss, SGD)(carried, toy.batch(0))
    assert carried.params["embed"]["tokens"].is_deleted()
    assert not params["embed"]["tokens"].is_deleted()


def test_eval_step_is_the_loss():
    params = toy.init()
    made = step.make_eval_step(toy.loss)(params, toy.batch(0))
    scalar, _ = toy.loss(params, toy.batch(0), jax.random.key(0))
    np.testing.assert_allclose(made["loss"].compute(), scalar, rtol=1e-6)


def test_errors_name_the_problem():
    carried = state.create_state(toy.init, SGD)
    with pytest.raises(ValueError, match="8 rows does not divide into 3"):
        step.make_train_step(toy.loss, SGD, accumulate=3)(carried, toy.batch(0))
    with pytest.raises(ValueError, match="accumulate=0"):
        step.make_train_step(toy.loss, SGD, accumulate=0)
    with pytest.raises(ValueError, match="'loss'"):
        step.make_train_step(lambda p, b, r: (jnp.zeros(()), {}), SGD)(carried, toy.batch(0))
