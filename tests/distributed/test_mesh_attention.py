"""Attention on a mesh: equal to one device, with memory that grows like the sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import decoder, mesh_attention, parameters
from jaxllm.models.config import MLAConfig, ModelConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.inputs import ModelInputs
from jaxllm.models.kv_cache import NoCache
from jaxllm.training import objectives, sharding

CONFIG = ModelConfig(
    vocab_size=32,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=16,
    attention_softcap=3.0,
    windows=(5, None),
)
ROWS, TIME = 4, 16
# Two documents and padding; the cut lies in the middle of a shard.
SEGMENTS = np.broadcast_to(np.repeat([1, 2, 0], [6, 8, 2]), (ROWS, TIME)).astype(np.int32)


def attend(q, k, v, direction, layer, segment_ids, config=CONFIG):
    """(output, gradients of q, k, v) of the attention of one layer."""
    shared = Shared(positions=None, segment_ids=segment_ids, rope=None)
    context = Context(config, ModelInputs(), shared, layer=layer, cache=None, taps=Taps(()))

    def scalar(q, k, v):
        out, _ = NoCache().attend(q, k, v, context)
        return (out * direction).sum(), out

    gradients, out = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *gradients


def example(time=TIME, value_width=6):
    """Queries of 4 heads, keys of 2, values of another width, a direction for the output."""
    rng = np.random.default_rng(0)
    widths = ((4, 8), (2, 8), (2, value_width), (4, value_width))
    return tuple(rng.normal(size=(ROWS, time, *width)).astype(np.float32) for width in widths)


@pytest.fixture(scope="module")
def one_device():
    return jax.jit(attend)


@pytest.mark.parametrize(
    ("mesh", "segment_ids"),
    [
        ({"fsdp": 2, "context": 4}, None),
        ({"fsdp": 2, "context": 4}, SEGMENTS),
        ({"fsdp": 2, "tensor": 2, "context": 2}, SEGMENTS),
        ({"fsdp": 1, "tensor": 4, "context": 2}, SEGMENTS),  # Two key heads do not divide by four.
    ],
    ids=["ring", "packed", "heads", "whole-heads"],
)
def test_values_and_gradients_equal_one_device(one_device, mesh, segment_ids):
    # A function of its own: what is compiled outside of the mesh must not be found again.
    many = jax.jit(lambda *arguments: attend(*arguments))
    for layer in (jnp.int32(0), jnp.int32(1)):  # With a window, and without.
        expected = one_device(*example(), layer, segment_ids)
        with sharding.use(sharding.create_mesh(sharding.MeshConfig(**mesh))):
            got = many(*example(), layer, segment_ids)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize("latent", [False, True], ids=["rope", "mla"])
def test_a_packed_model_equals_one_device(latent):
    """Rotary positions restart, labels are shifted over shards, the fused loss sums them."""
    config = CONFIG
    if latent:
        config = ModelConfig(
            vocab_size=32,
            embed_dim=32,
            num_layers=1,
            num_heads=4,
            mlp_dim=16,
            mla=MLAConfig(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12),
        )
    params = parameters.init_params(config.replace(initializer_range=0.2), jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 32, (ROWS, TIME + 1)).astype(np.int32)
    weights = (SEGMENTS > 0).astype(np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    batch["segment_ids"] = SEGMENTS
    loss = objectives.language_model_loss(config, chunk=16)

    def both(params, batch):
        return jax.value_and_grad(lambda p: loss(p, batch, jax.random.key(0))[0])(params)

    expected = jax.jit(both)(params, batch)
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=2, context=4))
    with sharding.use(mesh):
        got = jax.jit(lambda *a: both(*a))(params, sharding.shard_batch(batch, mesh))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_probabilities_can_be_captured_and_odd_lengths_run():
    params = parameters.init_params(CONFIG, jax.random.key(0))
    tokens = jnp.arange(2 * 9).reshape(2, 9) % 32

    def run(params, tokens):
        return decoder.forward(CONFIG, params, tokens, capture=("attention_probs",))

    expected = jax.jit(run)(params, tokens)
    with sharding.use(sharding.create_mesh(sharding.MeshConfig(fsdp=2, context=4))):
        got = jax.jit(lambda *a: run(*a))(params, tokens)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-5)
    np.testing.assert_allclose(
        got.captured["attention_probs"], expected.captured["attention_probs"], atol=1e-6
    )


def test_memory_of_a_device_falls_with_its_share_of_the_sequence():
    """Temporaries and arguments of the gradient, over 1, 2 and 4 shards of time, rows fixed."""
    time, held = 512, []
    for shards in (1, 2, 4):
        mesh = sharding.create_mesh(
            sharding.MeshConfig(fsdp=1, context=shards), jax.devices()[:shards]
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in example(time=time)]
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(x.shape, mesh))
            for x in shapes
        ]
        with sharding.use(mesh):
            lowered = jax.jit(lambda *a: attend(*a, jnp.int32(1), None)).lower(*placed)
            held.append(lowered.compile().memory_analysis())
    temporaries = [memory.temp_size_in_bytes for memory in held]
    assert temporaries[1] < 0.6 * temporaries[0] and temporaries[2] < 0.6 * temporaries[1]
    arguments = [memory.argument_size_in_bytes for memory in held]
    assert arguments[2] == arguments[0] // 4


@pytest.mark.parametrize("axes", [{"fsdp": 4, "context": 2}, {"fsdp": 4, "tensor": 2}])
def test_tiles_do_not_change_the_result(monkeypatch, one_device, axes):
    monkeypatch.setattr(mesh_attention, "_TILE", 2)
    for layer in (jnp.int32(0), jnp.int32(1)):
        expected = one_device(*example(), layer, SEGMENTS)
        with sharding.use(sharding.create_mesh(sharding.MeshConfig(**axes))):
            got = jax.jit(lambda *arguments: attend(*arguments))(*example(), layer, SEGMENTS)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)


def test_memory_does_not_grow_with_the_square_of_the_sequence():
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=4), jax.devices()[:4])
    held = {}
    for time in (1024, 4096):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in example(time=time)]
        with sharding.use(mesh):
            lowered = jax.jit(lambda *a: attend(*a, jnp.int32(1), None)).lower(*shapes)
            held[time] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert held[4096] < 6 * held[1024]


def test_second_derivatives_and_forward_mode():
    """Gradient penalties and Hessian products; forward mode where the cache is asked for it."""
    q, k, v, direction = example()
    shared = Shared(positions=None, segment_ids=None, rope=None)
    context = Context(CONFIG, ModelInputs(), shared, layer=1, cache=None, taps=Taps(()))

    def total(q, any_derivative=False):
        cache = NoCache(any_derivative=any_derivative)
        return (jnp.sin(cache.attend(q, k, v, context)[0]) * direction).sum()

    def derivatives(q):
        penalty = jax.grad(lambda q: (jax.grad(total)(q) ** 2).sum())(q)
        _, hessian_product = jax.jvp(jax.grad(total), (q,), (q,))
        return penalty, hessian_product

    expected = derivatives(q)
    _, slope = jax.jvp(total, (q,), (q,))
    with sharding.use(sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))):
        for a, b in zip(jax.jit(lambda q: derivatives(q))(q), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
        _, made = jax.jvp(lambda q: total(q, any_derivative=True), (q,), (q,))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(total, (q,), (q,))
    np.testing.assert_allclose(made, slope, rtol=1e-4)
