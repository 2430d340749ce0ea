"""What every level of a layer is handed while it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig
from jaxllm.models.inputs import SITES, ModelInputs, Patch

if TYPE_CHECKING:
    from jaxllm.models.kv_cache import KVCache


@flax.struct.dataclass
class Shared:
    """What all layers share, computed once a forward pass.

    Attributes:
      positions: [B, T].
      segment_ids: [B, T] or None; 0 = padding.
      rope: cos and sin, [B, T, rotary_dim / 2] float32 each, or None without rotary positions.
    """

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None
    rope: tuple[Float[Array, "B T R"], Float[Array, "B T R"]] | None


@dataclasses.dataclass(frozen=True)
class Context:
    """Handed down through attention, feed-forward, groups and weights of one layer.

    Attributes:
      config: the model's.
      inputs: the forward pass's; `inputs.per_layer` holds this layer's slice.
      shared: rotary tables, positions, segment ids.
      layer: index of this layer (traced inside a scan).
      cache: this layer's cache.
      taps: where activations are patched and captured.
    """

    config: ModelConfig
    inputs: ModelInputs
    shared: Shared
    layer: int | Int[Array, ""]
    cache: KVCache
    taps: Taps

    def tap(self, site: str, value: Array) -> Array:
        """Patches and captures the activation of a site; returns what to go on with."""
        return self.taps.tap(site, value, self.inputs.patches, self.layer)

    def untapped(self) -> Context:
        """The same context for code that runs inside a loop, where nothing can be captured."""
        return dataclasses.replace(
            self, taps=Taps(()), inputs=dataclasses.replace(self.inputs, patches=())
        )

    @property
    def window(self) -> Int[Array, ""] | int | None:
        """How many positions a token of this layer sees, itself included; None = all."""
        per_layer = self.inputs.per_layer.window
        windows = self.config.windows
        if per_layer is not None or windows is None:
            return per_layer
        if len(set(windows)) == 1:
            return windows[0]
        return jnp.asarray([_UNBOUNDED if w is None else w for w in windows])[self.layer]


_UNBOUNDED = 2**30


class Taps:
    """Collects the captured activations of one layer and applies patches to them.

    Lives only while one layer is traced; `captured` leaves the layer as an ordinary output.
    """

    def __init__(self, capture: tuple[str, ...]) -> None:
        unknown = [site for site in capture if site not in SITES]
        if unknown:
            raise ValueError(f"cannot capture {unknown[0]!r}: expected one of {SITES}.")
        self.sites = tuple(capture)
        self.captured: dict[str, Array] = {}

    def wants(self, site: str) -> bool:
        """Whether the activation of a site is captured, for those that cost something to make."""
        return site in self.sites

    def tap(
        self, site: str, value: Array, patches: tuple[Patch, ...], layer: int | Int[Array, ""]
    ) -> Array:
        for patch in patches:
            if patch.site == site:
                value = _apply_patch(value, patch, layer)
        if site in self.sites:
            self.captured[site] = value
        return value


def _apply_patch(x: Float[Array, "B T ..."], patch: Patch, layer: int | Int[Array, ""]) -> Array:
    """Gathers the patched positions, replaces what the mask selects, scatters them back."""
    batch, time, *trailing = x.shape
    count = patch.layer.shape[0]
    expected = (count, batch, *trailing)
    try:
        value = jnp.broadcast_to(patch.value, expected).astype(x.dtype)
    except ValueError as error:
        raise ValueError(
            f"patch of {patch.site!r}: value has shape {patch.value.shape}, expected one that "
            f"broadcasts to {expected}."
        ) from error
    position = patch.position if patch.position.ndim == 2 else patch.position[:, None]
    position = jnp.broadcast_to(position, (count, batch))
    position = jnp.where(position < 0, position + time, position)
    rows = jnp.arange(batch)[None]
    if patch.mask is not None:
        value = jnp.where(patch.mask, value, x[rows, position])
    # Patches of other layers are sent out of bounds, so that they cannot collide with this layer's.
    position = jnp.where((patch.layer == layer)[:, None], position, time)
    return x.at[rows, position].set(value, mode="drop")
