"""Grouped products and experts: against loops over groups in float64, gradients, meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.moe import expert_feedforward, grouped_matmul, tpu

EPSILON = {jnp.float32: 2.0**-24, jnp.bfloat16: 2.0**-8}
BODIES = ({"implementation": "xla"}, {"implementation": "tpu", "interpret": True})
by_body = pytest.mark.parametrize("body", BODIES, ids=["xla", "tpu"])


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def loop(x, weights, sizes):
    """Groups one by one, in float64."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out, start = np.zeros((x.shape[0], weights.shape[2])), 0
    for matrix, size in zip(weights, np.asarray(sizes), strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


@functools.partial(jax.jit, static_argnames=("implementation", "interpret", "blocks"))
def product(x, weights, sizes, **options):
    return grouped_matmul(x, weights, sizes, **options)


@by_body
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 33), min_size=3, max_size=3).map(sorted),
    rows=st.sampled_from([0, 1, 33]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_groups_of_any_size_and_rows_beyond_them(body, cuts, rows, dtype):
    sizes = np.diff([0, *(min(cut, rows) for cut in cuts)])
    x, weights = normal(0, rows, 24, dtype=dtype), normal(1, 3, 24, 40, dtype=dtype)
    out = product(x, weights, jnp.asarray(sizes, jnp.int32), **body)
    assert out.dtype == dtype
    expected = loop(x, weights, sizes)
    # A rounded sum of 24 exact products, rounded once more to the type of x.
    terms = loop(np.abs(x), np.abs(weights), sizes)
    bound = 24 * EPSILON[jnp.float32] * terms + EPSILON[dtype] * np.abs(expected)
    assert (np.abs(np.asarray(out, np.float64) - expected) <= bound).all()
    assert (np.asarray(out)[sizes.sum() :] == 0).all()


def test_blocks_that_do_not_divide_anything():
    sizes = jnp.array([100, 0, 37], jnp.int32)
    x, weights = normal(0, 137, 200), normal(1, 3, 200, 300)
    blocks = tpu.Blocks(32, 128, 256)
    out = product(x, weights, sizes, blocks=blocks, **BODIES[1])
    np.testing.assert_allclose(out, loop(x, weights, sizes), atol=2e-4)


def experts_one_by_one(x, experts, weights, up, down, gate=None):
    """Every expert on every token, in the type of the arguments."""
    inner = jnp.einsum("td,edf->etf", x, up)
    if gate is not None:
        inner = jax.nn.silu(jnp.einsum("td,edf->etf", x, gate)) * inner
    else:
        inner = jax.nn.silu(inner)
    every = jnp.einsum("etf,efd->etd", inner, down)
    chosen = jax.nn.one_hot(experts, up.shape[0], dtype=x.dtype) * weights[..., None]
    return jnp.einsum("tke,etd->td", chosen, every)


def mixture(tokens=13, per_token=2, count=4, width=16, hidden=24, gated=True):
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(count)[:per_token] for _ in range(tokens)])
    matrices = [normal(1, count, width, hidden), normal(2, count, hidden, width)]
    matrices += [normal(3, count, width, hidden)] if gated else []
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, per_token)), jnp.float32)
    return normal(0, tokens, width), jnp.asarray(experts), weights, *(0.3 * m for m in matrices)


@by_body
@pytest.mark.parametrize("gated", [True, False])
def test_experts_and_their_gradients(body, gated):
    x, experts, weights, *matrices = mixture(gated=gated)

    def loss(function):
        def value(x, weights, *matrices):
            out = function(x, experts, weights, *matrices)
            return (out * normal(9, *out.shape)).sum(), out

        arguments = range(2 + len(matrices))
        return jax.jit(jax.value_and_grad(value, argnums=tuple(arguments), has_aux=True))

    ours = loss(functools.partial(expert_feedforward, **body))(x, weights, *matrices)
    theirs = loss(experts_one_by_one)(x, weights, *matrices)
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_an_expert_may_be_chosen_twice_or_by_nobody_and_tokens_may_be_missing():
    x, _, weights, *matrices = mixture()
    experts = jnp.ones((13, 2), jnp.int32)
    out = expert_feedforward(x, experts, weights, *matrices)
    expected = experts_one_by_one(x, experts, weights, *matrices)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    empty = expert_feedforward(x[:0], experts[:0], weights[:0], *matrices)
    assert empty.shape == (0, 16)


@by_body
@pytest.mark.parametrize(
    "partition",
    [{"e": "a"}, {"t": "b", "e": "a"}, {"t": "a", "f": "b"}, {"e": ("a", "b")}],
    ids=str,
)
def test_experts_spread_over_a_mesh(body, partition):
    """Tokens, experts, hidden widths over 8 devices give what one device does."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, experts, weights, *matrices = mixture(tokens=16, count=8)

    def value(x, weights, matrices, **options):
        out = expert_feedforward(x, experts, weights, *matrices, **options)
        return (out * normal(9, *out.shape)).sum(), out

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    expected = jax.jit(grad(value))(x, weights, matrices)
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        arguments = jax.device_put((x, weights, matrices), whole)
        found = jax.jit(grad(functools.partial(value, partition=partition, **body)))(*arguments)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_blocks_follow_the_groups():
    assert tpu.plan(16, 8, 4096, 14336) == tpu.Blocks(16, 1024, 1024)
    assert tpu.plan(8192, 64, 2048, 1024) == tpu.Blocks(128, 1024, 1024)
    assert tpu.plan(65536, 8, 4096, 200) == tpu.Blocks(512, 1024, 256)


def test_what_does_not_fit_is_named():
    x, experts, weights, *matrices = mixture()
    sizes = jnp.array([13, 0, 0, 0], jnp.int32)
    with pytest.raises(ValueError, match=r"weights \(4, 24, 16\), expected \[experts, 16, width\]"):
        grouped_matmul(x, matrices[1], sizes)
    with pytest.raises(ValueError, match=r"group_sizes int32\[2\], expected int32\[4\]"):
        grouped_matmul(x, matrices[0], sizes[:2])
    with pytest.raises(ValueError, match="weights is float32, expected bfloat16"):
        grouped_matmul(x.astype(jnp.bfloat16), matrices[0], sizes)
    with pytest.raises(ValueError, match=r"down \(4, 16, 24\), expected \(4, 24, 16\)"):
        expert_feedforward(x, experts, weights, matrices[0], matrices[0])
    with pytest.raises(ValueError, match="blocks.rows=8: no multiple of 16"):
        grouped_matmul(x, matrices[0], sizes, blocks=tpu.Blocks(8, 128, 128))
    with pytest.raises(ValueError, match="no gpu kernel for this"):
        grouped_matmul(x, matrices[0], sizes, implementation="gpu")
