"""How scores come from queries and keys, and which of them a token sees, apart from segments."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static facts of the scores.

    Attributes:
      scale: factor on q.k.
      causal: nothing that comes later is seen.
      window: so many tokens are seen backwards, the token itself included; None = all.
      softcap: c of c tanh(x / c) on scaled scores; None = none.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"attention: window={self.window} must be positive, with a causal mask."
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"attention: softcap={self.softcap} must be positive.")
