"""The packed layout as a KIVI cache: appended to token by token, it is what KIVICache is.

The recipe, for a residual of R tokens in groups of g (R a multiple of g), and a ring of at least
R + T exact tokens with position p at p mod W. Before the step a row has n tokens:

1. the T new tokens go into the ring;
2. attention: max(n - R, 0) tokens are packed, the others are read from the ring;
3. when a block of R keys is complete, its codes go into the packed keys as R / g groups, and what
   they stand for takes the place of the exact keys in the ring;
4. values that are among the last R no longer go into the packed values, one token at a time.

So keys and values are packed up to different tokens, as KIVI has it, and attention needs one
length: keys behind it are read from the ring, rounded.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.inputs import ModelInputs
from jaxllm.quantization.affine import quantize
from jaxllm.quantization.kivi import KIVIPolicy
from pallas_kernels.quantized_kv_attention import (
    empty_keys,
    empty_values,
    quantized_kv_attention,
    write_keys,
    write_values,
)

ROWS, HEADS, WIDTH, SLOTS, RING = 2, 2, 32, 128, 48
RESIDUAL, GROUP, VALUE_GROUP = 32, 16, 16
CONFIG = ModelConfig(
    vocab_size=8, embed_dim=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=8
)


@jax.jit
def kivi_step(cache, q, k, v, positions):
    shared = Shared(positions=positions, segment_ids=None, rope=None)
    context = Context(CONFIG, ModelInputs(), shared, layer=0, cache=cache, taps=Taps(()))
    return cache.attend(q, k, v, context)


@functools.partial(jax.jit, static_argnames=("key_bits", "value_bits", "implementation"))
def packed_step(state, q, k, v, position, *, key_bits, value_bits, implementation):
    """One token of each row at `position` [B]."""
    keys, values, ring_k, ring_v = state
    put = jax.vmap(lambda ring, at, new: ring.at[:, at].set(new))
    ring_k = put(ring_k, position % RING, k[:, 0])
    ring_v = put(ring_v, position % RING, v[:, 0])
    packed = jnp.maximum(position - RESIDUAL, 0)
    # The last token at or before the newest that lies in a place of the ring.
    held = position[:, None] - (position[:, None] - jnp.arange(RING)) % RING
    out = quantized_kv_attention(
        q,
        keys,
        values,
        ring_k,
        ring_v,
        packed,
        jnp.where(held >= packed[:, None], held, -1),
        position[:, None],
        implementation=implementation,
        interpret=True,
    )

    end = position + 1
    take = jax.vmap(lambda ring, at: ring[:, at])
    tokens = (end[:, None] - RESIDUAL + jnp.arange(RESIDUAL)) % RING
    exact = take(ring_k, tokens)
    grouped = exact.reshape(ROWS, HEADS, -1, GROUP, WIDTH).swapaxes(-1, -2)
    rounded = quantize(grouped, key_bits)
    complete = end % RESIDUAL == 0
    first = (end - RESIDUAL) // GROUP
    groups = first[:, None] + jnp.arange(RESIDUAL // GROUP)
    codes = rounded.codes.swapaxes(-1, -2).reshape(exact.shape)
    groups = jnp.where(complete[:, None], groups, SLOTS)
    keys = write_keys(keys, groups, codes, rounded.scale, rounded.zero)
    stands_for = rounded.dequantize().swapaxes(-1, -2).reshape(exact.shape)
    put = jax.vmap(lambda ring, at, new: ring.at[:, at].set(new))
    ring_k = put(ring_k, tokens, jnp.where(complete[:, None, None, None], stands_for, exact))

    leaving = position - RESIDUAL
    value = take(ring_v, (leaving % RING)[:, None])
    rounded = quantize(value.reshape(ROWS, HEADS, 1, -1, VALUE_GROUP), value_bits)
    slot = jnp.where(leaving >= 0, leaving, SLOTS)[:, None]
    codes = rounded.codes.reshape(value.shape)
    values = write_values(values, slot, codes, rounded.scale, rounded.zero)
    return out, (keys, values, ring_k, ring_v)


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "implementation"), [(4, 2, "xla"), (2, 8, "tpu"), (8, 4, "gpu")]
)
def test_decoding_is_that_of_the_kivi_cache(key_bits, value_bits, implementation):
    rng = np.random.default_rng(0)
    policy = KIVIPolicy(
        key_bits, value_bits, key_group=GROUP, value_group=VALUE_GROUP, residual=RESIDUAL
    )
    cache = policy.init_layer(CONFIG, 0, ROWS, SLOTS)
    state = (
        empty_keys(ROWS, HEADS, SLOTS, WIDTH, bits=key_bits, group=GROUP),
        empty_values(ROWS, HEADS, SLOTS, WIDTH, bits=value_bits, group=VALUE_GROUP),
        jnp.zeros((ROWS, HEADS, RING, WIDTH)),
        jnp.zeros((ROWS, HEADS, RING, WIDTH)),
    )
    run = functools.partial(
        packed_step, key_bits=key_bits, value_bits=value_bits, implementation=implementation
    )
    start = np.array([0, 0])
    for step in range(2 * RESIDUAL + 10):
        q, k, v = (
            rng.normal(size=(ROWS, 1, n, WIDTH)).astype(np.float32) for n in (4, HEADS, HEADS)
        )
        k[..., 3] *= 8
        position = start + step
        want, cache = kivi_step(cache, q, k, v, position[:, None])
        got, state = run(state, q, k, v, position)
        # Two ways to the same float32 sums of 32 channels and 74 tokens, of keys up to 24.
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-5)
    # The bytes of KIVICache, in another order: codes are 0 in what is not written.
    coded = 2 * RESIDUAL
    dense = cache.k.dequantize().swapaxes(-1, -2).reshape(ROWS, HEADS, -1, WIDTH)
    np.testing.assert_allclose(
        state[0].dequantize()[:, :, :coded], dense[:, :, :coded], rtol=0, atol=1e-5
    )
    dense = cache.v.dequantize().reshape(ROWS, HEADS, -1, WIDTH)
    coded = 2 * RESIDUAL + 10 - RESIDUAL
    np.testing.assert_allclose(
        state[1].dequantize()[:, :, :coded], dense[:, :, :coded], rtol=0, atol=1e-5
    )
