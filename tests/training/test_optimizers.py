"""Schedules follow their formulas; every optimizer descends; decay and Muon act where they
should.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.models import parameters
from jaxllm.training import optimizers, partition, state, step
from tests.training import toy

Schedule, Optimizer = optimizers.ScheduleConfig, optimizers.OptimizerConfig


def _course(name, i):
    """Learning rate after i updates for peak 2, 4 warm-up steps, 20 in all, end at a tenth."""
    if i < 4:
        return 2.0 * (i + 1) / 4
    done = min(1.0, (i - 4) / 16)
    if name == "constant":
        return 2.0
    if name == "linear":
        return 2.0 - 1.8 * done
    if name == "cosine":
        return 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * done))
    return 2.0 if i <= 14 else 2.0 - 1.8 * min(1.0, (i - 14) / 6)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_schedule_formula(name):
    schedule = optimizers.create_schedule(
        Schedule(name, peak=2.0, warmup_steps=4, total_steps=20, decay_steps=6)
    )
    values = [float(schedule(i)) for i in range(25)]
    np.testing.assert_allclose(values, [_course(name, i) for i in range(25)], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
def test_every_optimizer_learns(name):
    peak = {"adamw": 0.05, "adafactor": 0.05, "muon": 0.05, "sgd": 0.1}[name]
    config = Optimizer(name, Schedule("constant", peak=peak), weight_decay=0.01)
    optimizer = optimizers.create_optimizer(config)
    carried = state.create_state(toy.init, optimizer)
    train_step = step.make_train_step(toy.loss, optimizer)
    losses = []
    for i in range(30):
        carried, metrics = train_step(carried, toy.batch(i))
        losses.append(float(metrics["loss"].compute()))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_adamw_is_optax_adamw():
    params = toy.init()
    grads = jax.tree.map(lambda x: 0.01 * jnp.cos(x), params)
    config = Optimizer("adamw", Schedule("constant", peak=0.1), weight_decay=0.3, clip_norm=0.05)
    ours = optimizers.create_optimizer(config)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.3, mask=optimizers.decay_mask),
    )
    a, b = jax.jit(
        lambda: tuple(
            optimizer.update(grads, optimizer.init(params), params)[0]
            for optimizer in (ours, theirs)
        )
    )()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_decay_spares_norms_and_biases():
    params = {
        "embed": {"tokens": 1.0},
        "layers": (
            {
                "attention": {"q_norm": {"scale": 1.0}, "o": {"kernel": 1.0, "bias": 1.0}},
                "feedforward_norm": {"scale": 1.0},
                "feedforward_post_norm": {"bias": 1.0},
            },
        ),
        "final_norm": {"scale": 1.0},
        "lm_head": {"kernel": 1.0},
    }
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizers.decay_mask(params))
    decayed = {parameters.path_name(path) for path, value in leaves if value}
    assert decayed == {"embed/tokens", "layers/0/attention/o/kernel", "lm_head/kernel"}


def test_muon_orthogonalises_the_layers_only():
    params = toy.init()
    config = Optimizer("muon", Schedule("constant", peak=1.0), clip_norm=None)
    optimizer = optimizers.create_optimizer(config)
    grads = jax.tree.map(lambda x: jnp.sin(7 * x), params)
    updates, _ = jax.jit(lambda: optimizer.update(grads, optimizer.init(params), params))()
    for matrix in np.asarray(updates["layers"][0]["o"]["kernel"]):
        singular = np.linalg.svd(matrix / (0.2 * np.sqrt(toy.DIM)), compute_uv=False)
        assert np.all((singular > 0.5) & (singular < 1.5))
    # The first step of Adam moves every other value by the learning rate.
    for name in ("embed", "lm_head"):
        np.testing.assert_allclose(np.abs(jax.tree.leaves(updates[name])[0]), 1.0, rtol=1e-3)


def test_muon_leaves_routers_to_adam():
    layer = {
        "feedforward": {
            "router": {"kernel": jnp.ones((2, 4, 3))},
            "experts": {"down": {"kernel": jnp.ones((2, 3, 5, 4))}},
        },
        "attention": {"qkv": {"q": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))}}},
    }
    params = {"layers": (layer,), "lm_head": {"kernel": jnp.ones((4, 9))}}
    dimensions = optimizers.muon_dimensions(params)
    chosen = [
        parameters.path_name(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(
            dimensions, is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers)
        )
    ]
    assert chosen == ["layers/0/attention/qkv/q/kernel", "layers/0/feedforward/experts/down/kernel"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_leaves_stay_and_have_no_state(name):
    optimizer = optimizers.create_optimizer(Optimizer(name, Schedule("constant", peak=0.1)))
    chosen = partition.matching(r"^layers/")
    carried = state.create_state(toy.init, optimizer, trainable=chosen)
    moments = sum(x.size for x in jax.tree.leaves(carried.opt_state) if x.ndim)
    trained = sum(x.size for x in jax.tree.leaves(carried.params["layers"]))
    assert 0 < moments <= 2 * trained
    before = jax.device_get(carried.params)
    carried, _ = step.make_train_step(toy.loss, optimizer, trainable=chosen)(carried, toy.batch(0))
    after = jax.device_get(carried.params)
    for key in ("embed", "lm_head"):
        jax.tree.map(np.testing.assert_array_equal, after[key], before[key])
    kernels = (tree["layers"][0]["o"]["kernel"] for tree in (before, after))
    assert not np.array_equal(*kernels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer("adam"), "optimizer.name='adam'"),
        (lambda: Optimizer(b1=1.0), "optimizer.b1=1.0"),
        (lambda: Optimizer(clip_norm=0.0), "optimizer.clip_norm=0.0"),
        (lambda: Optimizer(weight_decay=-1.0), "optimizer.weight_decay=-1.0"),
        (lambda: Schedule("cosine"), "schedule.total_steps=None"),
        (lambda: Schedule("linear", warmup_steps=9, total_steps=9), "schedule.total_steps=9"),
        (lambda: Schedule("wsd", total_steps=9), "schedule.decay_steps=None"),
        (lambda: Schedule("step"), "schedule.name='step'"),
        (lambda: Schedule("constant", peak=0.0), "schedule.peak=0.0"),
    ],
)
def test_bad_configs_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
