"""Reading HLO: trip counts, collectives in all their spellings, operations of products."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from jaxllm.compilation import hlo

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gather_start (p: bf16[4,8]) -> (bf16[4,8], bf16[16,8]) {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0:T(8,128)} all-gather(%p), channel_id=7, GROUPS, dimensions={0}
  ROOT %both = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) custom-call(%all-gather.1)
}

%gather_done (q: bf16[4,8]) -> bf16[16,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0} all-gather(%q), channel_id=7, GROUPS, dimensions={0}
}

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %arg = (s32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%arg), index=1
  %start = (bf16[4,8]{1,0}, /*index=1*/bf16[16,8]{1,0}) fusion(%x), calls=%gather_start
  %whole = bf16[16,8]{1,0} fusion(%x), calls=%gather_done
  %product = f32[4,16]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %count = s32[] get-tuple-element(%arg), index=0
  %step = s32[] constant(STEP)
  %next = s32[] add(%count, %step)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%next, %x)
}

%condition (arg.1: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %arg.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p0: bf16[4,8], p1: f32[10]) -> f32[10] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %p1 = f32[10]{0} parameter(1)
  %loop = (s32[], bf16[4,8]{1,0}) while(%p0), condition=%condition, body=%body BACKEND
  %total = (f32[10]{0}, f32[6]{0}) all-reduce(%p1, %p1), channel_id=1, GROUPS, to_apply=%add
  ROOT %result = f32[10]{0} get-tuple-element(%total), index=0
}
"""
GROUPS = "replica_groups=mesh['axis_0'=4] {'axis_0'}"


def summary(
    text: str = PROGRAM, groups: str = GROUPS, backend: str = "", step: int = 1
) -> hlo.Summary:
    text = text.replace("GROUPS", groups).replace("BACKEND", backend).replace("STEP", str(step))
    return hlo.summarize(hlo.parse(text))


def test_loops_multiply_and_an_asynchronous_collective_counts_once():
    found = summary()
    assert found.by_kind() == {
        "all-gather": {"count": 6, "bytes": 6 * 16 * 8 * 2, "sent_bytes": 6 * 16 * 8 * 2 * 3 / 4},
        "all-reduce": {"count": 1, "bytes": 64, "sent_bytes": 2 * 64 * 3 / 4},
    }
    assert found.flops == 6 * 2 * 4 * 16 * 8
    assert found.unknown_loops == 0


def test_an_unrolled_loop_counts_in_its_steps():
    assert summary(step=2).by_kind()["all-gather"]["count"] == 3
    assert summary(step=4).by_kind()["all-gather"]["count"] == 2


def test_the_known_trip_count_is_believed_and_an_unknown_one_is_told():
    known = summary(backend=', backend_config={"known_trip_count":{"n":"11"}}')
    assert known.by_kind()["all-gather"]["count"] == 11
    unknown = summary(PROGRAM.replace("direction=LT", "direction=NE"))
    assert unknown.by_kind()["all-gather"]["count"] == 1
    assert unknown.unknown_loops == 1


def test_elements_of_tuples_as_operands():
    """As newer compilers write them, without an instruction that takes the element."""
    text = PROGRAM.replace("compare(%i,", "compare(%arg.1#0,")
    text = text.replace("  %i = s32[] get-tuple-element(%arg.1), index=0\n", "")
    text = text.replace("dot(%x, %whole)", "dot(%arg#1, %whole)").replace(
        "add(%count,", "add(%arg#0,"
    )
    assert summary(text, step=2) == summary(step=2)


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        "replica_groups=[2,4]<=[8]",
        "replica_groups=[2,4]<=[4,2]T(1,0)",
        "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
        "replica_groups=mesh['a'=8] {'a':(2)4}",
    ],
)
def test_group_sizes(groups):
    assert {item.group for item in summary(groups=groups).collectives} == {4}


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        (
            "%s = ((f32[2,3]{1,0}, f32[5]{0}), (f32[8,3]{1,0}, f32[20]{0})) "
            "all-gather-start(%p1), channel_id=3, GROUPS",
            "all-gather",
            4 * (24 + 20),
            4 * (24 + 20) * 3 / 4,
        ),
        (
            "%s = ((f32[8,3]{1,0}), f32[2,3]{1,0}) reduce-scatter-start(%p1), channel_id=3, GROUPS",
            "reduce-scatter",
            4 * 24,
            4 * 24 * 3 / 4,
        ),
        ("%s = f32[6]{0} all-reduce-start(%p1), GROUPS, to_apply=%add", "all-reduce", 24, 36.0),
        (
            "%s = (bf16[7]{0}, bf16[7]{0}, u32[]{:S(2)}) collective-permute-start(%p1),"
            " source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            14,
            14.0,
        ),
        ("%s = s8[2,6]{1,0} all-to-all(%p1), channel_id=3, GROUPS", "all-to-all", 12, 9.0),
    ],
)
def test_kinds_of_collectives(line, kind, size, sent):
    text = f"ENTRY %main (p1: f32[10]) -> f32[10] {{\n  {line}\n}}\n"
    assert summary(text).by_kind() == {kind: {"count": 1, "bytes": size, "sent_bytes": sent}}


def test_a_reduction_that_a_tpu_fuses_with_a_slice_is_a_reduce_scatter():
    text = PROGRAM.replace("%gather_start (p", "%all-reduce-scatter.1 (p")
    text = text.replace("calls=%gather_start", "calls=%all-reduce-scatter.1")
    text = text.replace(" all-gather(%p)", " all-reduce(%p)").replace(", calls=%gather_done", "")
    assert summary(text).by_kind()["reduce-scatter"] == {
        "count": 6,
        "bytes": 6 * 256,
        "sent_bytes": 6 * 192.0,
    }


def test_batched_products_written_as_convolutions():
    """As a TPU writes them: of 2 x 2 spatial windows over dilated inputs one element is real."""
    text = """ENTRY %main (a: bf16[2,2,768,256], b: bf16[2,2,256,32]) -> f32[2,2,768,32] {
  %a = bf16[2,2,768,256]{3,2,1,0} parameter(0)
  %b = bf16[2,2,256,32]{3,2,1,0} parameter(1)
  ROOT %c = f32[2,2,768,32]{3,2,1,0} convolution(%a, %b), window={size=2x2 stride=1x1 pad=0_0x0_0 \
lhs_dilate=2x2}, dim_labels=01bf_01io->01bf
}
"""
    assert summary(text).flops == 2 * (2 * 2) * 768 * 32 * 256


def test_what_this_jax_prints_agrees_with_arithmetic():
    """A scanned product on two devices: flops and the gathered weights of every layer."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
    weights = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32, sharding=split)
    compiled = jax.jit(layers, out_shardings=rows).lower(x, weights).compile()
    found = hlo.summarize(hlo.parse(compiled.as_text()))
    assert found.flops == 5 * 2 * 32 * 16 * 16
    assert math.isclose(found.by_kind()["all-gather"]["bytes"], 5 * 16 * 16 * 4)
    assert found.unknown_loops == 0


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="entry"):
        hlo.parse("HloModule nothing\n")
