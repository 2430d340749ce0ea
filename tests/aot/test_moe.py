"""Experts compile for TPUs, also on four chips and with gradients; an H200 has the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.moe import expert_feedforward
from tests.aot.kernels import compiled
from tests.aot.programs import needs_cuda_plugin, needs_libtpu


def program(devices, tokens=64, count=8, width=512, hidden=1024, train=False):
    """Compiles a gated mixture of two experts a token; its kernels and temporaries."""
    one = len(devices) == 1
    mesh = Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,))

    def operand(*shape, dtype=jnp.bfloat16, axis=None):
        where = NamedSharding(mesh, PartitionSpec(axis))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    matrix = functools.partial(operand, axis="expert")
    arguments = (
        operand(tokens, width),
        operand(tokens, 2, dtype=jnp.int32),
        operand(tokens, 2, dtype=jnp.float32),
        matrix(count, width, hidden),
        matrix(count, hidden, width),
        matrix(count, width, hidden),
    )
    function = functools.partial(expert_feedforward, partition=None if one else {"e": "expert"})

    def loss(*arguments):
        return function(*arguments).astype(jnp.float32).sum()

    step = jax.grad(loss, argnums=(0, 3, 4, 5)) if train else function
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower(*arguments)
        done = lowered.compile()
    return {
        # The compiled program cannot always print itself. Products of one shape count once.
        "kernels": lowered.as_text().count("tpu_custom_call"),
        "temporaries": done.memory_analysis().temp_size_in_bytes,
    }


def train(devices):
    return program(devices, train=True)


def mixtral_decode(devices):
    return program(devices, tokens=8, width=4096, hidden=14336)


def mixtral_prefill(devices):
    return program(devices, tokens=4096, width=4096, hidden=14336)


@needs_libtpu
def test_four_tpu_chips():
    assert compiled("v5e:2x2", __name__, "program")["kernels"] == 2


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("slice_name", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
def test_mixtral(slice_name):
    if slice_name == "v5p:1x1x1":
        # Products of rows and of matrices, forward and backward.
        assert compiled(slice_name, __name__, "train")["kernels"] >= 5
    decode = compiled(slice_name, __name__, "mixtral_decode")
    # Nothing as large as one expert's matrix is copied.
    assert decode["kernels"] == 2 and decode["temporaries"] < 4096 * 14336 * 2 / 10
    prefill = compiled(slice_name, __name__, "mixtral_prefill")
    # Rows of the choices, hidden ones three times at most, and results.
    rows = 2 * 4096
    assert prefill["temporaries"] < 2 * rows * (3 * 14336 + 4 * 4096) * 1.1


@needs_cuda_plugin
@pytest.mark.aot
def test_an_h200_takes_the_reference():
    assert compiled("h200", __name__, "program")["kernels"] == 0
