"""Search: is it there, and what belongs to it."""

from __future__ import annotations

from jaxllm.evaluation.memory_tests.base import (
    DEPTHS,
    EDIT,
    LENGTH,
    YES_NO,
    Task,
    layout,
    parts,
    quoted,
    yes_no,
)
from jaxllm.evaluation.memory_tests.contexts import Source, gibberish
from jaxllm.evaluation.memory_tests.reference import depth_index, spread


def _word(source: Source, params):
    kind = params["kind"]
    items = source.items(kind, params["context_length"])
    if params["label"] == "yes":
        word = items[depth_index(len(items), params["context_depth"])]
    elif kind == "unique_words":
        [word] = source.new_words(items)
    else:
        word = next(word for word in gibberish(source.rng, len(items) + 1000) if word not in items)
    question = f'Is the string "{word}" one of the items above? Reply with yes or no only.'
    return layout(", ".join(items), question), params["label"]


def _build_word(source, params):
    return _word(source, {**params, "kind": "unique_words"})


def _build_gibberish(source, params):
    return _word(source, {**params, "kind": "gibberish"})


def _solve_word(prompt):
    context, instruction = parts(prompt)
    return yes_no(quoted(instruction)[0] in context.split(", "))


def _build_sequence(source, params):
    length = params["sequence_length"]
    items = source.items("unique_words", params["context_length"], length)
    start = int(source.rng.integers(len(items) - length + 1))
    run = items[start : start + length]
    if params["label"] == "no":
        corrupt = source.rng.choice(length, params["n_corrupt"], replace=False).tolist()
        for position, word in zip(corrupt, source.replacements(items, len(corrupt)), strict=True):
            run[position] = word
    question = (
        f'Do the words "{", ".join(run)}" stand above in this order without a gap? '
        "Reply with yes or no only."
    )
    return layout(", ".join(items), question), params["label"]


def _solve_sequence(prompt):
    context, instruction = parts(prompt)
    # With separators around, the run cannot start or end inside a word.
    return yes_no(f", {quoted(instruction)[0]}, " in f", {context}, ")


def _build_key(source, params):
    pairs = [p.split(": ") for p in source.items("word_pairs", params["context_length"])]
    key, value = pairs[depth_index(len(pairs), params["context_depth"])]
    question = f'Give the value that belongs to the key "{key}", and nothing else.'
    return layout(_lines(pairs), question, stem=f"The value of {key} is:"), value


def _build_keys(source, params):
    count = params["n_words"]
    pairs = [p.split(": ") for p in source.items("word_pairs", params["context_length"], count)]
    chosen = [pairs[i] for i in spread(len(pairs), count)]
    keys = ", ".join(key for key, _ in chosen)
    question = f'Give the values of the keys "{keys}", in this order, separated by commas.'
    return layout(_lines(pairs), question, stem="The values are:"), ", ".join(v for _, v in chosen)


def _lines(pairs):
    return ", ".join(f"{key}: {value}" for key, value in pairs)


def _solve_keys(prompt):
    context, instruction = parts(prompt)
    values = dict(pair.split(": ") for pair in context.split(", "))
    return ", ".join(values[key] for key in quoted(instruction)[0].split(", "))


_DEPTH = {**LENGTH, "context_depth": DEPTHS}
TASKS = (
    Task("string_search_word", "search", _DEPTH, 5, _build_word, _solve_word, labels=YES_NO),
    Task(
        "string_search_gibberish", "search", _DEPTH, 5, _build_gibberish, _solve_word, labels=YES_NO
    ),
    Task(
        "string_search_sequence",
        "search",
        {**LENGTH, "sequence_length": (8, 16, 32, 64), "n_corrupt": (1,)},
        10,
        _build_sequence,
        _solve_sequence,
        labels=YES_NO,
        short={"sequence_length": (4, 8)},
    ),
    Task("key_value_search", "search", _DEPTH, 10, _build_key, _solve_keys),
    Task(
        "batch_key_value_search",
        "search",
        {**LENGTH, "n_words": (4, 8, 16, 32)},
        5,
        _build_keys,
        _solve_keys,
        EDIT,
        "sequence",
        short={"n_words": (4, 8)},
    ),
)
