"""Metrics of generated text against a reference: exact match, token F1, ROUGE, BLEU, chrF.

All lie in [0, 1] and score one pair; averages and their intervals come from
`jaxllm.evaluation.statistics`.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Overlap(NamedTuple):
    """Precision, recall and their harmonic mean; all 0 where nothing is shared."""

    precision: float
    recall: float
    f1: float


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and extra spaces (SQuAD 1.1's rules)."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, references: str | Sequence[str]) -> float:
    """1 where the normalised prediction equals one of the normalised references, else 0."""
    return float(
        any(normalize_answer(prediction) == normalize_answer(r) for r in _listed(references))
    )


def token_f1(prediction: str, references: str | Sequence[str]) -> float:
    """Largest F1 of shared words over the references, after normalisation (SQuAD, 1606.05250)."""
    words = normalize_answer(prediction).split()
    scores = []
    for reference in _listed(references):
        expected = normalize_answer(reference).split()
        if not words or not expected:
            scores.append(float(words == expected))
        else:
            shared = collections.Counter(words) & collections.Counter(expected)
            scores.append(_overlap(shared.total(), len(words), len(expected)).f1)
    return max(scores)


def rouge_tokens(text: str) -> list[str]:
    """Runs of letters a-z and digits of the lower-cased text (ROUGE without stemming)."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge_n(prediction: str, reference: str, n: int = 1) -> Overlap:
    """Shared n-grams, each counted as often as in both (Lin 2004, section 2)."""
    if n < 1:
        raise ValueError(f"n={n} must be at least 1.")
    grams = [
        collections.Counter(zip(*(tokens[i:] for i in range(n)), strict=False))
        for tokens in (rouge_tokens(prediction), rouge_tokens(reference))
    ]
    return _overlap((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def rouge_l(prediction: str, reference: str) -> Overlap:
    """Longest common subsequence of the words (Lin 2004, section 3.1)."""
    ours, theirs = rouge_tokens(prediction), rouge_tokens(reference)
    return _overlap(longest_common_subsequence(ours, theirs), len(ours), len(theirs))


def longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, in O(len(a) len(b)) with one vector op a row."""
    if not a or not b:
        return 0
    codes = {word: code for code, word in enumerate({*a, *b})}
    b_codes = np.array([codes[word] for word in b])
    row = np.zeros(len(b) + 1, np.int64)
    for word in a:
        # With the diagonal first, the left neighbour enters as a running maximum.
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (b_codes == codes[word])))
    return int(row[-1])


def bleu(prediction: str, references: str | Sequence[str]) -> float:
    """Sentence BLEU with sacrebleu's defaults (needs the extra `eval`)."""
    return _sacrebleu().sentence_bleu(prediction, _listed(references)).score / 100


def chrf(prediction: str, references: str | Sequence[str]) -> float:
    """Sentence chrF2 with sacrebleu's defaults (needs the extra `eval`)."""
    return _sacrebleu().sentence_chrf(prediction, _listed(references)).score / 100


def _sacrebleu():
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'jaxllm[eval]'.") from error
    return sacrebleu


def _listed(references: str | Sequence[str]) -> list[str]:
    listed = [references] if isinstance(references, str) else list(references)
    if not listed:
        raise ValueError("there must be at least one reference.")
    return listed


def _overlap(shared: int, predicted: int, expected: int) -> Overlap:
    if not shared:
        return Overlap(0.0, 0.0, 0.0)
    precision, recall = shared / predicted, shared / expected
    return Overlap(precision, recall, 2 * precision * recall / (precision + recall))
