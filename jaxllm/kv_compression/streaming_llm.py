"""StreamingLLM: attention sinks and a rolling window (Xiao et al., 2023, arXiv:2309.17453).

Softmax has to put its weight somewhere, and models learn to put what they do not need on the first
tokens of a text. A window without them breaks; with a handful of them (the sinks) a model goes on
for millions of tokens with a cache of constant size. Tokens between the sinks and the window are
forgotten.

In the paper positions are those within the cache, not those within the text: the sinks are 0 .. N -
1 and the window follows at once, so that no distance is longer than the cache. Its code stores keys
before rotation for that, and rotates all of them at every step. Rotary scores depend on differences
of positions only, so it is enough to turn the query back by the number of forgotten tokens for its
scores with the sinks (`window_cache.rotate_back`).

Prompts see sinks and window too, token by token, whereas the authors' code runs a prompt with full
attention and evicts afterwards.
"""

from __future__ import annotations

import flax.struct

from jaxllm.models.kv_cache import CachePolicy
from jaxllm.models.window_cache import init_window_cache


def _static(default):
    return flax.struct.field(pytree_node=False, default=default)


@flax.struct.dataclass
class StreamingLLMPolicy(CachePolicy):
    """Sinks and window in every layer.

    Attributes:
      num_sinks: first tokens that are kept (the paper's 4).
      window: last tokens that are seen, itself included; less where the layer's own is less.
      renumber: positions within the cache (the paper) instead of those within the text. Needs
        rotary positions whose frequencies do not depend on the length; learned positions end where
        the model's do.
      slack: see `SlidingWindowPolicy`.
      dtype: of keys and values; None = the compute type.
    """

    num_sinks: int = _static(4)
    window: int = _static(2000)
    renumber: bool = _static(True)
    slack: int = _static(0)
    dtype: str | None = _static(None)

    def __post_init__(self) -> None:
        for name, smallest in (("num_sinks", 0), ("window", 1), ("slack", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {smallest}.")

    def init_layer(self, config, layer, batch_size, num_slots):
        if self.renumber and config.positions != "rope":
            raise ValueError(
                f"renumber=True needs rotary positions, the model has {config.positions!r} ones."
            )
        own = None if config.windows is None else config.windows[layer]
        return init_window_cache(
            config,
            batch_size,
            num_slots,
            window=self.window if own is None else min(self.window, own),
            num_sinks=self.num_sinks,
            slack=self.slack,
            renumber=self.renumber,
            dtype=self.dtype,
        )
