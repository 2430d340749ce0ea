"""What a token may see, apart from segments, and how scores are capped."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mask:
    """Static part of the mask.

    Attributes:
      causal: nothing that comes later.
      window: so many tokens backwards, itself included; None = all.
      softcap: c of c tanh(x / c) on the scores; None = none.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window={self.window} must be positive, with a causal mask.")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap={self.softcap} must be positive.")


def largest_block(time: int, most: int, least: int) -> int | None:
    """The largest power of two from `least` to `most` that divides `time`; None = there is none."""
    block = most
    while block >= least:
        if time % block == 0:
            return block
        block //= 2
    return None
