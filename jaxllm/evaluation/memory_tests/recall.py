"""Recall and edit: repeat the context, whole or changed by a rule."""

from __future__ import annotations

import re

from jaxllm.evaluation.memory_tests.base import EDIT, LENGTH, Task, layout, parts, quoted
from jaxllm.evaluation.memory_tests.reference import functional_update, overwrite_nth, skip_nth

_FAMILY = "recall_and_edit"
_ORDINALS = {2: "second", 3: "third", 4: "fourth"}


def _items(prompt):
    return parts(prompt)[0].split(", ")


def _snapshot(kind):
    def build(source, params):
        text = ", ".join(source.items(kind, params["context_length"]))
        return layout(text, "Repeat the context exactly, and nothing else."), text

    return build


def _solve_snapshot(prompt):
    return ", ".join(_items(prompt))


def _replace(to_null):
    def build(source, params):
        items = source.items("unique_words", params["context_length"], 2)
        old, new = source.replacements(items, 2)
        count = max(1, int(len(items) * params["density"]))
        for i in source.rng.choice(len(items), count, replace=False).tolist():
            items[i] = old
        if to_null:
            question = f'Repeat the context, leaving out each "{old}".'
            return layout(", ".join(items), question), ", ".join(w for w in items if w != old)
        question = f'Repeat the context with each "{old}" replaced by "{new}".'
        return layout(", ".join(items), question), ", ".join(new if w == old else w for w in items)

    return build


def _solve_replace(prompt):
    old, *new = quoted(parts(prompt)[1])
    changed = (new[0] if new and w == old else w for w in _items(prompt) if new or w != old)
    return ", ".join(changed)


def _positions(to_null):
    def build(source, params):
        nth = params["nth"]
        items = source.items("unique_words", params["context_length"], nth)
        if to_null:
            question = f"Repeat the context without every {_ORDINALS[nth]} word."
            return layout(", ".join(items), question), ", ".join(skip_nth(items, nth))
        [word] = source.replacements(items)
        question = f'Repeat the context with every {_ORDINALS[nth]} word replaced by "{word}".'
        return layout(", ".join(items), question), ", ".join(overwrite_nth(items, nth, word))

    return build


def _solve_positions(prompt):
    instruction = parts(prompt)[1]
    [nth] = (n for n, word in _ORDINALS.items() if f"every {word} word" in instruction)
    word = quoted(instruction)
    items = _items(prompt)
    return ", ".join(overwrite_nth(items, nth, word[0]) if word else skip_nth(items, nth))


_RULES = {
    "add": "Add 3 to every number",
    "subtract": "Subtract 1 from every number",
    "multiply": "Multiply every number by 2",
}


def _build_update(source, params):
    operation = params["operation"]
    items = source.items("random_numbers", params["context_length"])
    changed = functional_update([int(x) for x in items], operation)
    question = f"{_RULES[operation]} and list the results in the same order."
    return layout(", ".join(items), question), ", ".join(map(str, changed))


def _solve_update(prompt):
    operation = re.match(r"\w+", parts(prompt)[1]).group().lower()
    return ", ".join(map(str, functional_update([int(x) for x in _items(prompt)], operation)))


_DENSITY = {**LENGTH, "density": (0.2, 0.4, 0.6, 0.8)}
_NTH = {**LENGTH, "nth": (2, 3, 4)}
_OPERATION = {**LENGTH, "operation": ("add", "subtract", "multiply")}


def _task(name, variables, samples, build, solve):
    return Task(name, _FAMILY, variables, samples, build, solve, EDIT, "sequence")


TASKS = (
    _task("snapshot_unique_words", LENGTH, 10, _snapshot("unique_words"), _solve_snapshot),
    _task("snapshot_random_numbers", LENGTH, 10, _snapshot("random_numbers"), _solve_snapshot),
    _task("replace_all", _DENSITY, 5, _replace(False), _solve_replace),
    _task("replace_all_x_to_null", _DENSITY, 5, _replace(True), _solve_replace),
    _task("overwrite_positions", _NTH, 5, _positions(False), _solve_positions),
    _task("overwrite_positions_nth_to_null", _NTH, 5, _positions(True), _solve_positions),
    _task("functional_updates", _OPERATION, 5, _build_update, _solve_update),
)
