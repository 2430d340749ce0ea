"""Checkpoints: exact, typed, on any mesh, the newest n; what does not fit is refused by name."""

from __future__ import annotations

import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.weights import Weight
from jaxllm.training import optimizers, sharding, state
from jaxllm.training.checkpoints import CheckpointError, Checkpoints
from tests.training import toy

FINGERPRINT = {"seed": 0, "batch_size": 8, "rows": {"manifest": "a1", "shape": (8, 6)}}


def _state(mesh=None, config=None, init=toy.init):
    optimizer = optimizers.create_optimizer(config or optimizers.OptimizerConfig())
    return state.create_state(init, optimizer, mesh=mesh, axes=toy.AXES, ema=True)


def _at(carried, step):
    return carried.replace(step=jnp.asarray(step, jnp.int32))


def test_round_trip_is_exact_typed_and_keeps_n(tmp_path):
    carried = _state()
    with_noise = carried.replace(params=jax.tree.map(jnp.sin, carried.params))
    store = Checkpoints(tmp_path, keep=2, fingerprint=FINGERPRINT)
    for step in (1, 2, 3):
        store.save(_at(with_noise, step), {"window": {"loss": [0.1 + 0.2, 3.0]}})
    store.wait()
    assert store.steps() == [2, 3] and store.latest_step() == 3
    target = state.abstract_state(
        toy.init, optimizers.create_optimizer(optimizers.OptimizerConfig()), ema=True
    )
    restored, extra = store.restore(target)
    assert jax.tree.structure(restored) == jax.tree.structure(carried)  # tuples stay tuples
    jax.tree.map(np.testing.assert_array_equal, restored, _at(with_noise, 3))
    assert extra == {"window": {"loss": [0.1 + 0.2, 3.0]}}
    assert int(store.restore(carried, 2)[0].step) == 2
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_restores_onto_another_mesh(tmp_path):
    store = Checkpoints(tmp_path, fingerprint=FINGERPRINT)
    saved = _at(_state(sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))), 1)
    store.save(saved)
    for mesh in (None, sharding.create_mesh(sharding.MeshConfig(data=4, fsdp=2))):
        target = _state(mesh)
        restored, _ = store.restore(target)
        jax.tree.map(np.testing.assert_array_equal, restored.params, saved.params)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
            lambda x: x.sharding, target
        )
    store.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    carried = _state()
    store = Checkpoints(folder, fingerprint=FINGERPRINT)
    store.save(_at(carried, 7))
    store.close()
    return folder, carried


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed=0, this run has seed=1"),
        ({"batch_size": 16}, "batch_size=8, this run has batch_size=16"),
        ({"rows": {"manifest": "b2", "shape": [8, 6]}}, "rows.manifest='a1', this run has"),
        ({"new_field": 1}, "new_field=None, this run has new_field=1"),
    ],
)
def test_other_data_are_refused_naming_the_field(saved, change, field):
    folder, carried = saved
    store = Checkpoints(folder, fingerprint=FINGERPRINT | change)
    with pytest.raises(CheckpointError, match=re.escape(field)):
        store.restore(carried)
    store.close()


def test_other_models_and_optimizers_are_refused_naming_the_leaf(saved):
    folder, carried = saved

    def wide():
        params = toy.init()
        return params | {"lm_head": {"kernel": jnp.ones((toy.DIM, 20))}}

    def more():
        return toy.init() | {"extra": {"kernel": jnp.ones(3)}}

    store = Checkpoints(folder, fingerprint=FINGERPRINT)
    sgd = optimizers.OptimizerConfig("sgd")
    for target, message in (
        (_state(init=wide), "params/lm_head/kernel: the checkpoint has"),
        (_state(init=more), "params/extra: only the model has it"),
        (_state(config=sgd), "opt_state"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            store.restore(target)
    with pytest.raises(CheckpointError, match=r"no checkpoint .*8: there are \[7\]"):
        store.restore(carried, 8)
    store.close()


@flax.struct.dataclass
class Scaled(Weight):
    """A container with a static field, which orbax does not save."""

    array: jax.Array
    factor: int = flax.struct.field(pytree_node=False, default=2)


def test_static_fields_of_containers_are_checked(tmp_path):
    def init(factor):
        return toy.init() | {"lm_head": {"kernel": Scaled(jnp.ones((4, 13)), factor)}}

    optimizer = optimizers.create_optimizer(optimizers.OptimizerConfig())
    two, three = (state.create_state(init(factor), optimizer) for factor in (2, 3))
    store = Checkpoints(tmp_path)
    store.save(two)
    restored, _ = store.restore(two)
    assert restored.params["lm_head"]["kernel"].factor == 2
    with pytest.raises(CheckpointError, match="params/lm_head/kernel: .*'factor': 2.*'factor': 3"):
        store.restore(three)
    store.close()


def test_damage_is_named_and_the_one_before_still_loads(tmp_path):
    carried = _state()
    store = Checkpoints(tmp_path, fingerprint=FINGERPRINT)
    for step in (1, 2):
        store.save(_at(carried, step))
    store.close()
    for file in (tmp_path / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    store = Checkpoints(tmp_path, fingerprint=FINGERPRINT)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "2"))):
        store.restore(carried)
    assert int(store.restore(carried, 1)[0].step) == 1
    store.close()


def test_nothing_to_restore(tmp_path):
    store = Checkpoints(tmp_path)
    assert store.latest_step() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.restore(_state())
    store.close()
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
