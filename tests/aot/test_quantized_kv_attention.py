"""Attention over packed caches compiles for TPUs and an H200, and reads no more than is packed."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantized_kv_attention import (
    empty_keys,
    empty_values,
    quantized_kv_attention,
)
from tests.aot.kernels import compiled
from tests.aot.programs import needs_cuda_plugin, needs_libtpu

WIDTHS = (2, 4, 8)


def program(
    devices,
    key_bits=4,
    value_bits=2,
    slots=1024,
    width=128,
    time=1,
    shared=4,
    kv_heads=4,
    **options,
):
    """Compiles a step of a cache of two rows; its kernels, and bytes in and between."""
    one = len(devices) == 1
    grid = np.array(devices).reshape((1, 1) if one else (2, len(devices) // 2))
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    partition = None if one else {"b": "data", "k": "tensor"}
    group, value_group = options.get("group", 128), options.get("value_group", width)
    recent = options.get("recent", 128 + time)

    def operands():
        rows = 2
        exact = jnp.zeros((rows, kv_heads, recent, width), jnp.bfloat16)
        return (
            jnp.zeros((rows, time, kv_heads * shared, width), jnp.bfloat16),
            empty_keys(rows, kv_heads, slots, width, bits=key_bits, group=group),
            empty_values(rows, kv_heads, slots, width, bits=value_bits, group=value_group),
            exact,
            exact,
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, recent), jnp.int32),
            jnp.zeros((rows, time), jnp.int32),
        )

    def placed(index, leaf):
        heads = "tensor" if leaf.ndim > 3 else None
        spec = ["data", heads, None, None, None][: leaf.ndim]
        if index == 0:
            spec = ["data", None, "tensor", None]
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    arguments = [
        jax.tree.map(functools.partial(placed, index), argument)
        for index, argument in enumerate(jax.eval_shape(operands))
    ]
    attend = functools.partial(quantized_kv_attention, partition=partition)
    with jax.set_mesh(mesh):
        done = jax.jit(attend).lower(*arguments).compile()
    text, memory = done.as_text(), done.memory_analysis()
    return {
        "kernels": text.count("tpu_custom_call") + text.count("__gpu$xla.gpu.triton"),
        "arguments": memory.argument_size_in_bytes * len(devices),
        "operands": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments)),
        "temporaries": memory.temp_size_in_bytes,
    }


def pairs(devices):
    """Every pair of widths: 8,192 tokens of 8 query rows a key head."""
    sizes = {"slots": 8192, "shared": 8, "kv_heads": 2}
    return [program(devices, k, v, **sizes) for k, v in itertools.product(WIDTHS, repeat=2)]


def shapes(devices):
    """Narrow and wide heads, fine groups, a chunk of a prompt, a short cache, few recent tokens."""
    return [
        program(devices, 4, 4, width=64, group=32, value_group=32, slots=1280, recent=24),
        program(devices, 4, 4, width=256, slots=2048, shared=2),
        program(devices, 2, 4, time=64, slots=4096),
        program(devices, 8, 8, slots=128, shared=1, recent=0),
    ]


@needs_libtpu
def test_four_tpu_chips():
    result = compiled("v5e:2x2", __name__, "program")
    assert result["kernels"] >= 1
    # Nothing is laid out anew, or padded: memory holds what the arrays have.
    assert result["arguments"] <= 1.05 * result["operands"]


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("slice_name", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
@pytest.mark.parametrize("function", ["pairs", "shapes"])
def test_tpus(slice_name, function):
    for result in compiled(slice_name, __name__, function):
        assert result["kernels"] >= 1
        if function == "pairs":
            assert result["arguments"] <= 1.01 * result["operands"]
        # No copy of the cache, least of all in 16 bits: queries, weights and the like only.
        assert result["temporaries"] < 4e6


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.parametrize("function", ["program", "pairs"])
def test_an_h200(function):
    results = compiled("h200", __name__, function)
    for result in results if function == "pairs" else [results]:
        assert result["kernels"] >= 1
        assert result["temporaries"] < 8e6
