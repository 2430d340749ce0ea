"""Grids, blocks and moved bytes of traced kernels; what the compilers write about their code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.compilation import gpu_resources, kernels, tpu_schedule


def product(x, w, columns, **options):
    """x w in blocks of rows of 8 and of some columns, the rows outermost."""

    def kernel(x_ref, w_ref, out_ref, *_):
        out_ref[...] = x_ref[...] @ w_ref[...]

    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(m // 8, n // columns),
        in_specs=[
            pl.BlockSpec((8, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, columns), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        name="product",
        **options,
    )(x, w)


@pytest.fixture(scope="module")
def operands():
    return jnp.zeros((32, 128)), jnp.zeros((128, 512), jnp.float32)


def test_a_block_is_moved_whenever_it_changes(operands):
    """x once, the four blocks of w for each of the four blocks of rows, the result once."""
    x, w = operands

    def program(x, w):
        return jax.jit(lambda x, w: product(x, w, 128) + 1.0)(x, w)

    [call] = kernels.calls(jax.make_jaxpr(program)(x, w))
    assert (call.name, call.grid, call.steps, call.shared) == ("product", (4, 4), 16, False)
    assert call.blocks == ((8, 128), (128, 128), (8, 128))
    assert call.moved_bytes == 4 * (x.size + 4 * w.size + 32 * 512)
    assert call.block_bytes == 2 * 4 * (8 * 128 + 128 * 128 + 8 * 128)
    assert call.claimed_bytes is None
    [whole] = kernels.calls(jax.make_jaxpr(lambda x, w: product(x, w, 512))(x, w))
    assert whole.moved_bytes == 4 * (x.size + w.size + 32 * 512)


def test_scratch_claims_and_shared_grids(operands):
    x, w = operands
    options = {
        "scratch_shapes": [pltpu.VMEM((8, 128), jnp.float32), pltpu.SMEM((1,), jnp.int32)],
        "compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        "cost_estimate": pl.CostEstimate(flops=1, bytes_accessed=77, transcendentals=0),
    }
    [call] = kernels.calls(jax.make_jaxpr(lambda x, w: product(x, w, 128, **options))(x, w))
    assert call.shared and call.claimed_bytes == 77
    assert call.block_bytes == 2 * 4 * (8 * 128 + 128 * 128 + 8 * 128) + 4 * 8 * 128
    # One block of rows leaves nothing to share.
    [call] = kernels.calls(jax.make_jaxpr(lambda x, w: product(x[:8], w, 128, **options))(x, w))
    assert not call.shared


def test_blocks_that_depend_on_values_have_no_count():
    def kernel(index_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def rows(index, x):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(2,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, index: (index[i], 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, index: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
            name="rows",
        )(index, x)

    program = jax.make_jaxpr(rows)(jnp.zeros(2, jnp.int32), jnp.zeros((32, 128)))
    [call] = kernels.calls(program)
    assert call.moved_bytes is None and call.block_bytes == 2 * 2 * 4 * 8 * 128


def test_schedules_are_those_after_registers_are_given_out(tmp_path):
    name = "1796481000-product_tpu.3-"
    written = {
        "71-schedule-analysis_packed-bundles-post-ra.txt": "// total scheduled bundles:  2911 \n",
        "70-schedule-analysis_packed-bundles-pre-ra.txt": "// total scheduled bundles:  1000 \n",
        "79-final_hlo-static-per-bundle-utilization.txt": "\n".join(
            ("// units", "MATMUL, VALU", "2 4", "// used", "1 4", "0 2", "")
        ),
    }
    for ending, text in written.items():
        (tmp_path / (name + ending)).write_text(text)
    found = tpu_schedule.schedules(tmp_path)
    assert found == {"product_tpu": tpu_schedule.Schedule(2911, {"MATMUL": 0.25, "VALU": 0.75})}
    assert str(tmp_path) in tpu_schedule.dump_flags(tmp_path)


PTX = """garbage
.version 8.0
.target sm_90a
.address_size 64
.visible .entry product_gpu(.param .u64 out) {
  .reg .b64 %a; .reg .b32 %b;
  ld.param.u64 %a, [out];
  mov.u32 %b, %tid.x;
  st.global.u32 [%a], %b;
  ret;
}
"""


def test_resources_of_a_gpu(tmp_path):
    (tmp_path / "module.thunk_sequence.txt").write_text(
        "001: kCustomKernel [x] product_gpu grid: [4, 3, 2] threads: [128, 1, 1] "
        "cluster: [] shared_memory: 20736 bytes\n"
    )
    [(name, found)] = gpu_resources.resources(tmp_path).items()
    assert (name, found.programs, found.threads, found.shared_bytes) == (
        "product_gpu",
        24,
        128,
        20736,
    )
    assert found.registers is None and found.spilled_bytes is None


@pytest.mark.skipif(gpu_resources.find_ptxas() is None, reason="ptxas is not installed")
def test_registers_come_from_the_assembler(tmp_path):
    (tmp_path / "module.thunk_sequence.txt").write_text(
        "001: kCustomKernel [x] product_gpu grid: [1, 1, 1] threads: [128, 1, 1] "
        "cluster: [] shared_memory: 0 bytes\n"
    )
    (tmp_path / "module.ptx").write_text(PTX)
    found = gpu_resources.resources(tmp_path)["product_gpu"]
    assert 0 < found.registers < 64 and found.spilled_bytes == 0
    (tmp_path / "module.ptx").write_text(PTX.replace("ret;", "nonsense;"))
    with pytest.raises(RuntimeError, match="ptxas refuses"):
        gpu_resources.resources(tmp_path)
