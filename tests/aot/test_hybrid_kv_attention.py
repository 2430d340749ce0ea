"""Attention over heads of two kinds compiles for TPUs, in one kernel and without a copy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.hybrid_kv_attention import hybrid_kv_attention
from tests.aot.kernels import compiled
from tests.aot.programs import needs_libtpu


def program(devices, counts=(2, 4), slots=(1300, 512), shared=4, time=1, width=128):
    """Compiles a step of a cache of two rows; its kernels and temporaries."""
    one = len(devices) == 1
    grid = np.array(devices).reshape((1, 1) if one else (2, len(devices) // 2))
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def operand(*shape, dtype=jnp.bfloat16, heads=1):
        spec = ["data", *[None] * (len(shape) - 1)]
        spec[heads] = "tensor"
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    caches = [operand(2, n, s, width) for n, s in zip(counts, slots, strict=True) for _ in range(2)]
    lengths = [operand(2, n, dtype=jnp.int32) for n in counts]
    q = operand(2, time, sum(counts) * shared, width, heads=2)
    partition = None if one else {"b": "data", "k": "tensor"}
    attend = functools.partial(hybrid_kv_attention, partition=partition)
    with jax.set_mesh(mesh):
        done = jax.jit(attend).lower(q, *caches, *lengths).compile()
    return {
        "kernels": done.as_text().count("tpu_custom_call"),
        "temporaries": done.memory_analysis().temp_size_in_bytes,
    }


def paper(devices):
    """Llama-3-8B-1M at 131,072 tokens: 3 of 8 key heads adaptive, 2,048 tokens in the others."""
    return program(devices, counts=(3, 5), slots=(131072, 2304))


def draft(devices):
    return program(devices, counts=(0, 4), slots=(0, 2304), time=5, width=64)


@needs_libtpu
def test_four_tpu_chips():
    assert compiled("v5e:2x2", __name__, "program")["kernels"] >= 1


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("slice_name", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
@pytest.mark.parametrize("function", ["paper", "draft"])
def test_tpus(slice_name, function):
    result = compiled(slice_name, __name__, function)
    assert result["kernels"] >= 1
    # Of arrays that are 64 wide the compiler may choose another layout at the program's edge.
    if function == "paper":
        assert result["temporaries"] < 4e6
