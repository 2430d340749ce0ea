"""The three forms of the vocabulary cross-entropy agree, in values and in gradients."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.training import losses, sharding


def _inputs(batch, length, dim, vocab, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, length, dim)).astype(dtype)
    head = rng.normal(size=(dim, vocab)).astype(dtype)
    targets = rng.integers(0, vocab, (batch, length)).astype(np.int32)
    weights = (rng.random((batch, length)) * (rng.random((batch, length)) > 0.3)).astype(dtype)
    return hidden, head, targets, weights


def _plain(hidden, head, targets, weights, vocab_axis=1, softcap=None, z_loss=0.0):
    logits = hidden @ (head if vocab_axis == 1 else head.T)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return losses.cross_entropy(logits, targets, weights, z_loss=z_loss)


def test_plain_is_the_textbook_formula():
    hidden, head, targets, weights = _inputs(2, 5, 3, 7, dtype=np.float64)
    logits = hidden @ head
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    with jax.enable_x64(True):
        sums = losses.cross_entropy(
            jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights), z_loss=0.1
        )
    np.testing.assert_allclose(sums.cross_entropy, (weights * nll).sum(), rtol=1e-12)
    np.testing.assert_allclose(sums.z_loss, 0.1 * (weights * log_z**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(sums.total, sums.cross_entropy + sums.z_loss, rtol=1e-12)
    np.testing.assert_allclose(sums.weight, weights.sum(), rtol=1e-12)
    correct = (logits.argmax(-1) == targets) * weights
    np.testing.assert_allclose(sums.correct, correct.sum(), rtol=1e-12)


@settings(max_examples=6)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    chunk=st.integers(1, 12),
    vocab_axis=st.sampled_from([0, 1]),
    softcap=st.sampled_from([None, 3.0]),
    z_loss=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 99),
)
def test_fused_equals_plain(batch, length, chunk, vocab_axis, softcap, z_loss, seed):
    hidden, head, targets, weights = _inputs(batch, length, 3, 5, seed, np.float64)
    head = head if vocab_axis == 1 else head.T
    options = {"vocab_axis": vocab_axis, "softcap": softcap, "z_loss": z_loss}

    def value_and_grads(function, **more):
        def total(hidden, head, weights):
            sums = function(hidden, head, jnp.asarray(targets), weights, **options, **more)
            return 1.7 * sums.total, sums

        gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        (_, sums), grads = gradient(hidden, head, weights)
        return sums, grads

    with jax.enable_x64(True):
        expected, expected_grads = value_and_grads(_plain)
        sums, grads = value_and_grads(losses.fused_cross_entropy, chunk=chunk)
        alone = jax.jit(
            lambda *arrays: losses.fused_cross_entropy(*arrays, **options, chunk=chunk)
        )(hidden, head, targets, weights)
    for a, b, c in zip(sums, expected, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(c, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(grads, expected_grads, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_fused_in_bfloat16_stays_near_float32():
    hidden, head, targets, weights = _inputs(2, 16, 32, 50)

    def grads(dtype):
        return jax.grad(
            lambda h, w: losses.fused_cross_entropy(h, w, targets, weights, chunk=8).total, (0, 1)
        )(jnp.asarray(hidden, dtype), jnp.asarray(head))

    half, full = grads(jnp.bfloat16), grads(jnp.float32)
    assert half[0].dtype == jnp.bfloat16 and half[1].dtype == jnp.float32
    for a, b in zip(half, full, strict=True):
        difference = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert difference < 0.03


def test_weightless_targets_may_be_anything():
    hidden, head, targets, weights = _inputs(1, 6, 3, 5)
    weights[:, 3:] = 0
    wild = targets.copy()
    wild[:, 3:] = [-100, 10**6, -1]

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(function, targets):
        return jax.grad(lambda h: function(h, head, targets, weights).total)(hidden)

    for function in (losses.fused_cross_entropy, _plain):
        np.testing.assert_array_equal(gradient(function, wild), gradient(function, targets))


def test_token_log_probs_take_a_cotangent_per_token():
    hidden, head, targets, coefficients = _inputs(2, 7, 3, 5, dtype=np.float64)

    def plain(hidden, head):
        logits = jax.nn.log_softmax(2.0 * jnp.tanh(hidden @ head / 2.0))
        log_probs = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jnp.sin(log_probs) * coefficients).sum()

    def chunked(hidden, head):
        log_probs = losses.token_log_probs(
            hidden, head.T, jnp.asarray(targets), vocab_axis=0, softcap=2.0, chunk=6
        )
        return (jnp.sin(log_probs) * coefficients).sum()

    with jax.enable_x64(True):
        a = jax.value_and_grad(plain, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
        b = jax.value_and_grad(chunked, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), a, b)


def test_fused_holds_one_chunk_of_logits():
    hidden, head, targets, weights = _inputs(1, 512, 8, 2048)

    def temporaries(function, **options):
        gradient = jax.jit(jax.grad(lambda h, w: function(h, w, targets, weights, **options).total))
        compiled = gradient.lower(jnp.asarray(hidden), jnp.asarray(head)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 512 * 2048
    assert temporaries(_plain) >= logits
    assert temporaries(losses.fused_cross_entropy, chunk=64) < logits / 2


def test_shapes_are_checked():
    hidden, head, targets, weights = _inputs(2, 4, 3, 5)
    with pytest.raises(ValueError, match="vocab_axis=0"):
        losses.fused_cross_entropy(hidden, head, targets, weights, vocab_axis=0)
    with pytest.raises(ValueError, match="targets"):
        losses.fused_cross_entropy(hidden, head, targets[:, :3], weights)
    with pytest.raises(ValueError, match="weights"):
        losses.cross_entropy(jnp.asarray(hidden @ head), targets, weights[:1])
    with pytest.raises(ValueError, match="integers"):
        losses.cross_entropy(jnp.asarray(hidden @ head), weights)
    with pytest.raises(ValueError, match="chunk=0"):
        losses.fused_cross_entropy(hidden, head, targets, chunk=0)


def test_on_a_mesh_the_head_gradient_is_summed_once():
    """Where the head is whole on a device, as for per-token log-probabilities."""
    hidden, head, targets, weights = _inputs(4, 16, 12, 40)
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=2, tensor=2, context=2))

    def total(hidden, head, chunk):
        log_probs = losses.token_log_probs(hidden, head, targets, chunk=chunk)
        return (jnp.sin(log_probs) * weights).sum()

    gradient = jax.jit(jax.value_and_grad(total, (0, 1)), static_argnums=2)
    expected = gradient(hidden, head, 64)
    with sharding.use(mesh):
        compiled = gradient.lower(*_placed(mesh, hidden, head), 4).compile()
        made = compiled(*_placed(mesh, hidden, head))
    _assert_close(made, expected)
    text = compiled.as_text()
    assert "while(" in text  # more than one chunk
    loops = text[: text.index("\nENTRY")]
    assert not [
        line
        for line in loops.splitlines()
        if re.search(r" (all-reduce|reduce-scatter)\(", line) and "[12,20]" in line
    ]


@pytest.mark.parametrize(
    ("axes", "vocab_size", "vocab_axis", "softcap", "z_loss"),
    [
        ({"fsdp": 2, "tensor": 2, "context": 2}, 40, 1, None, 0.0),
        ({"fsdp": 2, "tensor": 2, "context": 2}, 40, 0, 3.0, 0.1),
        ({"data": 2, "fsdp": 4}, 43, 1, 3.0, 0.0),  # the last block overlaps the one before
        ({"tensor": 8}, 40, 0, None, 0.1),
        ({"fsdp": 8}, 40, 1, None, 0.0),  # neither rows nor embedding divide over 8
    ],
)
def test_fused_on_a_mesh_goes_by_blocks_of_the_vocabulary(
    axes, vocab_size, vocab_axis, softcap, z_loss
):
    hidden, head, targets, weights = _inputs(4, 16, 12, vocab_size)
    targets = jnp.asarray(targets).at[0, :3].set(jnp.array([-1, -100, vocab_size + 5]))
    weights = jnp.asarray(weights).at[0, :3].set(0.0)
    head = head if vocab_axis else head.T

    def total(hidden, head, weights, chunk):
        sums = losses.fused_cross_entropy(
            hidden,
            head,
            targets,
            weights,
            vocab_axis=vocab_axis,
            softcap=softcap,
            z_loss=z_loss,
            chunk=chunk,
        )
        return sums.total, sums

    gradient = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True), static_argnums=3)
    (_, sums), (d_hidden, d_head, d_weights) = gradient(hidden, head, weights, 64)
    mesh = sharding.create_mesh(sharding.MeshConfig(**axes))
    with sharding.use(mesh):
        compiled = gradient.lower(*_placed(mesh, hidden, head, vocab_axis), weights, 4).compile()
        (_, made_sums), made = compiled(*_placed(mesh, hidden, head, vocab_axis), weights)
        alone = jax.jit(lambda *arrays: total(*arrays, 4)[1])(hidden, head, weights)
    _assert_close(made_sums, sums)
    _assert_close(alone, sums)
    counted = np.asarray(weights) > 0
    _assert_close(made[:2], (d_hidden, d_head))
    _assert_close(made[2][counted], d_weights[counted])
    # No device ever holds the whole head, or its gradient.
    whole = "[12,40]" if vocab_axis else "[40,12]"
    assert axes == {"fsdp": 8} or whole not in compiled.as_text()


def _placed(mesh, hidden, head, vocab_axis=1):
    rows = sharding.partition_spec(hidden.shape, ("batch", "length", None), mesh)
    names = ("embed", "vocab") if vocab_axis else ("vocab", "embed")
    of_head = sharding.partition_spec(head.shape, names, mesh)
    return (
        jax.device_put(hidden, NamedSharding(mesh, rows)),
        jax.device_put(head, NamedSharding(mesh, of_head)),
    )


def _assert_close(made, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), made, expected
    )


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_on_a_mesh_a_device_keeps_its_shard_of_the_head_gradient(vocab_axis):
    """In bfloat16 products too, where the whole sum would be the largest array of a step."""
    hidden, head, targets, weights = _inputs(8, 16, 32, 40)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    head, spec = (head, P("fsdp", "tensor")) if vocab_axis else (head.T, P("tensor", "fsdp"))
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))

    def total(head):
        return losses.fused_cross_entropy(
            hidden, head, targets, weights, vocab_axis=vocab_axis, chunk=32
        ).total

    expected = jax.grad(total)(head)
    with sharding.use(mesh):
        made = jax.jit(jax.grad(total))(jax.device_put(head, NamedSharding(mesh, spec)))
    assert made.sharding.spec == spec and made.dtype == expected.dtype
    np.testing.assert_allclose(made, expected, atol=0.01 * np.abs(expected).max())
