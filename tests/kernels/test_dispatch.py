"""Which body runs, on one device and on a mesh."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from tests.kernels.products import product

PARTITION = {"m": "rows", "k": "inner", "n": "columns"}


@pytest.fixture(scope="module")
def operands():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (16, 64)), jax.random.normal(keys[1], (64, 32))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("rows", "inner", "columns"), axis_types=(AxisType.Auto,) * 3)


def primitives(function, *arguments) -> str:
    return str(jax.make_jaxpr(function)(*arguments))


def test_a_program_holds_the_kernel_and_the_reference_and_runs_the_platforms(operands):
    traced = primitives(product, *operands)
    assert "pallas_call" in traced and "platform_index" in traced
    assert "pallas" not in jax.jit(product).lower(*operands).as_text()
    np.testing.assert_allclose(product(*operands), operands[0] @ operands[1], rtol=1e-5, atol=1e-5)


def test_an_implementation_can_be_forced(operands):
    forced = product(*operands, implementation="tpu", interpret=True)
    np.testing.assert_allclose(forced, operands[0] @ operands[1], rtol=1e-5, atol=1e-5)
    plain = primitives(lambda x, w: product(x, w, implementation="xla"), *operands)
    assert "pallas_call" not in plain
    with pytest.raises(ValueError, match="no gpu kernel for this: not written"):
        product(*operands, implementation="gpu")
    with pytest.raises(ValueError, match="implementation='cpu' is unknown"):
        product(*operands, implementation="cpu")


def test_what_a_kernel_cannot_do_goes_to_the_reference_with_one_reason(operands, caplog):
    dispatch._log_once.cache_clear()
    x, w = operands[0][:, :12], operands[1][:12]
    with caplog.at_level(logging.DEBUG, logger=dispatch.__name__):
        for _ in range(2):
            np.testing.assert_allclose(product(x, w), x @ w, rtol=1e-5, atol=1e-5)
    reasons = [r.getMessage() for r in caplog.records if "tpu" in r.getMessage()]
    assert reasons == ["product: plain JAX in place of the tpu kernel: k=12 is no multiple of 8."]
    assert "pallas_call" not in primitives(product, x, w)
    with pytest.raises(ValueError, match="k=12 is no multiple of 8"):
        product(x, w, implementation="tpu")


@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        (PartitionSpec("rows", "inner"), PartitionSpec("inner", "columns")),
        (PartitionSpec(), PartitionSpec(None, ("rows", "columns"))),
    ],
)
def test_a_mesh_gives_what_one_device_gives(operands, mesh, x_spec, w_spec):
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(operands, (x_spec, w_spec), strict=True)
    ]
    want = operands[0] @ operands[1]

    @jax.jit
    def both(x, w):
        def step(carry, _):
            return carry, product(x, w, partition=PARTITION)

        kernel = product(x, w, implementation="tpu", interpret=True, partition=PARTITION)
        return kernel, jax.lax.scan(step, 0, None, length=2)[1]

    with jax.set_mesh(mesh):
        kernel, scanned = both(*placed)
    np.testing.assert_allclose(kernel, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(scanned[1], want, rtol=1e-5, atol=1e-4)
    assert kernel.sharding.spec == PartitionSpec("rows", "columns")


def test_on_a_mesh_without_a_partition_xla_cuts_the_reference(operands, mesh):
    with jax.set_mesh(mesh):
        assert "pallas_call" not in primitives(product, *operands)
        np.testing.assert_allclose(
            jax.jit(product)(*operands), operands[0] @ operands[1], rtol=1e-5, atol=1e-4
        )
        with pytest.raises(ValueError, match="`partition` does not say"):
            product(*operands, implementation="tpu")


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"q": "rows"}, "cannot cut 'q': expected dimensions among"),
        ({"m": "layers"}, r"names mesh axes \['layers'\]"),
        ({"m": "rows", "n": "rows"}, "uses a mesh axis twice"),
        ({"m": ("rows", "inner", "columns")}, "dimension 'm' of size 12 cannot be cut into 8"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(operands, mesh, partition, message):
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        product(operands[0][:12], operands[1], partition=partition)


def test_a_mesh_of_one_device_needs_no_partition(operands):
    one = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(one):
        assert "pallas_call" in primitives(product, *operands)
        result = jax.jit(product)(*operands)
    np.testing.assert_allclose(result, operands[0] @ operands[1], rtol=1e-5, atol=1e-5)
