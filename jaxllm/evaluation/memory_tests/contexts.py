"""Word pools and contexts of a given number of tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import string
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

Kind = Literal["unique_words", "random_numbers", "word_pairs", "gibberish"]
KINDS = ("unique_words", "random_numbers", "word_pairs", "gibberish")
SEPARATOR = ", "


class Encodes(Protocol):
    """The part of a tokenizer that sizes a context; see `jaxllm.data.tokenizers.Tokenizer`."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and the characters [start, end) of each."""


class Cl100k:
    """Lengths in tokens of cl100k_base, the paper's unit (needs the package tiktoken)."""

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ImportError("cl100k_base needs tiktoken: pip install tiktoken.") from error
        self._encoding = tiktoken.get_encoding("cl100k_base")

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        return self._encoding.encode(text, disallowed_special=())

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, and the characters of each."""
        ids = self.encode(text)
        _, starts = self._encoding.decode_with_offsets(ids)
        return ids, list(zip(starts, [*starts[1:], len(text)], strict=True))


@functools.cache
def pseudo_words(size: int = 20_000) -> tuple[str, ...]:
    """Pronounceable six-letter words (three syllables) in a fixed random order.

    Args:
      size: at most 512000.
    """
    syllables = ["".join(pair) for pair in itertools.product("bdfghjklmnprstvz", "aeiou")]
    total = len(syllables) ** 3
    if not 1 <= size <= total:
        raise ValueError(f"size={size} must lie in 1..{total}.")
    codes = np.random.default_rng(0).choice(total, size, replace=False)
    base = len(syllables)
    return tuple(
        syllables[c // base**2] + syllables[c // base % base] + syllables[c % base]
        for c in codes.tolist()
    )


def trim(items: Sequence[str], n: int, tokenizer: Encodes, *, bare_key: bool = False) -> str:
    """The longest run of whole items, joined by ", ", within the first n tokens.

    Args:
      items: none holds ", ".
      n: tokens.
      tokenizer: measures them.
      bare_key: leave the key of a pair whose value is cut, without a value, as some published
        contexts do.

    Raises:
      ValueError: not even one item fits.
    """
    text = SEPARATOR.join(items)
    rest = ""
    ids, offsets = tokenizer.encode_with_offsets(text)
    count = len(items)
    if len(ids) > n:
        end = max((stop for _, stop in offsets[:n]), default=0)
        ends = np.cumsum([len(item) + len(SEPARATOR) for item in items]) - len(SEPARATOR)
        count = int(np.searchsorted(ends, end, side="right"))
        # A cut text may be tokenised otherwise than as the start of the longer one.
        while count and len(tokenizer.encode(SEPARATOR.join(items[:count]))) > n:
            count -= 1
        key = f"{SEPARATOR}{items[count].split(': ')[0]}: "
        if (
            bare_key
            and ": " in items[count]
            and len(tokenizer.encode(SEPARATOR.join(items[:count]) + key)) <= n
        ):
            rest = key
    if not count:
        raise ValueError(f"context of {n} tokens is too short for one item such as {items[0]!r}.")
    return SEPARATOR.join(items[:count]) + rest


def gibberish(rng: np.random.Generator, count: int) -> list[str]:
    """Strings of 2 to 9 random letters."""
    sizes = rng.integers(2, 10, count)
    letters = "".join(string.ascii_lowercase[i] for i in rng.integers(0, 26, sizes.sum()).tolist())
    ends = np.cumsum(sizes).tolist()
    return [letters[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


def make_context(
    rng: np.random.Generator,
    kind: Kind,
    n: int,
    tokenizer: Encodes,
    pool: Sequence[str],
    *,
    bare_key: bool = False,
) -> str:
    """A comma-separated context of at most n tokens that ends on a whole item.

    Args:
      rng: source of randomness.
      kind: distinct words, integers in 0..1000, "key: value" pairs of distinct words, or strings
        of 2 to 9 random letters.
      n: tokens.
      tokenizer: that of the tested model.
      pool: distinct words to draw from.
      bare_key: see `trim`.

    Raises:
      ValueError: an unknown kind, a budget without room for an item, a pool that ends before n
        tokens are full.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1 token.")
    if kind == "random_numbers":
        items = [str(number) for number in rng.integers(0, 1001, n).tolist()]
    elif kind == "gibberish":
        items = gibberish(rng, n)
    elif kind in ("unique_words", "word_pairs"):
        width = 2 if kind == "word_pairs" else 1
        count = min(n, len(pool) // width)
        drawn = [pool[i] for i in rng.choice(len(pool), count * width, replace=False).tolist()]
        items = drawn if width == 1 else [f"{a}: {b}" for a, b in zip(*[iter(drawn)] * 2)]  # noqa: B905
        if count < n and len(tokenizer.encode(SEPARATOR.join(items))) < n:
            raise ValueError(f"pool of {len(pool)} words is too small for {n} tokens of {kind}.")
    else:
        raise ValueError(f"kind={kind!r}: expected one of {KINDS}.")
    return trim(items, n, tokenizer, bare_key=bare_key)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a task draws its entry from.

    Attributes:
      rng: the randomness of this entry alone.
      compat: reproduce the published generator's faults where they change the answer.
      shared_seed: seed common to all settings of the same sample (used by `compat`).
    """

    rng: np.random.Generator
    tokenizer: Encodes
    pool: Sequence[str]
    compat: bool = False
    shared_seed: int = 0

    def items(self, kind: Kind, n: int, least: int = 1) -> list[str]:
        """The items of a context; at least so many, or a ValueError."""
        text = make_context(self.rng, kind, n, self.tokenizer, self.pool, bare_key=self.compat)
        items = text.split(SEPARATOR)
        if len(items) < least:
            raise ValueError(
                f"context_length={n} holds {len(items)} items; this setting needs {least}."
            )
        return items

    def new_words(self, taken: Sequence[str], count: int = 1) -> list[str]:
        """Distinct words of the pool that are not taken."""
        used = set(taken)
        free = [word for word in self.pool if word not in used]
        if len(free) < count:
            raise ValueError(f"pool has {len(free)} words left; {count} are needed.")
        return [free[i] for i in self.rng.choice(len(free), count, replace=False).tolist()]

    def replacements(self, taken: Sequence[str], count: int = 1) -> list[str]:
        """As `new_words`; with `compat` any words of the pool, as in the published tests."""
        return self.new_words([] if self.compat else taken, count)

    def pick(self, items: Sequence[str], count: int = 1) -> list[str]:
        """Items at distinct positions, in random order."""
        return [items[i] for i in self.rng.choice(len(items), count, replace=False).tolist()]
