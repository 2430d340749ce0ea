"""The decoder: `embed`, `block`, `unembed`, each usable alone, and `forward`, their composition.

Letters: B batch, T time, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.attention import attention
from jaxllm.models.config import ModelConfig
from jaxllm.models.context import Context, Shared, Taps
from jaxllm.models.feedforward import feedforward
from jaxllm.models.inputs import BlockOutput, ModelInputs, ModelOutputs
from jaxllm.models.kv_cache import KVCache, NoCache
from jaxllm.models.linear import matmul
from jaxllm.models.norms import norm
from jaxllm.models.positions import rope_tables, token_positions
from jaxllm.models.segments import segment_length

STREAM_AXES = ("batch", "length", "act_embed")


def prepare(config: ModelConfig, inputs: ModelInputs, batch: int, time: int) -> Shared:
    """What all layers share: positions, segment ids and the rotary tables."""
    for name, value in (("positions", inputs.positions), ("segment_ids", inputs.segment_ids)):
        if value is not None and value.shape != (batch, time):
            raise ValueError(f"{name} has shape {value.shape}, expected {(batch, time)}.")
    positions = inputs.positions
    if positions is None and inputs.segment_ids is not None:
        positions = token_positions(inputs.segment_ids)
    elif positions is None:
        positions = jnp.broadcast_to(jnp.arange(time), (batch, time))
    rope = None
    if config.positions == "rope":
        rope = rope_tables(
            config,
            positions,
            segment_ids=inputs.segment_ids,
            rope_set=inputs.rope_set,
            sets=inputs.rope,
        )
    return Shared(positions=positions, segment_ids=inputs.segment_ids, rope=rope)


def embed(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Token embeddings, scaled or with learned positions as the config says, in the compute type.

    Args:
      config: the model's.
      params: the whole tree; only "embed" is read.
      tokens: token ids.
      positions: read by learned positions only; None = 0, 1, 2, ...
    """
    dtype = jnp.dtype(config.compute_dtype)
    x = params["embed"]["tokens"].at[tokens].get(mode="clip").astype(dtype)
    if config.embed_scale != 1.0:
        # Rounded to the compute type first, as checkpoints of this kind were trained.
        x = x * jnp.asarray(config.embed_scale, dtype)
    if config.positions == "learned":
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        x = x + params["embed"]["positions"].at[positions].get(mode="clip").astype(dtype)
    return nn.with_logical_constraint(x, STREAM_AXES)


def block(
    config: ModelConfig,
    layer_params: Mapping[str, Any],
    x: Float[Array, "B T D"],
    inputs: ModelInputs | None = None,
    *,
    layer: int | Int[Array, ""] = 0,
    state: Any = None,
    cache: KVCache | None = None,
    shared: Shared | None = None,
    capture: tuple[str, ...] = (),
) -> BlockOutput:
    """One layer.

    Args:
      config: the model's.
      layer_params: parameters of one layer (an element of `segments.unstack`).
      x: the stream.
      inputs: as for `forward`, but `inputs.per_layer` holds this layer's slice (no layer axis).
      layer: index of the layer, which patches and the config's windows refer to.
      state: what travels with the stream.
      cache: this layer's; None = `NoCache`.
      shared: from `prepare`; None = computed here.
      capture: sites to return activations of.
    """
    inputs = ModelInputs() if inputs is None else inputs
    shared = prepare(config, inputs, *x.shape[:2]) if shared is None else shared
    context = Context(
        config=config,
        inputs=inputs,
        shared=shared,
        layer=layer,
        cache=NoCache() if cache is None else cache,
        taps=Taps(capture),
    )
    x = context.tap("residual_in", x)
    y, state, cache = _attention_half(config, layer_params, x, state, context)
    if config.parallel_residual:
        z, state, aux = _feedforward_half(config, layer_params, x, state, context)
        x = x + y + z
    else:
        x = context.tap("residual_mid", x + y)
        z, state, aux = _feedforward_half(config, layer_params, x, state, context)
        x = x + z
    x = context.tap("residual_out", nn.with_logical_constraint(x, STREAM_AXES))
    return BlockOutput(x=x, state=state, cache=cache, aux=aux, captured=context.taps.captured)


def _attention_half(config, layer_params, x, state, context):
    y = context.tap("attention_in", norm(config, layer_params["attention_norm"], x))
    y, state, cache = attention(layer_params["attention"], y, state, context)
    if config.post_norms:
        y = norm(config, layer_params["attention_post_norm"], y)
    return context.tap("attention_out", y), state, cache


def _feedforward_half(config, layer_params, x, state, context):
    y = context.tap("feedforward_in", norm(config, layer_params["feedforward_norm"], x))
    y, state, aux = feedforward(layer_params["feedforward"], y, state, context)
    if config.post_norms:
        y = norm(config, layer_params["feedforward_post_norm"], y)
    return context.tap("feedforward_out", y), state, aux


def head_weight(params: Mapping[str, Any]) -> tuple[Any, int]:
    """The output weight as it is stored, and which of its axes is the vocabulary.

    Returns:
      (lm_head kernel [D, V], 1), or where the head is tied (token embedding [V, D], 0).
    """
    if "lm_head" in params:
        return params["lm_head"]["kernel"], 1
    return params["embed"]["tokens"], 0


def final_norm(
    config: ModelConfig, params: Mapping[str, Any], x: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """The norm after the last layer."""
    return norm(config, params["final_norm"], x)


def logits_from_hidden(
    config: ModelConfig, params: Mapping[str, Any], hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """float32 logits of normed hidden states, soft-capped where the config says so."""
    weight, vocab_axis = head_weight(params)
    logits = matmul(hidden, weight if vocab_axis == 1 else weight.T).astype(jnp.float32)
    logits = nn.with_logical_constraint(logits, ("batch", "length", "act_vocab"))
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits


def unembed(
    config: ModelConfig, params: Mapping[str, Any], x: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Final norm and output projection of the stream."""
    return logits_from_hidden(config, params, final_norm(config, params, x))


_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all_dots": jax.checkpoint_policies.dots_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def forward(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: Int[Array, "B T"],
    inputs: ModelInputs | None = None,
    *,
    cache: tuple[KVCache, ...] | None = None,
    capture: tuple[str, ...] = (),
    head: bool = True,
) -> ModelOutputs:
    """The whole decoder.

    Args:
      config: the model's.
      params: {"embed", "layers": segments, "final_norm", "lm_head" unless tied}.
      tokens: token ids.
      inputs: what else the pass is given.
      cache: one stacked cache a segment; None = the tokens are the whole sequence.
      capture: sites (`inputs.SITES`) to return activations of.
      head: False leaves the logits out, for losses that read `hidden`.

    Raises:
      ValueError: shapes of tokens, inputs and parameters that do not fit.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [batch, time], got shape {tokens.shape}.")
    inputs = ModelInputs() if inputs is None else inputs
    segments = params["layers"]
    if cache is not None and len(cache) != len(segments):
        raise ValueError(f"{len(cache)} caches for {len(segments)} segments of layers.")
    shared = prepare(config, inputs, *tokens.shape)
    x, state = embed(config, params, tokens, shared.positions), inputs.state

    caches, auxes, captures, start = [], [], [], 0
    for index, segment in enumerate(segments):
        stop = start + segment_length(segment)
        x, state, output = _run_segment(
            config,
            segment,
            x,
            state,
            inputs,
            shared,
            start,
            stop,
            NoCache() if cache is None else cache[index],
            capture,
        )
        caches.append(output.cache)
        auxes.append(output.aux)
        captures.append(output.captured)
        start = stop
    if start != config.num_layers:
        raise ValueError(f"parameters hold {start} layers, the config says {config.num_layers}.")

    hidden = final_norm(config, params, x)
    return ModelOutputs(
        logits=logits_from_hidden(config, params, hidden) if head else None,
        hidden=hidden,
        state=state,
        cache=tuple(caches),
        aux=tuple(auxes),
        captured=_join_captures(captures),
    )


def _run_segment(config, segment, x, state, inputs, shared, start, stop, cache, capture):
    """Scans the layers start .. stop - 1; per-layer outputs come back stacked."""

    def layer_step(carry, per_step):
        x, state = carry
        layer_params, per_layer, layer_cache, layer = per_step
        output = block(
            config,
            layer_params,
            x,
            inputs.replace(per_layer=per_layer),
            layer=layer,
            state=state,
            cache=layer_cache,
            shared=shared,
            capture=capture,
        )
        return (output.x, output.state), output.replace(x=None, state=None)

    if config.remat != "none":
        layer_step = jax.checkpoint(
            layer_step, policy=_REMAT_POLICIES[config.remat], prevent_cse=stop - start == 1
        )
    per_layer = jax.tree.map(lambda leaf: leaf[start:stop], inputs.per_layer)
    if stop - start == 1:
        # A scan of one step would cost a loop and hide the layer's index from the compiler.
        take = functools.partial(jax.tree.map, lambda leaf: leaf[0])
        carry, output = layer_step((x, state), (take(segment), take(per_layer), take(cache), start))
        output = jax.tree.map(lambda leaf: leaf[None], output)
    else:
        carry, output = jax.lax.scan(
            layer_step, (x, state), (segment, per_layer, cache, jnp.arange(start, stop))
        )
    return *carry, output


def _join_captures(captures: list[dict[str, Array]]) -> dict[str, Any]:
    """Joins the captures of segments over layers, as a tuple of layers where shapes differ."""
    joined: dict[str, Any] = {}
    for site in dict.fromkeys(site for captured in captures for site in captured):
        parts = [captured[site] for captured in captures if site in captured]
        if len({part.shape[1:] for part in parts}) == 1:
            joined[site] = jnp.concatenate(parts)
        else:
            joined[site] = tuple(layer for part in parts for layer in part)
    return joined
