"""Attention over heads of two kinds against the formula in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.hybrid_kv_attention import hybrid_kv_attention, tpu

# Sums of 32 products of scores and of up to 300 weighted values of size 4, in float32.
CLOSE = 2e-5
SMALL = tpu.Blocks(adaptive=128, consistent=128)


class Case:
    """Random caches of A adaptive and C consistent heads, lengths of their own each."""

    def __init__(
        self,
        lengths=((300, 7), (40, 16)),
        *,
        rows=1,
        slots=(300, 40),
        time=1,
        shared=2,
        width=32,
        value_width=32,
        dtype=np.float32,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        counts = [len(group) for group in lengths]

        def normal(*shape):
            return rng.normal(size=shape).astype(dtype)

        self.q = normal(rows, time, sum(counts) * shared, width)
        self.caches = [
            normal(rows, count, size, w)
            for count, size in zip(counts, slots, strict=True)
            for w in (width, value_width)
        ]
        self.lengths = [
            np.clip(np.array(group, np.int32) - 3 * np.arange(rows)[:, None], 0, None).astype(
                np.int32
            )
            for group in lengths
        ]

    def run(self, implementation, **options):
        run = functools.partial(
            hybrid_kv_attention, implementation=implementation, **{"interpret": True} | options
        )
        return jax.jit(run)(self.q, *self.caches, *self.lengths)

    def formula(self, *, order=None, scale=None, softcap=None):
        """Every query in turn; key head j of the model is number order[j] of what is stored."""
        q, (ka, va, kc, vc) = self.q.astype(np.float64), (x.astype(np.float64) for x in self.caches)
        kv_heads, time = ka.shape[1] + kc.shape[1], q.shape[1]
        out = np.zeros((*q.shape[:3], va.shape[-1]))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        for b, t, h in np.ndindex(q.shape[:3]):
            head = h // (q.shape[2] // kv_heads)
            head = head if order is None else order[head]
            k, v, length = (
                (ka[b, head], va[b, head], self.lengths[0][b, head])
                if head < ka.shape[1]
                else tuple(x[b, head - ka.shape[1]] for x in (kc, vc, self.lengths[1]))
            )
            seen = max(length - (time - 1 - t), 0)
            if seen:
                scores = scale * k[:seen] @ q[b, t, h]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[:seen]
        return out


def check(case, implementation, atol=CLOSE, order=None, blocks=None, interpret=True, **options):
    heads = {} if order is None else {"adaptive_heads": [order.index(i) for i in range(2)]}
    out = case.run(implementation, blocks=blocks, interpret=interpret, **heads, **options)
    assert out.dtype == case.q.dtype
    want = case.formula(order=order, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=atol)


CASES = {
    "ragged": {},
    "several rows, empty heads": {"rows": 3, "lengths": ((300, 130, 0), (40, 4))},
    "tokens of a draft": {"time": 3, "lengths": ((257, 2), (40, 16))},
    "wide values": {"width": 64, "value_width": 128, "shared": 1},
    "all adaptive": {"lengths": ((300, 129), ())},
    "all consistent": {"lengths": ((), (40, 5))},
}


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
@pytest.mark.parametrize("name", CASES)
def test_the_formula(name, implementation):
    """On TPUs blocks of 128: the last of a head is cut short, and others are dead."""
    blocks = tpu.Blocks(adaptive=128, consistent=40)
    check(Case(**CASES[name]), implementation, blocks=blocks)


@settings(max_examples=6)
@given(
    lengths=st.tuples(*[st.integers(0, 260)] * 2, *[st.integers(0, 140)] * 2),
    seed=st.integers(0, 9),
    softcap=st.sampled_from((None, 2.0)),
)
def test_lengths(lengths, seed, softcap):
    case = Case((lengths[:2], lengths[2:]), slots=(260, 140), seed=seed)
    check(case, "tpu", blocks=SMALL, softcap=softcap, scale=0.5)


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_heads_in_the_order_of_the_model(implementation):
    """Stored heads 0, 1 (adaptive), 2, 3 are the model's 2, 0, 1, 3."""
    check(Case(), implementation, order=[1, 2, 0, 3])


def test_equal_heads_are_ordinary_attention():
    """Permuting kept tokens changes nothing, and with all tokens kept both kinds are one."""
    case = Case(((40, 40), (40, 40)), slots=(40, 40))
    whole = case.run("xla")
    rng = np.random.default_rng(1)
    order = rng.permutation(40)
    case.caches[2:] = [x[:, :, order] for x in case.caches[2:]]
    np.testing.assert_allclose(case.run("tpu"), whole, rtol=0, atol=CLOSE)


def test_what_is_behind_the_end_does_not_matter():
    case = Case()
    want = case.run("tpu", blocks=tpu.Blocks(adaptive=128, consistent=40))
    for cache, lengths in zip(case.caches, np.repeat(case.lengths, 2, axis=0), strict=True):
        for b, h in np.ndindex(cache.shape[:2]):
            cache[b, h, lengths[b, h] :] = 1e6
    got = case.run("tpu", blocks=tpu.Blocks(adaptive=128, consistent=40))
    np.testing.assert_array_equal(got, want)


def test_no_races_between_blocks():
    races = pltpu.InterpretParams(detect_races=True)
    case = Case(((256, 7), (40, 16)), slots=(256, 40), rows=2)
    check(case, "tpu", blocks=tpu.Blocks(adaptive=128, consistent=40), interpret=races)


def test_half_precision_keeps_its_type():
    # Weights and results of size 4 rounded to 8 bits of mantissa.
    for implementation in ("xla", "tpu"):
        check(Case(dtype=jnp.bfloat16), implementation, atol=0.05)


def test_devices_share_rows_and_heads_of_either_kind():
    case = Case(rows=2)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    partition = {"b": "data", "k": "tensor"}
    want = case.run("xla", adaptive_heads=(2, 0))
    with jax.set_mesh(mesh):
        got = case.run("tpu", adaptive_heads=(2, 0), partition=partition)
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)
    assert got.sharding.spec[0] == PartitionSpec("data")[0]


def test_what_the_kernel_cannot_do_is_done_by_the_reference():
    many = Case(shared=65, width=8, value_width=8)
    with pytest.raises(ValueError, match="65 queries of one key head are more than 64"):
        many.run("tpu")
    check(many, None)
    with pytest.raises(ValueError, match="it is written for TPUs only"):
        many.run("gpu")
    empty = Case(slots=(300, 0))
    with pytest.raises(ValueError, match="consistent heads have no slots"):
        empty.run("tpu")
    empty.lengths[1][:] = 0
    check(empty, None)
    assert Case(time=0).run(None).shape == (1, 0, 8, 32)


def test_plans_say_what_they_choose():
    sizes = {"rows": 8, "token_bytes": 512}
    plan = tpu.plan(adaptive_slots=131072, consistent_slots=2048, **sizes)
    assert plan == tpu.Blocks(adaptive=8192, consistent=2048)
    plan = tpu.plan(adaptive_slots=5000, consistent_slots=0, **sizes | {"rows": 64})
    assert plan == tpu.Blocks(adaptive=2048, consistent=0)
    for blocks in (tpu.Blocks(100, 128), tpu.Blocks(256, 384)):
        with pytest.raises(ValueError, match="must be .* or a multiple of 128 below it"):
            tpu.plan(adaptive_slots=1000, consistent_slots=200, blocks=blocks, **sizes)


def test_wrong_arguments_are_named():
    case = Case()
    good = [case.q, *case.caches, *case.lengths]
    for index, change, message in (
        (0, case.q[:, :, :3], "3 query heads do not share 4 key heads"),
        (2, case.caches[1][:, :, :-1], r"adaptive_v \(1, 2, 299, 32\), expected \(1, 2, 300, 32\)"),
        (3, case.caches[2][..., :8], "consistent_k"),
        (6, case.lengths[1][:, :1], r"consistent_lengths \(1, 1\), expected \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hybrid_kv_attention(*good[:index], change, *good[index + 1 :])
    for heads in ((0,), (1, 1), (0, 4)):
        with pytest.raises(ValueError, match="expected 2 different ones of the 4 key heads"):
            hybrid_kv_attention(*good, adaptive_heads=heads)
    with pytest.raises(ValueError, match="softcap=-1 must be positive"):
        hybrid_kv_attention(*good, softcap=-1)
