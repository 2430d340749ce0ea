"""Attention over packed keys and values against the formula in float64; layouts and kernels."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.quantized_kv_attention import (
    PackedKeys,
    PackedValues,
    empty_keys,
    empty_values,
    gpu,
    quantized_kv_attention,
    tpu,
    write_keys,
    write_values,
)

PAIRS = list(itertools.product((8, 4, 2), repeat=2))
# Fixed point of 22 bits rounds q scale by 2^-23 of its largest channel (up to 8 * 0.1 for scales of
# 16 / 255 and queries of 3); 32 channels of stored numbers up to 128 make that 6 * 128 * 2^-23 *
# 0.8 * 32^-0.5 = 1e-5 of a score, and of results, which are averages of values up to 4.
CLOSE = 5e-5


def rows_in_planes(stored, bits, block):
    """The packing of the module's description, row by row: [..., rows, L] of numbers to bytes."""
    planes = 8 // bits
    per = block // planes
    out = np.zeros((*stored.shape[:-2], stored.shape[-2] // planes, stored.shape[-1]), np.uint8)
    for row in range(stored.shape[-2]):
        byte, plane = row // block * per + row % block % per, row % block // per
        level = (stored[..., row, :] % 2**bits).astype(np.uint8)
        out[..., byte, :] |= level << np.uint8(bits * plane)
    return out.view(np.int8)


class Case:
    """Random rows: what is packed (in NumPy), what is recent, and the truth about both."""

    def __init__(
        self,
        key_bits=4,
        value_bits=4,
        *,
        lengths=(100,),
        time=1,
        slots=128,
        heads=1,
        shared=2,
        width=32,
        value_width=32,
        group=128,
        value_group=None,
        recent=5,
        dtype=np.float32,
        scales=np.float32,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        rows = len(lengths)
        lead, value_group = (rows, heads), value_width if value_group is None else value_group

        def normal(*shape):
            return rng.normal(size=shape).astype(dtype)

        def rounded(bits, shape, groups, outlier):
            codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (*lead, *shape))
            scale = rng.uniform(0.5, 1, (*lead, *groups)) * 4 / 2**bits
            if outlier:  # A channel as keys have it.
                scale[..., 3] *= 4
            zero = rng.integers(-2, 3, scale.shape)
            return codes.astype(np.int8), scale.astype(scales), zero.astype(np.float32)

        self.k = rounded(key_bits, (slots, width), (slots // group, width), True)
        self.v = rounded(
            value_bits, (slots, value_width), (slots, value_width // value_group), False
        )
        packed = []
        for (codes, scale, zero), bits in ((self.k, key_bits), (self.v, value_bits)):
            half = 0 if bits == 8 else 2 ** (bits - 1)
            exact = scale.astype(np.float32)
            packed.append(
                (codes.astype(np.int32) + half, np.stack([exact, (zero - half) * exact], axis=2))
            )
        (stored_k, scales_k), (stored_v, scales_v) = packed
        self.keys = PackedKeys(
            rows_in_planes(stored_k.swapaxes(-1, -2), key_bits, width), scales_k.astype(scales)
        )
        self.values = PackedValues(
            rows_in_planes(stored_v, value_bits, 128), scales_v.swapaxes(-1, -2).astype(scales)
        )
        self.lengths = np.asarray(lengths, np.int32)
        self.q = normal(rows, time, heads * shared, width)
        self.recent_k, self.recent_v = (
            normal(*lead, recent, width),
            normal(*lead, recent, value_width),
        )
        # The last queries' own keys are among the recent tokens; one place is empty.
        order = rng.permutation(recent)
        at = self.lengths[:, None] + order
        self.recent_positions = np.where(order == 1, -1, at)
        self.positions = self.lengths[:, None] + recent - time + np.arange(time)

    def arguments(self):
        return (
            self.q,
            self.keys,
            self.values,
            self.recent_k,
            self.recent_v,
            self.lengths,
            self.recent_positions,
            self.positions,
        )

    def run(self, implementation, **options):
        options = {"interpret": True} | options
        run = functools.partial(quantized_kv_attention, implementation=implementation, **options)
        return jax.jit(run)(*self.arguments())

    def dense(self):
        """What is packed, in float64."""
        out = []
        for codes, scale, zero in (self.k, self.v):
            scale, zero = (
                np.repeat(
                    np.repeat(x.astype(np.float64), codes.shape[2] // x.shape[2], axis=2),
                    codes.shape[3] // x.shape[3],
                    axis=3,
                )
                for x in (scale, zero)
            )
            out.append((codes + zero) * scale)
        return out

    def formula(self, *, scale=None, softcap=None):
        """Every query in turn, in float64."""
        heads = self.keys.codes.shape[1]
        k, v = self.dense()
        q, recent_k, recent_v = (
            np.asarray(x, np.float64) for x in (self.q, self.recent_k, self.recent_v)
        )
        lengths, recent_at, at = map(
            np.asarray, (self.lengths, self.recent_positions, self.positions)
        )
        out = np.zeros((*q.shape[:3], v.shape[-1]))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        for b, t, h in np.ndindex(q.shape[:3]):
            head = h // (q.shape[2] // heads)
            recent = (recent_at[b] >= 0) & (recent_at[b] <= at[b, t])
            keys = np.concatenate([k[b, head, : lengths[b]], recent_k[b, head, recent]])
            values = np.concatenate([v[b, head, : lengths[b]], recent_v[b, head, recent]])
            if len(keys):
                scores = scale * keys @ q[b, t, h]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ values
        return out


def check(case, implementation, atol=CLOSE, blocks=None, interpret=True, **options):
    out = case.run(implementation, blocks=blocks, interpret=interpret, **options)
    assert out.shape == (*case.q.shape[:3], case.values.codes.shape[-1])
    assert out.dtype == case.q.dtype
    want = case.formula(**options)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=atol)


@settings(max_examples=8)
@given(
    bits=st.sampled_from((2, 4, 8)),
    width=st.sampled_from((4, 32)),
    group=st.sampled_from((4, 128)),
    seed=st.integers(0, 9),
)
def test_bytes_stand_for_codes(bits, width, group, seed):
    case = Case(bits, bits, width=width, value_width=width, group=group, seed=seed)
    for packed, truth in zip((case.keys, case.values), case.dense(), strict=True):
        assert (packed.bits, packed.tokens) == (bits, 128)
        assert packed.codes.nbytes == truth.size * bits // 8
        dequantized = jax.jit(lambda packed: packed.dequantize())(packed)
        # (code + zero) scale as code scale + zero scale: roundings of numbers up to 16.
        np.testing.assert_allclose(dequantized, truth, rtol=0, atol=16 * 2**-22)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_appending_writes_these_bytes(bits):
    """Values token by token in any order, keys a group at a time; others are not touched."""
    case = Case(bits, bits, lengths=(1, 1), value_group=8, group=16)
    rng = np.random.default_rng(1)
    tokens = np.stack([rng.permutation(128)[:40] for _ in range(2)])
    empty = empty_values(2, 1, 128, 32, bits=bits, group=8)
    values, write = empty, jax.jit(write_values)
    for part in (tokens[:, :27], *np.split(tokens[:, 27:], 13, axis=1)):
        at = [np.take_along_axis(x, part[:, None, :, None], axis=2) for x in case.v]
        values = write(values, part, *at)
    left = np.ones((2, 128), bool)
    np.put_along_axis(left, tokens, False, axis=1)
    erased = [
        np.where(left[:, None, :, None], y, x) for x, y in zip(case.v, (0, 0, 0), strict=True)
    ]
    half = 0 if bits == 8 else 2 ** (bits - 1)
    stored = erased[0].astype(np.int32) + np.where(left[:, None, :, None], 0, half)
    np.testing.assert_array_equal(values.codes, rows_in_planes(stored, bits, 128))
    want = np.where(left[:, None, None, None], 0, case.values.scales)
    np.testing.assert_allclose(values.scales, want, rtol=1e-6)
    beyond = write(values, np.full((2, 1), 128), *at)
    for found, kept in zip(jax.tree.leaves(beyond), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(found, kept)

    keys, write = empty_keys(2, 1, 128, 32, bits=bits, group=16), jax.jit(write_keys)
    written = np.zeros((2, 8), bool)
    for number in (3, 0, 99):  # The last one does not exist.
        groups = np.array([[number], [number + 1]])
        row, clipped = np.arange(2), np.minimum(groups, 7)[:, 0]
        codes = case.k[0].reshape(2, 1, 8, 16, 32)[row, :, clipped]
        keys = write(keys, groups, codes, *(x[row, :, clipped][:, :, None] for x in case.k[1:]))
        written[row, clipped] |= number < 8
    mask = written[:, None, :, None]
    want = np.where(np.repeat(mask, 16, axis=2).swapaxes(-1, -2), case.keys.codes, 0)
    np.testing.assert_array_equal(keys.codes, want)
    np.testing.assert_allclose(
        keys.scales, np.where(mask[:, :, None], case.keys.scales, 0), rtol=1e-6
    )


@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_the_reference_is_the_formula(key_bits, value_bits):
    check(Case(key_bits, value_bits), "xla")


@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_the_tpu_kernel_is_the_formula(key_bits, value_bits):
    check(Case(key_bits, value_bits), "tpu")


@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 4), (4, 2), (2, 8)])
def test_the_gpu_kernel_is_the_formula(key_bits, value_bits):
    check(Case(key_bits, value_bits, width=64), "gpu")


SHAPES = {
    "rows of all lengths": {"lengths": (0, 1, 128, 129, 256), "slots": 256},
    "a chunk, groups": {"time": 3, "shared": 3, "value_group": 16, "recent": 24, "group": 32},
    "no recent tokens": {"recent": 0, "lengths": (127,), "group": 64},
    "wide heads": {"width": 256, "value_width": 256, "group": 256, "slots": 256},
}


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, implementation):
    check(Case(4, 8, **SHAPES[name]), implementation)


# Groups of 16 tokens, so that eight of them are a small block.
SEVERAL = {"lengths": (256, 130, 40), "slots": 256, "heads": 2, "group": 16}


@pytest.mark.parametrize(
    ("implementation", "blocks"),
    [("tpu", tpu.Blocks(tokens=128, heads=2, rows=8)), ("gpu", gpu.Blocks(splits=3, rows=16))],
)
def test_rows_of_several_blocks(implementation, blocks):
    """Some are dead, and queries are cut too; scores are capped."""
    case = Case(8, 2, time=9, recent=10, **SEVERAL)
    check(case, implementation, blocks=blocks, softcap=2.0, scale=0.4)


def test_no_races_between_blocks():
    races = pltpu.InterpretParams(detect_races=True)
    blocks = tpu.Blocks(tokens=128, heads=1, rows=8)
    check(Case(2, 4, **SEVERAL), "tpu", blocks=blocks, interpret=races)


def test_a_query_that_sees_nothing_gives_zeros():
    case = Case(lengths=(0,), recent=1)
    case.recent_positions = np.full_like(case.recent_positions, -1)
    assert not case.formula()[0].any()
    for implementation in ("xla", "tpu", "gpu"):
        check(case, implementation, atol=0)


def test_half_precision_keeps_its_type():
    case = Case(dtype=jnp.bfloat16, scales=jnp.bfloat16)
    for implementation in ("xla", "tpu", "gpu"):
        # `low` and weights round to 8 bits of mantissa: 2^-9 of keys up to 16, values up to 4.
        check(case, implementation, atol=0.1)


def test_devices_share_rows_and_key_heads():
    case = Case(lengths=(100, 77), heads=2)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    @jax.jit
    def run(*arguments):
        partition = {"b": "data", "k": "tensor"}
        return quantized_kv_attention(
            *arguments, implementation="tpu", interpret=True, partition=partition
        )

    with jax.set_mesh(mesh):
        got = run(*case.arguments())
    np.testing.assert_allclose(got, case.run("xla"), rtol=0, atol=CLOSE)
    # Query heads lie where their key heads do.
    assert got.sharding.spec == PartitionSpec("data", None, "tensor")


@pytest.mark.parametrize(
    ("implementation", "options", "reason"),
    [
        ("tpu", {"width": 16}, "no heads of width 16"),
        ("tpu", {"width": 288}, "products of heads of width 288 may exceed 32 bits"),
        ("tpu", {"group": 24, "slots": 384}, "groups of 24 tokens do not fit blocks of 128"),
        ("gpu", {"width": 24}, "width: 12 is no power of two"),
        ("gpu", {"group": 8}, "groups of 8 tokens are no power of two from 16"),
    ],
)
def test_what_a_kernel_cannot_do_is_done_by_the_reference(implementation, options, reason):
    case = Case(lengths=(20,), **options)
    with pytest.raises(ValueError, match=reason):
        case.run(implementation)
    check(case, None)


def test_no_queries():
    case = Case(time=1)
    case.q, case.positions = case.q[:, :0], case.positions[:, :0]
    assert quantized_kv_attention(*case.arguments()).shape == (1, 0, 2, 32)


def test_plans_say_what_they_choose():
    shapes = {"rows": 8, "width": 128, "value_width": 128, "group": 128}
    plan = tpu.plan(slots=8192, kv_heads=8, bytes_per_token=144, **shapes)
    assert plan == tpu.Blocks(tokens=8192, heads=2, rows=8)
    plan = tpu.plan(slots=2048, kv_heads=8, bytes_per_token=144, **shapes | {"rows": 6})
    assert plan == tpu.Blocks(tokens=2048, heads=4, rows=8)
    plan = tpu.plan(slots=8192, kv_heads=3, bytes_per_token=144, **shapes | {"rows": 512})
    assert plan == tpu.Blocks(tokens=2048, heads=1, rows=64)
    with pytest.raises(ValueError, match="blocks.tokens=512 must divide 8192"):
        blocks = tpu.Blocks(tokens=512, heads=1, rows=8)
        tpu.plan(slots=8192, kv_heads=8, bytes_per_token=144, blocks=blocks, **shapes)
    bits = {"key_bits": 4, "value_bits": 4, "batch": 2, "value_group": 128}
    plan = gpu.plan(slots=8192, kv_heads=8, **bits, **shapes)
    assert plan == gpu.Blocks(splits=17, rows=16)
    unfit = tpu.plan(slots=16384 + 128, kv_heads=8, bytes_per_token=144, **shapes)
    assert "16512 slots are no multiple of 1024" in unfit.reason
    with pytest.raises(ValueError, match="rows a power of two"):
        gpu.plan(slots=8192, kv_heads=8, blocks=gpu.Blocks(splits=1, rows=24), **bits, **shapes)


def test_wrong_arguments_are_named():
    case = Case(lengths=(20, 3), heads=2)
    good = dict(
        zip(
            ("q", "keys", "values", "recent_k", "recent_v", "lengths", "recent_positions"),
            case.arguments(),
            strict=False,
        )
    ) | {"positions": case.positions}
    for change, message in (
        ({"q": case.q[:, :, :3]}, "3 query heads do not share 2 key heads"),
        ({"recent_v": case.recent_v[:, :, :2]}, r"recent_v \(2, 2, 2, 32\), expected \(2, 2, 5"),
        ({"lengths": case.lengths[:1]}, r"lengths \(1,\), expected \(2,\)"),
        ({"positions": case.positions[:, :0]}, "positions"),
        ({"keys": case.keys.codes}, "expected PackedKeys and PackedValues"),
        ({"values": case.values.replace(scales=case.values.scales[..., :-1])}, "values.scales"),
        ({"keys": case.keys.replace(codes=case.keys.codes.view(np.uint8))}, "expected int8"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_kv_attention(**good | change)
    with pytest.raises(ValueError, match="softcap=0 must be positive"):
        case.run("xla", softcap=0)
    with pytest.raises(ValueError, match="bits=3 cannot be packed"):
        empty_keys(1, 1, 128, 32, bits=3, group=32)
    with pytest.raises(ValueError, match="group=48 must divide the 128 tokens"):
        empty_keys(1, 1, 128, 32, bits=4, group=48)
    with pytest.raises(ValueError, match="100 tokens are no multiple of 128"):
        empty_values(1, 1, 100, 32, bits=4, group=32)
