"""Scores of an answer: the published ones bit for bit (`minerva_compat`), and `strict` ones.

The published exact match looks for the reference as a substring, so "no" is found in "know", and
an empty reference everywhere. The strict scorers compare whole answers, without regard to order
where the question has none.
"""

from __future__ import annotations

import collections
import re

from jaxllm.evaluation import text_metrics
from jaxllm.evaluation.memory_tests.base import Reference

COMPAT = (
    "exact_match",
    "rouge",
    "count_accuracy",
    "final_answer_exact_match",
    "set_overlap",
    "theory_of_mind",
)
STRICT = ("string", "sequence", "count", "multiset", "set", "agents")
# The kind of reference, where it is not a text or a number.
_KINDS = {"set": list, "agents": dict}
_COUNTS = {
    "once": 1,
    "twice": 2,
    "three": 3,
    "thrice": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}


def reference_text(reference: Reference) -> str:
    """A reference as the text that it is compared as."""
    if isinstance(reference, list):
        return ", ".join(reference)
    if isinstance(reference, dict):
        return "".join(f"{key}: {', '.join(words)}\n" for key, words in reference.items())
    return reference.lower() if isinstance(reference, str) else str(reference)


def answer_text(reference: Reference) -> str:
    """A perfect answer in the asked-for form."""
    if isinstance(reference, str):
        return reference
    return reference_text(reference).strip()


def score(metric: str, reference: Reference, generation: str | None) -> dict[str, float]:
    """Scores by name.

    Args:
      metric: one of `COMPAT`, or "strict_" and one of `STRICT` (gives "strict" in [0, 1]).
      reference: what the task expects.
      generation: the model's text; None counts as "".

    Raises:
      ValueError: an unknown metric, or one that does not fit the kind of reference.
    """
    text = generation or ""
    kind = metric.removeprefix("strict_")
    if kind != metric and kind in STRICT and isinstance(reference, _KINDS.get(kind, str | int)):
        return {"strict": _strict(kind, reference, text)}
    if metric == "exact_match":
        cleaned = text.strip().lower().rstrip(".")
        return {metric: float(reference_text(reference) in cleaned)}
    if metric == "rouge":
        expected = reference_text(reference)
        one, longest = text_metrics.rouge_n(text, expected), text_metrics.rouge_l(text, expected)
        return {
            "rouge-1": one.f1,
            "rouge-L": longest.f1,
            "rouge-1_precision": one.precision,
            "rouge-1_recall": one.recall,
            "rouge-L_precision": longest.precision,
            "rouge-L_recall": longest.recall,
        }
    if metric == "count_accuracy":
        return {metric: float(_spoken_count(text) == int(str(reference)))}
    if metric == "final_answer_exact_match":
        return {"exact_match": float(_final(text) == str(reference))}
    if metric == "set_overlap" and isinstance(reference, list):
        return _named(_overlap(_final(text).split(", "), reference))
    if metric == "theory_of_mind" and isinstance(reference, dict):
        answered = _agents(_final(text))
        found = [
            _overlap(answered[name], words) if name in answered else (0.0,) * 4
            for name, words in reference.items()
        ]
        return _named(tuple(sum(column) / len(found) for column in zip(*found, strict=True)))
    if metric in COMPAT or (kind != metric and kind in STRICT):
        raise ValueError(f"metric={metric!r} does not fit a {type(reference).__name__} reference.")
    known = (*COMPAT, *(f"strict_{name}" for name in STRICT))
    raise ValueError(f"metric={metric!r}: expected one of {known}.")


def _spoken_count(text: str) -> int | None:
    text = text.lower()
    for word, number in _COUNTS.items():
        if word in text:
            return number
    digits = re.search(r"(\d+) times", text)
    return int(digits.group(1)) if digits else None


def _final(text: str) -> str:
    found = re.search(r"FINAL ANSWER:(.*)", text, re.DOTALL)
    return (found.group(1) if found else text).strip().rstrip(".")


def _agents(text: str) -> dict[str, list[str]]:
    lines = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {name.strip(): words.strip().split(", ") for name, words in lines}


def _overlap(answered, expected) -> tuple[float, float, float, float]:
    a, b = set(answered), set(expected)
    shared = len(a & b)
    if not shared:
        return 0.0, 0.0, 0.0, 0.0
    precision, recall = shared / len(a), shared / len(b)
    return precision, recall, 2 * precision * recall / (precision + recall), shared / len(a | b)


def _named(values) -> dict[str, float]:
    names = ("precision", "recall", "f1", "jaccard_similarity")
    return {f"set_overlap_{name}": value for name, value in zip(names, values, strict=True)}


def _strict(kind: str, reference: Reference, text: str) -> float:
    # After the last marker, in any case and with Markdown's emphasis around it.
    answer = re.split(r"answer:", text, flags=re.IGNORECASE)[-1]
    answer = answer.replace("*", "").strip().strip("\"'`").rstrip(".").strip().lower()
    if isinstance(reference, dict):
        given = {
            name: _words(words)
            for name, _, words in (line.partition(":") for line in answer.splitlines())
        }
        scores = [_jaccard(given.get(name.lower(), []), words) for name, words in reference.items()]
        return sum(scores) / len(scores)
    if isinstance(reference, list):
        return _jaccard(_words(answer), reference)
    expected = str(reference).lower()
    if kind == "string":
        return float(answer == expected)
    if kind == "sequence":
        return float(_words(answer) == _words(expected))
    if kind == "count":
        numbers = re.findall(r"\d+", answer)
        number = int(numbers[0]) if len(numbers) == 1 else _spoken_count(answer)
        return float(number == int(expected))
    ours, theirs = collections.Counter(_words(answer)), collections.Counter(_words(expected))
    return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())


def _words(text: str) -> list[str]:
    return [word.strip().rstrip(".") for word in re.split(r"[,\n]", text) if word.strip()]


def _jaccard(answered, expected) -> float:
    a, b = set(answered), {word.lower() for word in expected}
    return len(a & b) / len(a | b) if a | b else 1.0
