"""How the outputs of our kernels lie among the rows of a stored tensor: whole, fused or permuted.

A stored tensor is never combined with another one by arithmetic: each of our kernels is a selection
of the rows (output features) of exactly one tensor. So one index array says both how to read and
how to write, and the two directions cannot disagree.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxllm.models.config import ModelConfig


def _widths(config: ModelConfig) -> dict[str, int]:
    """Sizes that the tables refer to by name."""
    widths = {
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
        "mlp": config.mlp_dim,
    }
    if config.moe is not None:
        widths["expert"] = config.moe.expert_dim
    if config.mla is not None:
        widths["nope"] = config.mla.nope_dim
        widths["rope"] = config.mla.rope_dim
        widths["kv_rank"] = config.mla.kv_rank
    return widths


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Members one after the other, as in Phi-3's `qkv_proj`: ours is member number `member`."""

    widths: tuple[str, ...]
    member: int

    def index(self, config: ModelConfig, size: int) -> np.ndarray:
        """Row of the stored tensor for each of our `size` outputs."""
        sizes = [_widths(config)[name] for name in self.widths]
        start = sum(sizes[: self.member])
        return np.arange(start, start + size)

    def total(self, config: ModelConfig, size: int) -> int:
        """Number of rows of the stored tensor."""
        return sum(_widths(config)[name] for name in self.widths)


@dataclasses.dataclass(frozen=True)
class PerHead:
    """Members alternate head by head, as in GPT-NeoX's `query_key_value` [heads, members, head]."""

    members: int
    member: int

    def index(self, config: ModelConfig, size: int) -> np.ndarray:
        """Row of the stored tensor for each of our `size` outputs."""
        head = config.head_dim
        rows = np.arange(self.members * size).reshape(-1, self.members, head)
        return rows[:, self.member].reshape(-1)

    def total(self, config: ModelConfig, size: int) -> int:
        """Number of rows of the stored tensor."""
        return self.members * size


@dataclasses.dataclass(frozen=True)
class RotaryPairs:
    """Rotary partners are neighbours on disk (x0 y0 x1 y1) and in two halves here (x0 x1 y0 y1).

    In every run of `plain` + `rotated` rows (sizes by name) only the last `rotated` are reordered.
    """

    rotated: str
    plain: str | None = None

    def index(self, config: ModelConfig, size: int) -> np.ndarray:
        """Row of the stored tensor for each of our `size` outputs."""
        widths = _widths(config)
        plain = widths[self.plain] if self.plain else 0
        rotated = widths[self.rotated]
        halves = np.arange(rotated).reshape(-1, 2).T.reshape(-1)
        block = np.concatenate([np.arange(plain), plain + halves])
        starts = np.arange(0, size, plain + rotated)
        return (starts[:, None] + block[None]).reshape(-1)

    def total(self, config: ModelConfig, size: int) -> int:
        """Number of rows of the stored tensor."""
        return size


Rows = Concatenated | PerHead | RotaryPairs
