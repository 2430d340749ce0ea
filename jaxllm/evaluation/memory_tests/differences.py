"""Spot the differences: between two lists, among many, and from a pattern."""

from __future__ import annotations

import bisect
import collections
import re

import numpy as np

from jaxllm.evaluation.memory_tests.base import EDIT, LENGTH, Task, layout, parts
from jaxllm.evaluation.memory_tests.reference import patch

_FAMILY = "spot_the_differences"


def numbered(lists) -> str:
    """`List 1: a, b` and so on, one a line."""
    return "\n".join(f"List {i}: {', '.join(words)}" for i, words in enumerate(lists, 1))


def read_numbered(context: str) -> list[list[str]]:
    """The inverse of `numbered`."""
    return [line.split(": ", 1)[1].split(", ") for line in context.splitlines()]


def _build_two(source, params):
    count = params["n_difference"]
    first = source.items("unique_words", params["context_length"], count)
    second = list(first)
    positions = source.rng.choice(len(first), count, replace=False).tolist()
    for i, word in zip(positions, source.replacements(first, count), strict=True):
        second[i] = word
    chosen = first if params["chosen_list"] == "first" else second
    # The published references are in the order of drawing.
    order = positions if source.compat else sorted(positions)
    other = "second" if params["chosen_list"] == "first" else "first"
    question = (
        f"Which words of the {params['chosen_list']} list are not in the {other} list? "
        "Give them separated by commas."
    )
    return layout(numbered([first, second]), question), ", ".join(chosen[i] for i in order)


def _solve_two(prompt):
    context, instruction = parts(prompt)
    own, other = read_numbered(context)
    if "words of the second" in instruction:
        own, other = other, own
    return ", ".join(word for word in own if word not in set(other))


def _build_odd(source, params):
    size, level = params["n_words"], params["p_anomaly"]
    # With `compat` one set of lists serves all levels, and each level spoils another list more.
    rng = np.random.default_rng(source.shared_seed) if source.compat else source.rng
    words = [source.pool[i] for i in rng.choice(len(source.pool), size, replace=False).tolist()]
    length = len(source.tokenizer.encode(numbered([words]) + "\n"))
    count = params["context_length"] // length
    if count < 3:
        raise ValueError(
            f"context_length={params['context_length']} holds {count} lists of {size} words; 3 are "
            "needed."
        )
    lists = [[words[i] for i in rng.permutation(size).tolist()] for _ in range(count)]
    used = set(words)
    before = [x for x in (0, 0.25, 0.5) if x < level] if source.compat else []
    for share in [*before, level]:
        odd = int(rng.integers(count))
        free = [word for word in source.pool if word not in used]
        positions = rng.choice(size, max(1, int(share * size)), replace=False).tolist()
        fresh = rng.choice(len(free), len(positions), replace=False).tolist()
        for i, j in zip(positions, fresh, strict=True):
            lists[odd][i] = free[j]
        used.update(free[j] for j in fresh)
    question = "All lists but one hold the same words. Which one differs? Reply as in: List 1"
    return layout(numbered(lists), question), f"List {odd + 1}"


def _solve_odd(prompt):
    sets = [frozenset(words) for words in read_numbered(parts(prompt)[0])]
    usual = collections.Counter(sets).most_common(1)[0][0]
    return next(f"List {i}" for i, words in enumerate(sets, 1) if words != usual)


def _build_patch(source, params):
    length, start, nth = params["pattern_length"], params["start"], params["nth"]
    pattern = source.new_words([], length)
    room = params["context_length"]
    # Words take at least a token each; the longest context that fits is found by bisection.
    repeats = bisect.bisect_right(
        range(1, room // length + 1),
        room,
        key=lambda n: len(source.tokenizer.encode(", ".join(patch(pattern, n, start, nth)[0]))),
    )
    if repeats < 2:
        raise ValueError(f"context_length={room} does not hold a pattern of {length} words twice.")
    words, answer = patch(pattern, repeats, start, nth)
    question = (
        "The context repeats a pattern of words. If it went on, which word would be number "
        f"{nth} after its end? Give this word only."
    )
    return layout(", ".join(words), question, stem=f"Word {nth} after the end is:"), answer


def _solve_patch(prompt):
    context, instruction = parts(prompt)
    words = context.split(", ")
    period = words.index(words[0], 1)
    nth = int(re.search(r"number (\d+) after", instruction).group(1))
    return words[(len(words) - 1 + nth) % period]


TASKS = (
    Task(
        "compare_two_lists",
        _FAMILY,
        {
            "context_length": (2000,),
            "n_difference": (1, 5, 10, 20),
            "chosen_list": ("first", "second"),
        },
        10,
        _build_two,
        _solve_two,
        EDIT,
        "multiset",
        short={"n_difference": (1, 5)},
    ),
    Task(
        "identify_odd_group",
        _FAMILY,
        {**LENGTH, "n_words": (25, 50, 75, 100), "p_anomaly": (0, 0.25, 0.5)},
        5,
        _build_odd,
        _solve_odd,
        short={"n_words": (4, 6)},
    ),
    Task(
        "patch_the_difference",
        _FAMILY,
        {**LENGTH, "pattern_length": (2, 15, 30), "start": (0, 0.5, 1), "nth": (1, 3, 6)},
        5,
        _build_patch,
        _solve_patch,
        # Half of two words is one word, which is start 0.
        skip=lambda params: params["pattern_length"] == 2 and params["start"] == 0.5,
        short={"pattern_length": (2, 5, 8)},
    ),
)
