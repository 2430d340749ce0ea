"""Prompts of any lengths as padded arrays of few different shapes, so that little compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxllm.models.config import ModelConfig

SMALLEST = 16


class Padded(NamedTuple):
    """Right-padded prompts; rows beyond the real ones hold one token 0.

    Attributes:
      tokens: [B, P] ids, 0 where padded.
      lengths: [B] of the prompts.
      rows: how many rows are real.
    """

    tokens: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    rows: int


def bucket(size: int, smallest: int = 1) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ... (at most half as much again), at least `smallest`."""
    power = 1 << max(0, (max(size, 1) - 1).bit_length())
    lower = power * 3 // 4
    return max(smallest, lower if power >= 4 and lower >= size else power)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> Padded:
    """Pads lengths and number of rows up to their buckets."""
    lengths = [len(prompt) for prompt in prompts]
    shape = (bucket(len(prompts)), bucket(max(lengths), SMALLEST))
    tokens = np.zeros(shape, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    padding = [1] * (shape[0] - len(prompts))
    return Padded(tokens, np.array(lengths + padding, np.int32), len(prompts))


def pad_row_ids(row_ids: Sequence[int] | None, prompts: int, rows: int) -> np.ndarray:
    """What the randomness of each row is derived from: [rows] uint32, 0 where padded.

    Args:
      row_ids: of the prompts; None = 0, 1, 2, ...
      prompts: how many there are.
      rows: padded number.

    Raises:
      ValueError: not one id a prompt.
    """
    row_ids = range(prompts) if row_ids is None else row_ids
    if len(row_ids) != prompts:
        raise ValueError(f"{len(row_ids)} row_ids do not fit {prompts} prompts.")
    ids = np.zeros(rows, np.uint32)
    ids[:prompts] = row_ids
    return ids


def check_prompts(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuses what cannot be continued.

    Raises:
      ValueError: a negative number of new tokens, an empty prompt, a token id outside of the
        vocabulary, or more positions than learned ones.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative.")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: give at least a beginning-of-sequence token.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"prompt {row} has token id {low if low < 0 else high}, outside of the "
                f"vocabulary of {config.vocab_size}."
            )
        total = len(prompt) + max_new_tokens
        if config.positions == "learned" and total > config.max_positions:
            raise ValueError(
                f"prompt {row} and {max_new_tokens} new tokens make {total} positions, the model "
                f"has {config.max_positions}."
            )


def until_stop(row: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """The tokens before the first stop token."""
    ends = [row.index(token) for token in stop_tokens if token in row]
    return row[: min(ends)] if ends else row
