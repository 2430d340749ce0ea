"""Stateful processing: a number and a set after many steps."""

from __future__ import annotations

import re

from jaxllm.evaluation.memory_tests.base import Task, layout, parts

_FAMILY = "stateful_processing"
FINAL = "FINAL ANSWER:"


def _build_quantity(source, params):
    modulus, count = params["modulus"], params["operation_step"]
    amounts = source.rng.integers(1, 101 if modulus is None else modulus, count + 1).tolist()
    signs = [1, *source.rng.choice([1, -1], count).tolist()]
    verbs = ["Start with", *("Add" if sign > 0 else "Subtract" for sign in signs[1:])]
    lines = [f"{verb} {amount}." for verb, amount in zip(verbs, amounts, strict=True)]
    total = sum(sign * amount for sign, amount in zip(signs, amounts, strict=True))
    question = "Give the final number."
    if modulus is not None:
        total %= modulus
        question = f"Give the final number modulo {modulus}."
    return layout("\n".join(lines), question, stem=FINAL), total


def _solve_quantity(prompt):
    context, instruction = parts(prompt)
    signs = {"Start with": 1, "Add": 1, "Subtract": -1}
    steps = re.findall(r"^(Start with|Add|Subtract) (\d+)\.$", context, re.MULTILINE)
    total = sum(signs[verb] * int(number) for verb, number in steps)
    modulus = re.search(r"modulo (\d+)", instruction)
    return total % int(modulus.group(1)) if modulus else total


def _build_set(source, params):
    size = params["state_size"]
    pool = source.pick(source.pool, min(100 * size, len(source.pool)))
    state = pool[:size]
    lines = [f"Step 0: the agent draws {', '.join(state)}."]
    for step in range(1, params["action_step"] + 1):
        # Odd steps discard, since step 0 filled the set.
        if step % 2:
            most = len(state) // 2
            moved = source.pick(state, int(source.rng.integers(1, most + 1))) if most else []
            state = [word for word in state if word not in moved]
        else:
            room = size - len(state)
            taken = set(state)
            free = [word for word in pool if word not in taken]
            moved = source.pick(free, int(source.rng.integers(1, room + 1))) if room else []
            state = state + moved
        if moved:
            verb = "discards" if step % 2 else "draws"
            lines.append(f"Step {step}: the agent {verb} {', '.join(moved)}.")
    question = "Which words does the agent hold at the end? List them separated by commas."
    return layout("\n".join(lines), question, header="Agent actions", stem=FINAL), state


def _solve_set(prompt):
    state: list[str] = []
    for verb, text in re.findall(r"the agent (draws|discards) (.*)\.$", prompt, re.MULTILINE):
        words = text.split(", ")
        state = state + words if verb == "draws" else [w for w in state if w not in words]
    return state


TASKS = (
    Task(
        "quantity_state",
        _FAMILY,
        # With a modulus the amounts are below it, and so is the answer.
        {"operation_step": (200,), "modulus": (None,)},
        10,
        _build_quantity,
        _solve_quantity,
        ("final_answer_exact_match",),
        short={"operation_step": (20,)},
    ),
    Task(
        "set_state",
        _FAMILY,
        {"action_step": (200,), "state_size": (5, 10, 15, 20)},
        5,
        _build_set,
        _solve_set,
        ("exact_match", "rouge", "set_overlap"),
        "set",
        short={"action_step": (10,), "state_size": (5,)},
    ),
)
