"""Match and compare: order, repetition and shared attributes."""

from __future__ import annotations

import collections

from jaxllm.evaluation.memory_tests.base import (
    DEPTHS,
    LENGTH,
    YES_NO,
    Task,
    layout,
    parts,
    quoted,
    yes_no,
)
from jaxllm.evaluation.memory_tests.contexts import SEPARATOR, trim
from jaxllm.evaluation.memory_tests.reference import compared_words

_FAMILY = "match_and_compare"


def _build_order(source, params):
    items = source.items("unique_words", params["context_length"], len(DEPTHS))
    depths = params["context_depth_1"], params["context_depth_2"]
    first, second, before = compared_words(items, *depths)
    question = f'Does "{first}" come before "{second}" above? Reply with yes or no only.'
    return layout(", ".join(items), question), yes_no(before)


def _solve_order(prompt):
    context, instruction = parts(prompt)
    first, second = quoted(instruction)
    items = context.split(", ")
    return yes_no(items.index(first) < items.index(second))


def _repeated(source, params):
    count = params["repetition_count"]
    items = source.items("unique_words", params["context_length"], count + 1)
    [word] = source.new_words(items)
    for i in source.rng.choice(len(items), count, replace=False).tolist():
        items[i] = word
    return items, word, count


def _build_duplicates(source, params):
    items, word, _ = _repeated(source, params)
    question = "One word stands above more than once. Give this word, and nothing else."
    return layout(", ".join(items), question, stem="The repeated word is:"), word


def _solve_duplicates(prompt):
    return collections.Counter(parts(prompt)[0].split(", ")).most_common(1)[0][0]


def _build_count(source, params):
    items, word, count = _repeated(source, params)
    question = f'How many times does "{word}" stand above? Give the number.'
    return layout(", ".join(items), question, stem=f"Occurrences of {word}:"), str(count)


def _solve_count(prompt):
    context, instruction = parts(prompt)
    return str(context.split(", ").count(quoted(instruction)[0]))


def _build_association(source, params):
    number = params["n_attribute"]
    words = source.items("unique_words", params["context_length"], 3)
    # A short context may by chance hold no partner of the wanted kind.
    for _ in range(1000):
        kinds = source.rng.integers(1, number + 1, len(words)).tolist()
        items = [f"{word}: ATT_{k}" for word, k in zip(words, kinds, strict=True)]
        text = trim(items, params["context_length"], source.tokenizer)
        kept = kinds[: len(text.split(SEPARATOR))]
        i = int(source.rng.integers(len(kept)))
        same = params["label"] == "yes"
        partners = [j for j, kind in enumerate(kept) if j != i and (kind == kept[i]) == same]
        if partners:
            first, second = words[i], words[partners[int(source.rng.integers(len(partners)))]]
            question = f'Do "{first}" and "{second}" have the same attribute? Reply yes or no only.'
            return layout(text, question), params["label"]
    raise ValueError(f"context_length={params['context_length']} is too short for two attributes.")


def _solve_association(prompt):
    context, instruction = parts(prompt)
    attribute = dict(item.split(": ") for item in context.split(", "))
    first, second = quoted(instruction)
    return yes_no(attribute[first] == attribute[second])


_REPEATS = {**LENGTH, "repetition_count": (2, 4, 8, 16, 32)}
_SHORT = {"repetition_count": (2, 4, 8)}
TASKS = (
    Task(
        "compare_positions",
        _FAMILY,
        {**LENGTH, "context_depth_1": DEPTHS, "context_depth_2": DEPTHS},
        3,
        _build_order,
        _solve_order,
    ),
    Task(
        "find_duplicates", _FAMILY, _REPEATS, 5, _build_duplicates, _solve_duplicates, short=_SHORT
    ),
    Task(
        "count",
        _FAMILY,
        _REPEATS,
        5,
        _build_count,
        _solve_count,
        ("exact_match", "count_accuracy"),
        "count",
        short=_SHORT,
    ),
    Task(
        "check_association",
        _FAMILY,
        {**LENGTH, "n_attribute": (2, 4, 8, 16, 32)},
        5,
        _build_association,
        _solve_association,
        labels=YES_NO,
    ),
)
