"""Checkpoints: exact, typed, on any mesh, the newest n; what does not fit is refused by name."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.weights import Weight
from jaxllm.training import optimizers, sharding, state
from jaxllm.training.checkpoints import CheckpointError, Checkpoints, DamagedError
from tests.training import toy

# Reads that orbax leaves behind where one has failed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def collected():
    yield
    gc.collect()


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


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2, with an array large enough for a file of its own."""
    folder = tmp_path_factory.mktemp("two")
    optimizer = optimizers.create_optimizer(optimizers.OptimizerConfig("sgd"))
    large = jax.random.normal(jax.random.key(0), (100, 100))
    carried = state.create_state({"kernel": large, "scale": jnp.ones(3)}, optimizer)
    with contextlib.closing(Checkpoints(folder, fingerprint=FINGERPRINT)) as store:
        for step in (1, 2):
            store.save(_at(carried, step))
    return folder, carried


def _cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _largest(folder):
    return max(folder.glob("state/ocdbt*/d/*"), key=lambda file: file.stat().st_size)


DAMAGES = {
    "array cut": lambda two: _cut(_largest(two)),
    "array gone": lambda two: _largest(two).unlink(),
    "index cut": lambda two: _cut(two / "state" / "manifest.ocdbt"),
    "tree cut": lambda two: _cut(next((two / "state" / "d").iterdir())),
    "description cut": lambda two: _cut(two / "state" / "_METADATA"),
    "description gone": lambda two: (two / "state" / "_METADATA").unlink(),
    "json cut": lambda two: _cut(two / "fingerprint" / "metadata"),
    "json gone": lambda two: (two / "data" / "metadata").unlink(),
    "json of another step": lambda two: (two / "data" / "metadata").write_text('{"next_index": 9}'),
    "item gone": lambda two: shutil.rmtree(two / "state"),
    "empty folder": lambda two: (shutil.rmtree(two), two.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resumes_from_the_one_before_a_damaged_one(tmp_path, two_saved, caplog, damage):
    folder, carried = two_saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "2")
    with contextlib.closing(Checkpoints(tmp_path, fingerprint=FINGERPRINT)) as store:
        restored, _ = store.resume(carried)
        jax.tree.map(np.testing.assert_array_equal, restored, _at(carried, 1))
        [record] = [r for r in caplog.records if r.name == "jaxllm.training.checkpoints"]
        for name in (tmp_path / "2", tmp_path / "1", "aside as damaged-2"):
            assert str(name) in record.message
        assert store.steps() == [1] and (tmp_path / "damaged-2").is_dir()
        store.save(_at(carried, 2))
        store.wait()
        assert int(store.resume(carried)[0].step) == 2 and not store.check()


def test_damage_everywhere_is_an_error_that_touches_nothing(tmp_path, two_saved):
    folder, carried = two_saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for step in "12":
        _cut(_largest(tmp_path / step))
    for _ in range(2):  # a second try must not start anew
        with contextlib.closing(Checkpoints(tmp_path, fingerprint=FINGERPRINT)) as store:
            with pytest.raises(DamagedError, match=f"no checkpoint.*{tmp_path}/2: .*/1: ") as error:
                store.resume(carried)
    assert "\n" not in str(error.value)
    with contextlib.closing(Checkpoints(tmp_path, fingerprint=FINGERPRINT)) as store:
        with pytest.raises(DamagedError, match=f"cannot read state of checkpoint {tmp_path}/1"):
            store.restore(carried, 1)
        assert store.steps() == [1, 2]


def test_what_does_not_fit_or_may_pass_is_not_damage(tmp_path, two_saved, monkeypatch):
    folder, carried = two_saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with contextlib.closing(Checkpoints(tmp_path, fingerprint=FINGERPRINT | {"seed": 1})) as store:
        with pytest.raises(CheckpointError, match="seed=0, this run has seed=1") as error:
            store.resume(carried)
        assert not isinstance(error.value, DamagedError)
    with contextlib.closing(Checkpoints(tmp_path, fingerprint=FINGERPRINT)) as store:
        other = carried.replace(params=carried.params | {"scale": jnp.ones(4)})
        with pytest.raises(CheckpointError, match="of another model: params/scale") as error:
            store.resume(other)
        assert not isinstance(error.value, DamagedError)

        def busy(*unused, **also):
            raise ValueError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(store._handlers["state"], "restore", busy)
        with pytest.raises(CheckpointError, match="RESOURCE_EXHAUSTED") as error:
            store.resume(carried)
        assert not isinstance(error.value, DamagedError)
        assert store.steps() == [1, 2]


def test_nothing_to_restore(tmp_path):
    store = Checkpoints(tmp_path)
    assert store.latest_step() is None and store.resume(_state()) is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.restore(_state())
    store.close()
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
