"""Composite tasks: search within roles, and the sets of several agents."""

from __future__ import annotations

import re

from jaxllm.evaluation.memory_tests.base import EDIT, Task, layout, parts, quoted
from jaxllm.evaluation.memory_tests.sets import ROLES, SHORT_ROLES, draw_roles, read_turns, turns
from jaxllm.evaluation.memory_tests.stateful import FINAL

_FAMILY = "composite"


def _build_blocks(source, params):
    segments = draw_roles(source, params)
    role = int(source.rng.integers(len(segments)))
    words = [word for turn in segments[role] for word in turn]
    # The last word leaves nothing, and every answer counts as right: in the published tests only.
    cut = int(source.rng.integers(len(words) - (not source.compat)))
    question = (
        f'List all words of "Role {role + 1}" that come after "{words[cut]}", in this turn and '
        "the later ones, separated by commas."
    )
    return layout(turns(segments), question), ", ".join(words[cut + 1 :])


def _solve_blocks(prompt):
    context, instruction = parts(prompt)
    role, word = quoted(instruction)
    words = read_turns(context)[role]
    return ", ".join(words[words.index(word) + 1 :])


def _build_minds(source, params):
    size, rng = params["state_size"], source.rng
    names = [f"Agent {chr(ord('A') + i)}" for i in range(params["num_agents"])]
    pool = source.pick(source.pool, min(100 * size, len(source.pool)))
    held: dict[str, list[str]] = {}
    lines = []

    def free():
        taken = set().union(*held.values())
        return [word for word in pool if word not in taken]

    for name in names:
        held[name] = source.pick(free(), int(rng.integers(1, size)))
        lines.append(f"{name} starts with {', '.join(held[name])}.")
    for _ in range(params["action_step"]):
        action = ("draw", "discard", "swap")[int(rng.integers(3))]
        name, other = source.pick(names, 2)
        own, theirs = held[name], held[other]
        most = {
            "draw": size - len(own),
            "discard": len(own) // 2,
            "swap": min(len(own), len(theirs)) // 2,
        }[action]
        if not most:
            continue
        count = int(rng.integers(1, most + 1))
        if action == "draw":
            drawn = source.pick(free(), count)
            held[name] = own + drawn
            lines.append(f"{name} draws {', '.join(drawn)}.")
            continue
        given = source.pick(own, count)
        held[name] = [word for word in own if word not in given]
        if action == "discard":
            lines.append(f"{name} discards {', '.join(given)}.")
            continue
        taken = source.pick(theirs, count)
        held[name] = held[name] + taken
        held[other] = [word for word in theirs if word not in taken] + given
        lines.append(f"{name} gives {', '.join(given)} to {other} for {', '.join(taken)}.")
    question = (
        "Which words does each agent hold at the end? One line an agent, as in: Agent A: word, word"
    )
    prompt = layout("\n".join(lines), question, header="Agent actions", stem=FINAL)
    return prompt, held


_ACTION = re.compile(
    r"^(Agent \w) (starts with|draws|discards|gives) ([^.]*?)(?: to (Agent \w) for ([^.]*))?\.$"
)


def _solve_minds(prompt):
    held: dict[str, list[str]] = {}
    for line in parts(prompt)[0].splitlines():
        name, verb, text, other, back = _ACTION.match(line).groups()
        words = text.split(", ")
        own = held.setdefault(name, [])
        if verb in ("starts with", "draws"):
            held[name] = own + words
            continue
        held[name] = [word for word in own if word not in words]
        if verb == "gives":
            taken = back.split(", ")
            held[name] = held[name] + taken
            held[other] = [word for word in held[other] if word not in taken] + words
    return held


TASKS = (
    Task(
        "processing_data_blocks",
        _FAMILY,
        ROLES,
        10,
        _build_blocks,
        _solve_blocks,
        EDIT,
        "sequence",
        short=SHORT_ROLES,
    ),
    Task(
        "theory_of_mind",
        _FAMILY,
        {"num_agents": (2, 3, 4), "action_step": (100, 200), "state_size": (10,)},
        10,
        _build_minds,
        _solve_minds,
        ("exact_match", "rouge", "theory_of_mind"),
        "agents",
        short={"num_agents": (2, 3), "action_step": (8,), "state_size": (5,)},
    ),
)
