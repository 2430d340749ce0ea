"""Attention kernels compile for TPUs and an H200, with gradients, alone and on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.attention import attention
from tests.aot.kernels import compiled
from tests.aot.programs import needs_cuda_plugin, needs_libtpu


def program(devices, heads=8, kv_heads=2, time=1024, width=128, **options):
    """Compiles loss and gradient; what custom calls the program has and its temporaries."""
    one = len(devices) == 1
    grid = np.array(devices).reshape((1, 1) if one else (2, len(devices) // 2))
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    arguments = [
        jax.ShapeDtypeStruct((2, time, n, width), jnp.bfloat16, sharding=spec)
        for n in (heads, kv_heads, kv_heads)
    ]
    partition = None if one else {"b": "data", "k": "tensor"}

    def loss(q, k, v):
        return attention(q, k, v, partition=partition, **options).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        done = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
    text = done.as_text()
    return {
        "kernels": text.count("tpu_custom_call") + text.count("__gpu$xla.gpu.triton"),
        "temporaries": done.memory_analysis().temp_size_in_bytes,
    }


def windowed(devices):
    return program(devices, time=512, width=64, window=200, softcap=30.0)


def long(devices):
    return program(devices, heads=32, kv_heads=8, time=8192)


@needs_libtpu
def test_four_tpu_chips():
    result = compiled("v5e:2x2", __name__, "program")
    assert result["kernels"] >= 3


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("function", ["program", "windowed", "long"])
@pytest.mark.parametrize("slice_name", ["v5e:1x1", "v5p:1x1x1", "v6e:2x2"])
def test_tpus(slice_name, function):
    result = compiled(slice_name, __name__, function)
    assert result["kernels"] >= 3
    if function == "long":
        # The scores of all heads would be 2 * 32 * 8192^2 * 4 bytes = 17 GB.
        assert result["temporaries"] < 1e9


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.parametrize("function", ["program", "long"])
def test_an_h200(function):
    result = compiled("h200", __name__, function)
    assert result["kernels"] >= 3
