"""Compute on sets and lists: membership, shared groups, and a word of every list."""

from __future__ import annotations

from jaxllm.evaluation.memory_tests.base import EDIT, LENGTH, YES_NO, Task, layout, parts, quoted
from jaxllm.evaluation.memory_tests.base import yes_no as _yes_no
from jaxllm.evaluation.memory_tests.differences import numbered, read_numbered
from jaxllm.evaluation.memory_tests.reference import deal, role_segments

_FAMILY = "compute_on_sets_and_lists"


def turns(segments: list[list[list[str]]]) -> str:
    """Turn by turn, the words of each role; segments is [role][turn] -> words."""
    lines = []
    for turn in range(len(segments[0])):
        lines.append(f"Turn {turn + 1}")
        lines += [f"Role {r}: {', '.join(role[turn])}" for r, role in enumerate(segments, 1)]
    return "\n".join(lines)


def read_turns(context: str) -> dict[str, list[str]]:
    """All words of each role, in order, from the text of `turns`."""
    words: dict[str, list[str]] = {}
    for line in context.splitlines():
        role, separator, text = line.partition(": ")
        if separator:
            words.setdefault(role, []).extend(text.split(", "))
    return words


def draw_roles(source, params) -> list[list[list[str]]]:
    """[role][turn] -> words of a context of unique words."""
    roles, number = params["n_roles"], params["n_turns"]
    items = source.items("unique_words", params["context_length"], roles * number)
    return role_segments(items, roles, number)


def _draw_lists(source, params, least=1):
    groups = params["n_list"]
    return deal(source.items("unique_words", params["context_length"], groups * least), groups)


def _build_membership(source, params):
    lists = _draw_lists(source, params)
    query = params["label"]
    if query == 4:
        [word] = source.replacements([w for words in lists for w in words])
        answer = "no"
    else:
        index = int(query / 4 * len(lists))
        [word] = source.pick(lists[index])
        answer = f"List {index + 1}"
    question = f'Which list holds "{word}"? Reply as in: List 1, or with no if none does.'
    return layout(numbered(lists), question), answer


def _solve_membership(prompt):
    context, instruction = parts(prompt)
    word = quoted(instruction)[0]
    lists = enumerate(read_numbered(context), 1)
    return next((f"List {i}" for i, words in lists if word in words), "no")


def _build_group(source, params):
    lists = _draw_lists(source, params, 2)
    if params["label"] == "yes":
        group = int(source.rng.integers(len(lists)))
        first, second = source.pick(lists[group], 2)
    else:
        i, j = source.rng.choice(len(lists), 2, replace=False).tolist()
        [first], [second] = source.pick(lists[i]), source.pick(lists[j])
    question = f'Are "{first}" and "{second}" in the same list? Reply with yes or no only.'
    return layout(numbered(lists), question), params["label"]


def _solve_group(prompt):
    context, instruction = parts(prompt)
    first, second = quoted(instruction)
    return _yes_no(any(first in x and second in x for x in read_numbered(context)))


def _build_alternating(source, params):
    segments = draw_roles(source, params)
    roles, number = len(segments), len(segments[0])
    first_turn, second_turn = source.rng.choice(number, 2, replace=False).tolist()
    first_role, second_role = source.rng.choice(roles, 2, replace=False).tolist()
    if params["label"] == "yes":
        second_role = first_role
    [first] = source.pick(segments[first_role][first_turn])
    [second] = source.pick(segments[second_role][second_turn])
    question = f'Do "{first}" and "{second}" belong to the same role? Reply with yes or no only.'
    return layout(turns(segments), question), params["label"]


def _solve_alternating(prompt):
    context, instruction = parts(prompt)
    first, second = quoted(instruction)
    return _yes_no(any(first in w and second in w for w in read_turns(context).values()))


def _iterate(which, index) -> Task:
    def build(source, params):
        lists = _draw_lists(source, params)
        question = f"Give the {which} word of every list, in order, separated by commas."
        return layout(numbered(lists), question), ", ".join(words[index] for words in lists)

    def solve(prompt):
        return ", ".join(words[index] for words in read_numbered(parts(prompt)[0]))

    return Task(
        f"iterate_{which}", _FAMILY, _LISTS, 5, build, solve, EDIT, "sequence", short=_SHORT
    )


_LISTS = {**LENGTH, "n_list": (4, 8, 16, 32)}
_SHORT = {"n_list": (4, 8)}
ROLES = {**LENGTH, "n_roles": (2, 4, 8, 16, 32), "n_turns": (10,)}
SHORT_ROLES = {"n_roles": (2, 4), "n_turns": (4,)}
TASKS = (
    Task(
        "group_membership",
        _FAMILY,
        _LISTS,
        5,
        _build_membership,
        _solve_membership,
        labels=(0, 1, 2, 3, 4),
        short=_SHORT,
    ),
    Task(
        "group_association",
        _FAMILY,
        _LISTS,
        5,
        _build_group,
        _solve_group,
        labels=YES_NO,
        short=_SHORT,
    ),
    Task(
        "alternating_group_association",
        _FAMILY,
        ROLES,
        5,
        _build_alternating,
        _solve_alternating,
        labels=YES_NO,
        short=SHORT_ROLES,
    ),
    _iterate("last", -1),
    _iterate("first", 0),
)
