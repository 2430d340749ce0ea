"""What a forward pass may be given beside tokens, and what it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models.positions import RopeSets

SITES = (
    "residual_in",  # [B, T, D] stream entering the layer
    "attention_in",  # [B, T, D] after the norm: what q, k and v read
    "q",
    "k",
    "v",  # [B, T, H or K, head_dim] as they enter the cache (q and k rotated)
    "attention_probs",  # [B, H, T, S] capture only
    "attention_heads",  # [B, T, H, head_dim] before the output projection, after the head mask
    "attention_out",  # [B, T, D] what attention adds to the stream
    "residual_mid",  # [B, T, D] stream between the halves (absent with parallel residuals)
    "feedforward_in",  # [B, T, D] after the norm: what gate and up read
    "feedforward_hidden",  # [B, T, F] what down reads, after the neuron mask (dense layers)
    "router_logits",  # [B, T, E] capture only (mixture layers)
    "feedforward_out",  # [B, T, D] what the feed-forward adds to the stream
    "residual_out",  # [B, T, D] stream leaving the layer
)
CAPTURE_ONLY = ("attention_probs", "router_logits")


@flax.struct.dataclass
class Patch:
    """Replaces activations at chosen (layer, position) pairs of one site (activation patching).

    Attributes:
      site: one of `SITES` whose activations are [B, T, ...] (static).
      layer: which layer each of the P patches is for.
      position: time index of each patch, [P], or [P, B] where rows differ. Two patches of one layer
        must not name the same position; of different layers they may.
      value: [P, B or 1, ...], the site's trailing shape.
      mask: what to replace, broadcastable to `value`; None = all of it. One head of
        "attention_heads" is a [P, 1, H, 1] mask.
    """

    layer: Int[Array, " P"]
    position: Int[Array, "P ..."]
    value: Float[Array, "P B ..."]
    mask: Bool[Array, "P ..."] | None = None
    site: str = flax.struct.field(pytree_node=False, default="residual_out")

    def __post_init__(self) -> None:
        if self.site not in SITES or self.site in CAPTURE_ONLY:
            allowed = tuple(site for site in SITES if site not in CAPTURE_ONLY)
            raise ValueError(f"patch site {self.site!r} is unknown: expected one of {allowed}.")


@flax.struct.dataclass
class PerLayer:
    """Inputs that differ by layer: leaves have a leading layer axis, scanned with the layers.

    Attributes:
      head_mask: [L, H] or [L, B, H], multiplies the heads before the output projection.
      neuron_mask: [L, ...] with ... broadcastable to [B, T, F]; see `ModelInputs.neuron_mask`.
      window: [L] number of visible positions, itself included; overrides the config's windows.
      extras: values that a method's own nodes read, by name.
    """

    head_mask: Array | None = None
    neuron_mask: Array | None = None
    window: Int[Array, " L"] | None = None
    extras: Mapping[str, Any] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class ModelInputs:
    """Everything that a forward pass may be given beside tokens. Fields left at None cost nothing.

    Attributes:
      positions: [B, T] position of each token; None = counted within the segment ids (or the row).
      segment_ids: [B, T] documents of a packed row, from 1; 0 = padding. Tokens see their own only.
      rope: sets of rotary frequencies in place of the config's, so that they can be searched or
        trained.
      rope_set: [B] or [B, T] which set of rotary frequencies (longrope: 0 short, 1 long); None =
        decided by the length of the sequence.
      neuron_mask: broadcastable to [B, T, F]: True/False keeps or drops hidden neurons of every
        dense feed-forward, floats multiply them.
      patches: activations to replace.
      state: initial value of whatever travels with the stream from layer to layer.
      per_layer: inputs that differ by layer.
      context_length: static number of leading positions that are context (prompt) in every row, for
        methods that treat context and answer differently.
      extras: values that a method's own nodes read, by name.
    """

    positions: Int[Array, "B T"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    rope: RopeSets | None = None
    rope_set: Int[Array, "B ..."] | None = None
    neuron_mask: Array | None = None
    patches: tuple[Patch, ...] = ()
    state: Any = None
    per_layer: PerLayer = flax.struct.field(default_factory=PerLayer)
    context_length: int | None = flax.struct.field(pytree_node=False, default=None)
    extras: Mapping[str, Any] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class BlockOutput:
    """What one layer returns: the stream, what travels with it, and what was asked for.

    Attributes:
      x: [B, T, D].
      state: travelling state.
      cache: this layer's cache.
      aux: auxiliary values of the feed-forward (router losses and loads); {} for a dense layer.
      captured: activations by site.
    """

    x: Float[Array, "B T D"]
    state: Any
    cache: Any
    aux: dict[str, Array]
    captured: dict[str, Array]


@flax.struct.dataclass
class ModelOutputs:
    """What a forward pass returns.

    Attributes:
      logits: [B, T, V] float32, or None with `head=False`.
      hidden: [B, T, D] after the final norm.
      state: travelling state after the last layer.
      cache: one stacked cache a segment.
      aux: one dictionary a segment, leaves stacked over its layers.
      captured: by site, [L, ...] over the layers that have the site (a tuple of arrays, one a
        layer, where shapes differ).
    """

    logits: Float[Array, "B T V"] | None
    hidden: Float[Array, "B T D"]
    state: Any
    cache: tuple[Any, ...]
    aux: tuple[dict[str, Array], ...]
    captured: dict[str, Any]
