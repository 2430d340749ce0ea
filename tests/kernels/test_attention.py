"""Attention kernels against the formula in float64, with gradients, and on a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.attention import attention

TIME = 256
CASES = {
    "causal": {},
    "window": {"window": 37},
    "soft cap": {"softcap": 3.0},
    "both ways": {"causal": False},
    "scale": {"scale": 0.3},
}


def formula(q, k, v, segment_ids, *, scale=None, causal=True, window=None, softcap=None):
    """Attention of every query in turn, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, out = q.shape[2] // k.shape[2], np.zeros((*q.shape[:3], v.shape[-1]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, t, h in np.ndindex(q.shape[:3]):
        scores = scale * k[b, :, h // group] @ q[b, t, h]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        at = np.arange(q.shape[1])
        seen = np.array(segment_ids[b] == segment_ids[b, t])
        if causal:
            seen &= at <= t
        if window is not None:
            seen &= at > t - window
        weights = np.where(seen, np.exp(scores - scores[seen].max()), 0)
        out[b, t, h] = weights / weights.sum() @ v[b, :, h // group]
    return out


def arrays(time=TIME, batch=2, heads=4, kv_heads=2, width=64, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, time, heads, width), dtype)
    k = jax.random.normal(keys[1], (batch, time, kv_heads, width), dtype)
    v = jax.random.normal(keys[2], (batch, time, kv_heads, width), dtype)
    starts = jax.random.bernoulli(keys[3], 0.02, (batch, time))
    return q, k, v, jnp.cumsum(starts, axis=1)


@pytest.fixture(scope="module")
def operands():
    return arrays()


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(operands, name):
    out = attention(*operands, implementation="xla", **CASES[name])
    # Sums of up to 256 terms of size 1 in float32: 256 * 2^-24.
    np.testing.assert_allclose(out, formula(*operands, **CASES[name]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("implementation", "name"),
    [("tpu", name) for name in CASES] + [("gpu", n) for n in ("causal", "both ways", "scale")],
)
def test_kernels_and_their_gradients_are_the_references(operands, implementation, name):
    """`gpu`: Triton's kernel divides scores by ln 2 first, hence a few roundings more."""
    q, k, v, segment_ids = operands
    toward = jax.random.normal(jax.random.key(9), q.shape)

    @functools.partial(jax.jit, static_argnums=3)
    def both(q, k, v, how):
        # Several blocks, some of them hidden.
        options = {"interpret": True, "block": 64 if how == "gpu" else 128} if how != "xla" else {}
        run = functools.partial(attention, implementation=how, **options, **CASES[name])
        out, pull = jax.vjp(lambda q, k, v: run(q, k, v, segment_ids), q, k, v)
        return out, pull(toward)

    want, got = both(q, k, v, "xla"), both(q, k, v, implementation)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=3e-5)
    for ours, theirs in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("implementation", "options", "reason"),
    [
        ("tpu", {"time": 100}, "100 tokens are no multiple of a block of 128"),
        ("tpu", {"time": 0}, "there are no tokens"),
        ("gpu", {"time": 100}, "100 tokens are no multiple of a block of 16"),
        ("gpu", {"window": 5}, "no window and no soft cap"),
    ],
)
def test_what_a_kernel_cannot_do_is_done_by_the_reference(implementation, options, reason):
    options = dict(options)
    q, k, v, segment_ids = arrays(time=options.pop("time", 128), width=16)
    with pytest.raises(ValueError, match=reason):
        attention(q, k, v, segment_ids, implementation=implementation, **options)
    out = attention(q, k, v, segment_ids, **options)
    np.testing.assert_allclose(out, formula(q, k, v, segment_ids, **options), rtol=0, atol=2e-5)


def test_devices_share_rows_and_key_heads(operands):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    want = attention(*operands, implementation="xla")

    @jax.jit
    def run(q, k, v, segment_ids):
        return attention(
            q,
            k,
            v,
            segment_ids,
            implementation="tpu",
            interpret=True,
            partition={"b": "data", "k": "tensor"},
        )

    with jax.set_mesh(mesh):
        got = run(*operands)
        gradient = jax.jit(jax.grad(lambda q: run(q, *operands[1:]).sum()))(operands[0])
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)
    assert got.sharding.spec == PartitionSpec("data", None, "tensor")
    alone = jax.grad(lambda q: attention(q, *operands[1:], implementation="xla").sum())
    np.testing.assert_allclose(gradient, alone(operands[0]), rtol=0, atol=2e-4)


def test_half_precision_keeps_its_type(operands):
    half = [x.astype(jnp.bfloat16) for x in operands[:3]]
    out = attention(*half, operands[3], implementation="tpu", interpret=True)
    assert out.dtype == jnp.bfloat16
    # Weights and results are rounded to 8 bits of mantissa.
    want = formula(*(x.astype(jnp.float32) for x in half), operands[3])
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=0, atol=0.03)


def test_wrong_arguments_are_named(operands):
    q, k, v, segment_ids = operands
    with pytest.raises(ValueError, match="attention: q .* k .* v "):
        attention(q, k[:, :-1], v)
    with pytest.raises(ValueError, match="3 query heads do not share 2 key heads"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="segment_ids"):
        attention(q, k, v, segment_ids[:, :-1])
    with pytest.raises(ValueError, match="window=4 must be positive, with a causal mask"):
        attention(q, k, v, causal=False, window=4)
    with pytest.raises(ValueError, match="softcap=0 must be positive"):
        attention(q, k, v, softcap=0)
