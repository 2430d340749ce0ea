"""Log-likelihoods of given text: continuations, multiple choice, perplexity of long documents.

Sequences are sorted by length, padded to buckets and run in batches; the logits of a chunk of
tokens are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxllm.inference import scoring_steps
from jaxllm.inference.prompts import SMALLEST, bucket
from jaxllm.models.config import ModelConfig


class Encodes(Protocol):
    """What scoring text needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """Beginning-of-sequence token."""

    @property
    def eos_id(self) -> int | None:
        """End-of-sequence token."""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a text."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-likelihood of one continuation.

    Attributes:
      log_probs: log p of each of its tokens, given all before.
      is_greedy: whether each of them is the most likely one.
    """

    log_probs: np.ndarray
    is_greedy: bool

    @property
    def total(self) -> float:
        """log p of the whole continuation."""
        return float(self.log_probs.sum())


def score_continuations(
    config: ModelConfig,
    params: Any,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    on_score: Callable[[int, Score], None] | None = None,
) -> list[Score]:
    """log p(continuation | context) of every request.

    Where several continuations follow the same context, it is run once.

    Args:
      config, params: the model.
      requests: (context, continuation) token ids; neither may be empty (give the context at least
        the beginning-of-sequence token).
      batch_size: sequences run at once.
      max_length: the longest sequence of context and continuation; longer ones lose tokens from the
        left of their context. None = no limit (learned positions: theirs).
      on_score: called as on_score(index of the request, score) after each batch.

    Returns:
      Scores in the order of the requests; they do not depend on the batching.

    Raises:
      ValueError: an empty context or continuation, a token id outside of the vocabulary, or a
        continuation that leaves no room for one token of context.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if max_length is None and config.positions == "learned":
        max_length = config.max_positions
    rows = [
        _row(config, number, context, continuation, max_length)
        for number, (context, continuation) in enumerate(requests)
    ]
    scores: list[Score | None] = [None] * len(rows)
    for indices, log_probs, correct in _run(config, params, rows, batch_size):
        for place, index in enumerate(indices):
            scored = rows[index].scored
            score = Score(log_probs[place, :scored], bool(correct[place, :scored].all()))
            scores[index] = score
            if on_score is not None:
                on_score(index, score)
    return [score for score in scores if score is not None]


class _Row(NamedTuple):
    tokens: list[int]
    scored: int

    @property
    def context(self) -> list[int]:
        return self.tokens[: -self.scored]

    @property
    def continuation(self) -> list[int]:
        return self.tokens[-self.scored :]


def _row(config, number, context, continuation, max_length) -> _Row:
    for name, ids in (("context", context), ("continuation", continuation)):
        if not len(ids):
            raise ValueError(f"request {number}: the {name} is empty.")
    tokens = [*context, *continuation]
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise ValueError(
            f"request {number} has token id {wrong}, outside of the vocabulary of "
            f"{config.vocab_size}."
        )
    if max_length is not None and len(tokens) > max_length:
        if len(continuation) >= max_length:
            raise ValueError(
                f"request {number}: a continuation of {len(continuation)} tokens leaves no room "
                f"for context within max_length={max_length}."
            )
        tokens = tokens[-max_length:]
    return _Row(tokens, len(continuation))


def _run(
    config: ModelConfig, params: Any, rows: Sequence[_Row], batch_size: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Runs all rows; yields indices of some, and log probabilities and correctness [R, S]."""
    groups, alone = _groups(config, rows)
    for batch in _batches(rows, alone, batch_size):
        yield batch, *_run_rows(config, params, [rows[index] for index in batch])
    for shared in _group_batches(rows, groups, batch_size):
        members = [[rows[index] for index in group] for group in shared]
        indices = [index for group in shared for index in group]
        yield indices, *_run_groups(config, params, members)


def _groups(config: ModelConfig, rows: Sequence[_Row]) -> tuple[list[list[int]], list[int]]:
    """Indices of rows whose context runs once for all of them, and of all other rows."""
    if config.rope.type in ("longrope", "dynamic"):
        # Frequencies depend on the length of the whole row, also for the tokens in front.
        return [], list(range(len(rows)))
    by_context: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_context.setdefault(tuple(row.context), []).append(index)
    groups, alone = [], []
    for context, indices in by_context.items():
        if len(indices) > 1 and len(context) >= _MIN_SHARED:
            groups.append(indices)
        else:
            alone += indices
    return groups, alone


_MIN_SHARED = 16  # Tokens of context from which sharing it pays for the second pass.


def _batches(rows: Sequence[_Row], indices: list[int], batch_size: int) -> Iterable[list[int]]:
    """Indices of rows by falling length, so that the largest batch runs first."""
    order = sorted(indices, key=lambda index: (-len(rows[index].tokens), -rows[index].scored))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _group_batches(
    rows: Sequence[_Row], groups: list[list[int]], batch_size: int
) -> Iterable[list[list[int]]]:
    """Groups that run together: at most `batch_size` rows.

    Continuations of one token have no row of their own, so there the contexts count.
    """
    short = [group for group in groups if all(rows[index].scored == 1 for index in group)]
    long = [
        group[start : start + batch_size]
        for group in groups
        if any(rows[index].scored > 1 for index in group)
        for start in range(0, len(group), batch_size)
    ]
    for pieces, size in ((long, len), (short, lambda group: 1)):
        batch: list[list[int]] = []
        for group in sorted(pieces, key=lambda group: -len(rows[group[0]].context)):
            if sum(map(size, batch)) + size(group) > batch_size:
                yield batch
                batch = []
            batch.append(group)
        if batch:
            yield batch


def _run_rows(config, params, rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray]:
    """Scores [R, S] of the continuations of whole rows."""
    size = bucket(len(rows))
    scored = max(row.scored for row in rows)
    longest = max(len(row.tokens) for row in rows) - 1
    width = bucket(longest, SMALLEST)
    # Where all is scored, the gather is the whole row.
    scored = width if scored == longest else bucket(scored)
    scores = scoring_steps.row_scores(
        config,
        params,
        _padded([row.tokens[:-1] for row in rows], size, width),
        _lengths([len(row.tokens) - 1 for row in rows], size),
        _lengths([len(row.context) - 1 for row in rows], size, 0),
        _padded([row.continuation for row in rows], size, scored),
    )
    return np.asarray(scores.log_probs, np.float64), np.asarray(scores.correct)


def _run_groups(config, params, groups: list[list[_Row]]) -> tuple[np.ndarray, np.ndarray]:
    """The same for groups of rows that share their contexts, one group after the other."""
    contexts = [group[0].context for group in groups]
    owners = [number for number, group in enumerate(groups) for _ in group]
    ends = [row.continuation for group in groups for row in group]
    longest = max(map(len, ends))
    time = bucket(longest - 1) if longest > 1 else 0
    count, size = bucket(len(contexts)), bucket(len(ends))
    scores = scoring_steps.shared_scores(
        config,
        params,
        _padded(contexts, count, bucket(max(map(len, contexts)), SMALLEST)),
        _lengths(map(len, contexts), count),
        _lengths(owners, size, 0),
        _padded([end[:-1] for end in ends], size, time),
        _lengths([len(end) - 1 for end in ends], size, 0),
        _padded(ends, size, time + 1),
    )
    return np.asarray(scores.log_probs, np.float64), np.asarray(scores.correct)


def _padded(rows: Sequence[Sequence[int]], size: int, width: int) -> np.ndarray:
    array = np.zeros((size, width), np.int32)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return array


def _lengths(values: Iterable[int], size: int, padding: int = 1) -> np.ndarray:
    values = list(values)
    return np.array(values + [padding] * (size - len(values)), np.int32)


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a document.

    Attributes:
      negative_log_likelihood: sum over the scored tokens, in nats.
      tokens: how many were scored.
      size: bytes of the text; None where it was not given.
    """

    negative_log_likelihood: float
    tokens: int
    size: int | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood a token."""
        return math.exp(self.negative_log_likelihood / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits a byte of text: comparable across tokenizers."""
        if not self.size:
            raise ValueError("bits_per_byte needs the size of the text in bytes.")
        return self.negative_log_likelihood / math.log(2) / self.size


def perplexity(
    config: ModelConfig,
    params: Any,
    tokens: Sequence[int],
    *,
    max_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    size: int | None = None,
) -> Perplexity:
    """Perplexity of a document of any length by a sliding window.

    Windows of `max_length` tokens start every `stride` tokens; each scores those that the one
    before has not seen. The first token of the document is context only.

    Args:
      config, params: the model.
      tokens: the document, beginning-of-sequence token included where the model wants one.
      max_length: tokens of a window.
      stride: tokens between the starts of windows; None = max_length (fast, and the first tokens of
        each window have little context). Smaller is slower and nearer to full context.
      batch_size: windows run at once.
      size: bytes of the text, for bits per byte.

    Raises:
      ValueError: fewer than two tokens, or a stride that is not within 1 .. max_length.
    """
    stride = max_length if stride is None else stride
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs at least 2 tokens, got {len(tokens)}.")
    if max_length < 2 or not 1 <= stride <= max_length:
        raise ValueError(
            f"stride={stride} must lie in 1 .. max_length={max_length}, which must be at least 2."
        )
    requests = []
    scored_to = 1
    for start in range(0, len(tokens), stride):
        end = min(start + max_length, len(tokens))
        # The first token of a window has nothing before it.
        first = max(scored_to, start + 1)
        if first < end:
            requests.append((tokens[start:first], tokens[first:end]))
        scored_to = end
        if end == len(tokens):
            break
    scores = score_continuations(config, params, requests, batch_size=batch_size)
    return Perplexity(
        -sum(score.total for score in scores), sum(len(s.log_probs) for s in scores), size
    )


@dataclasses.dataclass(frozen=True)
class Choices:
    """Scores of the answers to one multiple-choice question.

    Attributes:
      log_probs: [C] log p of each answer.
      num_tokens: [C] tokens of each.
      num_bytes: [C] bytes of its text.
    """

    log_probs: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray

    def best(self, normalize: str = "sum") -> int:
        """Index of the answer with the largest log p ("sum"), per token, or per byte of text."""
        by = {"sum": 1, "tokens": self.num_tokens, "bytes": self.num_bytes}
        if normalize not in by:
            raise ValueError(f"normalize={normalize!r} must be one of {list(by)}.")
        return int(np.argmax(self.log_probs / by[normalize]))


def score_choices(
    config: ModelConfig,
    params: Any,
    tokenizer: Encodes,
    questions: Sequence[tuple[str, Sequence[str]]],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
) -> list[Choices]:
    """Scores every answer of every question after its context.

    Args:
      config, params, tokenizer: the model.
      questions: (context, answers); an answer usually begins with a space.
      batch_size, max_length: as for `score_continuations`.
    """
    requests = [
        encode_pair(tokenizer, context, answer)
        for context, answers in questions
        for answer in answers
    ]
    scores = iter(
        score_continuations(config, params, requests, batch_size=batch_size, max_length=max_length)
    )
    found = []
    for _, answers in questions:
        own = [next(scores) for _ in answers]
        found.append(
            Choices(
                np.array([score.total for score in own]),
                np.array([len(score.log_probs) for score in own]),
                np.array([len(answer.encode()) for answer in answers]),
            )
        )
    return found


def encode_pair(tokenizer: Encodes, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, cut from the two encoded together.

    Spaces at the end of the context belong to the continuation: most tokenizers join them with the
    next word. A token that reaches across the border belongs to the continuation too. The context
    begins with the tokenizer's special tokens, and holds at least one token.

    Raises:
      ValueError: an empty context, and a tokenizer without a token to begin with.
    """
    stripped = context.rstrip()
    before = tokenizer.encode(stripped)
    whole = tokenizer.encode(stripped + context[len(stripped) :] + continuation)
    while before != whole[: len(before)]:
        before = before[:-1]
    start = opening_tokens(tokenizer)
    if not start and not before:
        opening = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if opening is None:
            raise ValueError("the context is empty, and the tokenizer has no token to begin with.")
        start = [opening]
    return [*start, *before], whole[len(before) :]


def opening_tokens(tokenizer: Encodes) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    special = tokenizer.encode("", add_special=True)
    # An end-of-sequence token after the (empty) text is none of them.
    while special and special[-1] == tokenizer.eos_id and special[-1] != tokenizer.bos_id:
        special = special[:-1]
    return special
