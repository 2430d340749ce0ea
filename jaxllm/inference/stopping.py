"""Where the text of an answer ends: stop strings over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


def check_stop_strings(stop_strings: Sequence[str], tokenizer: Decodes | None) -> None:
    """Refuses stop strings that cannot be looked for.

    Raises:
      ValueError: stop strings without a tokenizer, or an empty one.
    """
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer.")
    if "" in stop_strings:
        raise ValueError("a stop string must not be empty.")


def find_stop(
    tokens: Sequence[int], stop_strings: Sequence[str], tokenizer: Decodes | None
) -> int | None:
    """Number of tokens after which the text first holds a stop string; None if it never does."""

    def holds_stop(part: Sequence[int]) -> bool:
        text = tokenizer.decode(part)
        return any(stop in text for stop in stop_strings)

    if not stop_strings or not holds_stop(tokens):
        return None
    low, high = 0, len(tokens)  # The text of `high` tokens holds one, that of `low` does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_stop(tokens[:middle]) else (middle, high)
    return high


def cut_text(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [text.index(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
