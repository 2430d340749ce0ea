"""The selection bias of routers follows their load, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest

from experiments import config_files, pretrain
from jaxllm.models import decoder, parameters
from jaxllm.models.config import ModelConfig, MoEConfig
from jaxllm.training import balance, loop, objectives, sharding, state, step

RATE = 0.01
MODEL = ModelConfig(
    vocab_size=32,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    mlp_dim=8,
    initializer_range=0.3,
    moe=MoEConfig(8, 2, 8, scoring="sigmoid", selection_bias=True, bias_update_rate=RATE),
)


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 32, (8, 13)).astype(np.int32)
    weights = np.ones((8, 12), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def train(batches, mesh=None):
    """Parameters after each of some steps in which nothing but selection biases moves."""
    optimizer = balance.balance_routers(optax.set_to_zero(), MODEL)
    current = state.create_state(
        parameters.init_params(MODEL, jax.random.key(0)),
        optimizer,
        mesh=mesh,
        axes=parameters.logical_axes(MODEL),
    )
    run = step.make_train_step(objectives.language_model_loss(MODEL), optimizer, mesh=mesh)
    history = []
    for batch in batches:
        current, _ = run(current, sharding.shard_batch(batch, mesh))
        history.append(jax.device_get(current.params))
    return history, current.params


@pytest.fixture(scope="module")
def start():
    return parameters.init_params(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def history(batch):
    spoilt = batch | {"weights": np.full_like(batch["weights"], np.nan)}
    return train([batch] * 40 + [spoilt])[0]


@pytest.fixture(scope="module")
def load(batch):
    """params -> [L, E] share of the choices that went to each expert."""

    @jax.jit
    def measure(params):
        (aux,) = decoder.forward(MODEL, params, batch["tokens"]).aux
        return aux["load"]

    return measure


def test_one_step_moves_each_bias_against_its_excess_load(start, history, load):
    expected = -RATE * np.sign(np.asarray(load(start)) - 1 / 8)
    router = history[0]["layers"][0]["feedforward"].router
    np.testing.assert_allclose(router["bias"], expected, atol=1e-7)
    kernel = start["layers"][0]["feedforward"].router["kernel"]
    np.testing.assert_array_equal(router["kernel"], kernel)


def test_load_becomes_even(start, history, load):
    highest = [8 * float(load(params).max(axis=-1).mean()) for params in (start, history[39])]
    assert highest[0] > 1.4 and highest[1] < 1.2


def test_a_step_that_is_not_finite_moves_no_bias(history):
    jax.tree.map(np.testing.assert_array_equal, history[40], history[39])


def test_a_mesh_updates_alike(batch, history):
    _, placed = train([batch] * 3, sharding.create_mesh(sharding.MeshConfig(fsdp=2, expert=4)))
    for one, other in zip(jax.tree.leaves(history[2]), jax.tree.leaves(placed), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)
    bias = placed["layers"][0]["feedforward"].router["bias"]
    assert bias.sharding.spec[1] == "expert"


# Compiles fast.
SMALL = MODEL.replace(num_layers=1, moe=dataclasses.replace(MODEL.moe, execution="every"))


FREQUENCIES = np.arange(2, 34) ** -0.7


class Loader:
    """Batches in which some tokens are more frequent than others."""

    def iterator(self, start_step=0):
        for i in itertools.count(start_step):
            yield self.batch(i)

    def batch(self, i):
        rng = np.random.default_rng([7, i])
        tokens = rng.choice(32, (8, 13), p=FREQUENCIES / FREQUENCIES.sum()).astype(np.int32)
        weights = np.ones((8, 12), np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

    def fingerprint(self):
        return {}


def test_pre_training_evens_the_load(tmp_path):
    @jax.jit
    def load_of_small(params, tokens):
        (aux,) = decoder.forward(SMALL, params, tokens).aux
        return aux["load"]

    overrides = ["train.steps=150", "optimizer.peak=0.002", "optimizer.name=adamw"]
    config = config_files.resolve("pretrain:tiny", overrides).config
    result = loop.train(
        loop.LoopConfig(150, progress=False, tensorboard=False),
        loss=objectives.language_model_loss(SMALL),
        params=lambda: parameters.init_params(SMALL, jax.random.key(0)),
        optimizer=pretrain.make_optimizer(config, SMALL),
        loader=Loader(),
        workdir=tmp_path,
    )
    assert result.metrics["loss"] < 3.5  # from 3.7
    trained = result.state.params
    without = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if parameters.path_name(path).endswith("router/bias") else x, trained
    )
    excess = []
    for params in (trained, without):
        shares = [load_of_small(params, Loader().batch(1000 + i)["tokens"]) for i in range(8)]
        excess.append(8 * float(np.mean(shares, axis=0).max()) - 1)
    assert excess[0] < 0.4 and excess[1] > 0.8


def test_nothing_is_wrapped_without_a_rate():
    optimizer = optax.sgd(0.1)
    assert balance.balance_routers(optimizer, MODEL.replace(moe=None)) is optimizer
    with pytest.raises(ValueError, match="bias_update_rate=0.1 must be 0, or positive with"):
        MoEConfig(8, 2, 8, bias_update_rate=0.1)
