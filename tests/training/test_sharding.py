"""Meshes that fit or are refused; rules that become shardings."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxllm.training import sharding


@pytest.fixture(scope="module")
def mesh():
    return sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))


def test_mesh_sizes(mesh):
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1, "context": 1}
    filled = sharding.MeshConfig(data=-1, fsdp=2).sizes(8)
    assert filled == {"data": 4, "fsdp": 2, "tensor": 1, "expert": 1, "context": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sharding.create_mesh(sharding.MeshConfig(fsdp=4)), "needs 4 devices, there are 8"),
        (lambda: sharding.create_mesh(sharding.MeshConfig(tensor=3)), "multiple of 3 devices"),
        (lambda: sharding.MeshConfig(data=-1, fsdp=-1), r"\['data', 'fsdp'\]"),
        (lambda: sharding.MeshConfig(expert=0), "mesh.expert=0"),
        (lambda: sharding.MeshConfig(across_slices="rows"), "mesh.across_slices='rows'"),
    ],
)
def test_bad_meshes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["vocab", "embed", "heads", "mlp", "norm", "batch"]), st.integers(1, 24)
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda x: x[0],
    )
)
def test_specs_always_divide_and_never_repeat(dimensions):
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))
    axes, shape = zip(*dimensions, strict=True)
    spec = sharding.partition_spec(shape, axes, mesh)
    used = sharding.mesh_axes(*spec)
    assert len(used) == len(set(used))
    for size, entry in zip(shape, spec, strict=True):
        names = sharding.mesh_axes(entry)
        assert size % np.prod([mesh.shape[name] for name in names], dtype=int) == 0


def test_specs_by_example(mesh):
    assert sharding.partition_spec((32, 16), ("vocab", "embed"), mesh) == P("tensor", "fsdp")
    assert sharding.partition_spec((2, 16, 6), ("layers", "embed", "mlp"), mesh) == P(
        None, "fsdp", "tensor"
    )
    assert sharding.partition_spec((16, 5), ("embed", "mlp"), mesh) == P("fsdp", None)
    assert sharding.partition_spec((6, 4), ("embed", "mlp"), mesh) == P(None, "tensor")
    assert sharding.partition_spec((4,), None, mesh) == P(None)
    with pytest.raises(ValueError, match="'colour'"):
        sharding.partition_spec((4,), ("colour",), mesh)
    with pytest.raises(ValueError, match="do not fit"):
        sharding.partition_spec((4,), ("embed", "mlp"), mesh)


def test_errors_name_the_parameter(mesh):
    with pytest.raises(ValueError, match="layers/0/kernel: .*'colour'"):
        sharding.named_shardings(
            {"layers": ({"kernel": jnp.ones((4, 4))},)},
            {"layers": ({"kernel": P("embed", "colour")},)},
            mesh,
        )


def test_batches_lie_over_the_batch_axes(mesh):
    batch = {"tokens": np.arange(32).reshape(8, 4), "scale": np.ones(8)}
    placed = sharding.shard_batch(batch, mesh)
    assert placed["tokens"].sharding.spec[0] == "fsdp"
    assert placed["tokens"].addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(placed["tokens"], batch["tokens"])
    with pytest.raises(ValueError, match="6 rows does not divide over the 4 devices"):
        sharding.shard_batch({"tokens": np.ones((6, 4))}, mesh)


def test_logical_constraints_act_only_inside_use(mesh):
    @jax.jit
    def f(x):
        return nn.with_logical_constraint(2 * x, ("batch", "act_mlp"))

    assert len(f(jnp.ones((8, 4))).sharding.device_set) == 1
    with sharding.use(mesh):
        inside = jax.jit(lambda x: f(x))(jnp.ones((8, 4)))
    assert inside.sharding.spec == P("fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """As much of a TPU device as the layout of a mesh looks at."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    torus: tuple[int, int, int] = (2, 2, 1)

    @property
    def coords(self):
        return tuple(int(i) for i in np.unravel_index(self.id % np.prod(self.torus), self.torus))


def slices(count):
    return [SliceDevice(id=i, slice_index=i // 4, process_index=i // 4) for i in range(4 * count)]


def slice_of(mesh):
    return np.vectorize(lambda device: device.slice_index)(mesh.devices)


def test_one_axis_lies_across_slices_and_the_others_within():
    mesh = sharding.create_mesh(sharding.MeshConfig(data=4, fsdp=2), slices(2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1, "expert": 1, "context": 1}
    along = slice_of(mesh).reshape(4, 2)
    np.testing.assert_array_equal(along, np.repeat([0, 1], 2)[:, None] + np.zeros(2, int))
    config = sharding.MeshConfig(fsdp=4, tensor=2, across_slices="fsdp")
    along = slice_of(sharding.create_mesh(config, slices(2))).reshape(4, 2)
    np.testing.assert_array_equal(along[:, 0], [0, 0, 1, 1])


def test_axes_may_split_those_of_the_torus():
    devices = [SliceDevice(i, 0, i // 4, device_kind="TPU v5", torus=(4, 4, 4)) for i in range(64)]
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=8, expert=8), devices)
    assert (mesh.shape["fsdp"], mesh.shape["expert"]) == (8, 8)
    assert len({device.id for device in mesh.devices.flat}) == 64


def test_an_axis_that_does_not_cover_the_slices_is_refused():
    with pytest.raises(ValueError, match="2 slices: mesh.data=1, the axis across slices"):
        sharding.create_mesh(sharding.MeshConfig(fsdp=8), slices(2))
    with pytest.raises(ValueError, match="3 slices: mesh.data=2"):
        sharding.create_mesh(sharding.MeshConfig(data=2, fsdp=6), slices(3))
