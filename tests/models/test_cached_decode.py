"""Prompts of any lengths, whole or in chunks, then token by token: equal to the full pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference.prefill import decode_step, prefill
from jaxllm.kv_compression.streaming_llm import StreamingLLMPolicy
from jaxllm.models import kv_cache
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.hf.config import config_from_hf
from jaxllm.models.kv_cache import DensePolicy
from jaxllm.models.parameters import init_params
from jaxllm.models.window_cache import SlidingWindowPolicy
from jaxllm.quantization.kivi import KIVIPolicy
from jaxllm.training import sharding
from tests.parity.family_models import CASES

TIME, NEW, SLOTS = 12, 3, 14

LENGTHS = jnp.array([9, 4])
# Rows of a larger cache that the prompts are put into; the others stand idle.
PLACES = jnp.array([2, 0])


def decode(config, params, tokens, cache, lengths):
    """Logits [rows, NEW, V] of the tokens that follow the prompts."""

    def step(cache, index):
        at = lengths + index
        following = tokens[jnp.arange(len(tokens)), at]
        logits, cache = decode_step(config, params, following, at, cache)
        return cache, logits

    cache, logits = jax.lax.scan(step, cache, jnp.arange(NEW))
    return logits.swapaxes(0, 1), cache


def continuous(config, params, tokens, cache, lengths):
    """The same in a batch of four rows of which two are idle, the first row a step behind."""
    slots = DensePolicy().init(config, params, 4, SLOTS)
    slots = kv_cache.put_rows(slots, PLACES, cache)

    def step(cache, index):
        at = lengths + index - jnp.array([1, 0])
        active = (at >= lengths) & (at < lengths + NEW)
        following = tokens[jnp.arange(2), at]
        spread = lambda x: jnp.zeros(4, x.dtype).at[PLACES].set(x)  # noqa: E731
        logits, cache = decode_step(
            config, params, spread(following), spread(at), cache, active=spread(active)
        )
        return cache, logits

    _, logits = jax.lax.scan(step, slots, jnp.arange(NEW + 1))
    one, other = logits[:, PLACES].swapaxes(0, 1)
    return jnp.stack([one[1:], other[:-1]]), jnp.isfinite(logits).all()


def everything(config, params, split, tokens):
    """Logits after the prompts and of NEW further tokens, computed in two ways, and the full pass.

    First whole prompts, dense caches, rows that come and go. Then prompts in chunks, rings where
    there are windows, and several samples of a prompt.
    """
    run = lambda params, **options: prefill(  # noqa: E731
        config, params, tokens, LENGTHS, num_slots=SLOTS, **options
    )
    first, cache = run(params)
    rest, finite = continuous(config, params, tokens, cache, LENGTHS)
    found = {"continuous": (first, rest)}
    first, cache = run(split, cache_policy=SlidingWindowPolicy(), chunk=5)
    rows = jnp.array([1, 1, 0])
    cache = kv_cache.take_rows(cache, rows)
    rest, _ = decode(config, split, tokens[rows], cache, LENGTHS[rows])
    found["samples"] = first, rest[jnp.array([2, 0])]
    return forward(config, params, tokens).logits, found, finite


def check(config: ModelConfig, params):
    tokens = jax.random.randint(jax.random.key(2), (2, TIME), 0, config.vocab_size)
    split = SlidingWindowPolicy().split(config, params)
    full, found, finite = jax.jit(everything, static_argnums=0)(config, params, split, tokens)
    assert jnp.std(full) > 0.1
    assert finite
    rows = jnp.arange(2)
    for name, (first, rest) in found.items():
        np.testing.assert_allclose(first, full[rows, LENGTHS - 1], atol=1e-4, err_msg=name)
        for index in range(NEW):
            expected = full[rows, LENGTHS + index]
            np.testing.assert_allclose(rest[:, index], expected, atol=1e-4, err_msg=name)


def test_cached_decoding_equals_the_full_forward_pass(model):
    check(*model)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_cached_decoding_of_every_family(name):
    family, settings = CASES[name]
    config = config_from_hf({"model_type": family, **settings})
    check(config, init_params(config.replace(initializer_range=0.2), jax.random.key(1)))


def test_caches_that_differ_by_layer_need_layers_cut(models):
    config, params = models["gemma2"]
    policy = SlidingWindowPolicy()
    with pytest.raises(
        ValueError, match=r"SlidingWindowPolicy gives the layers 0 to 2, one segment"
    ):
        policy.init(config, params, 2, SLOTS)
    split = policy.split(config, params)
    assert [len(jax.tree.leaves(s)[0]) for s in split["layers"]] == [1, 1, 1]
    assert policy.split(config, split)["layers"][1] is split["layers"][1]
    assert [c.k.shape[3] for c in policy.init(config, split, 2, SLOTS)] == [4, SLOTS, 4]
    assert DensePolicy().split(config, params)["layers"] == params["layers"]


@pytest.mark.parametrize(
    "policy",
    [
        DensePolicy(),
        StreamingLLMPolicy(num_sinks=1, window=6),
        KIVIPolicy(4, 4, key_group=4, value_group=None, residual=4),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_sharded_over_rows_and_key_heads(models, policy):
    config, params = models["llama"]
    tokens = jax.random.randint(jax.random.key(2), (4, TIME), 0, config.vocab_size)
    lengths = jnp.array([9, 4, 6, 8])

    def run(params, tokens):
        first, cache = prefill(
            config, params, tokens, lengths, num_slots=SLOTS, cache_policy=policy
        )
        rest, after = decode(config, params, tokens, cache, lengths)
        return first, rest, cache, after

    expected = jax.jit(run)(params, tokens)
    mesh = sharding.create_mesh(sharding.MeshConfig(fsdp=4, tensor=2))
    with sharding.use(mesh):
        # A function of its own: what is compiled outside of the mesh must not be found again.
        found = jax.jit(lambda *arguments: run(*arguments))(params, tokens)
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    for cache in found[2:]:
        for leaf in jax.tree.leaves(cache):
            shard = leaf.sharding.shard_shape(leaf.shape)
            assert shard[1] == leaf.shape[1] // 4
            if leaf.ndim > 3:
                assert shard[2] == leaf.shape[2] // 2
