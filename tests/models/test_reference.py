"""The decoder against a Llama written out by hand: the same numbers, and not one operation more."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.inputs import ModelInputs, PerLayer
from jaxllm.models.parameters import init_params

CONFIG = ModelConfig(
    vocab_size=50, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=24
)


def plain_llama(params, tokens):
    """Without any of the features that the decoder can be given."""
    head = CONFIG.head_dim

    def rms(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale

    time = tokens.shape[1]
    angles = jnp.arange(time)[:, None] / 10000.0 ** (jnp.arange(0, head, 2) / head)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]

    def rotate(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    causal = jnp.tril(jnp.ones((time, time), bool))

    def layer(x, p):
        y = rms(x, p["attention_norm"]["scale"])
        qkv = {n: y @ p["attention"]["qkv"][n]["kernel"] for n in "qkv"}
        q, k, v = (qkv[n].reshape(*y.shape[:2], -1, head) for n in "qkv")
        q, k = rotate(q).reshape(*y.shape[:2], 2, 2, head), rotate(k)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * head**-0.5
        probs = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", probs, v).reshape(*y.shape[:2], -1)
        x = x + out @ p["attention"]["o"]["kernel"]
        y = rms(x, p["feedforward_norm"]["scale"])
        inner = p["feedforward"]["in"]
        y = jax.nn.silu(y @ inner["gate"]["kernel"]) * (y @ inner["up"]["kernel"])
        return x + y @ p["feedforward"]["down"]["kernel"], None

    x, _ = jax.lax.scan(layer, params["embed"]["tokens"][tokens], params["layers"][0])
    return rms(x, params["final_norm"]["scale"]) @ params["lm_head"]["kernel"]


def cost(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().cost_analysis()


def test_numbers_and_cost_of_a_llama_written_by_hand():
    params = init_params(CONFIG.replace(initializer_range=0.3), jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, CONFIG.vocab_size)

    def ours(params, tokens):
        return forward(CONFIG, params, tokens).logits

    chex.assert_trees_all_close(
        ours(params, tokens), plain_llama(params, tokens), rtol=1e-4, atol=1e-4
    )
    mine, plain = cost(ours, params, tokens), cost(plain_llama, params, tokens)
    assert mine["flops"] <= plain["flops"] * 1.02
    assert mine["bytes accessed"] <= plain["bytes accessed"] * 1.05

    def masked(params, tokens, mask):
        inputs = ModelInputs(per_layer=PerLayer(head_mask=mask))
        return forward(CONFIG, params, tokens, inputs).logits

    assert cost(masked, params, tokens, jnp.ones((4, 4)))["flops"] > mine["flops"]
