"""What a task is, and the layout of prompts that builders write and solvers read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.evaluation.memory_tests.contexts import Source

Reference = str | int | list[str] | dict[str, list[str]]
Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of test.

    Attributes:
      name: as in the published data.
      family: its category.
      variables: values of each varied parameter; entries take every combination.
      samples: entries a combination (and label).
      build: (source, parameters) -> (prompt, reference).
      solve: prompt -> reference, from the prompt alone.
      metrics: of the published scorer.
      strict: how the strict scorer compares, see `scorers.STRICT`.
      labels: balanced answers, given to `build` as the parameter "label".
      skip: combinations that are left out.
      short: values of variables for contexts of a few hundred tokens.
    """

    name: str
    family: str
    variables: Mapping[str, tuple[Any, ...]]
    samples: int
    build: Callable[[Source, Params], tuple[str, Reference]]
    solve: Callable[[str], Reference]
    metrics: tuple[str, ...] = ("exact_match",)
    strict: str = "string"
    labels: tuple[Any, ...] = ()
    skip: Callable[[Params], bool] = lambda params: False
    short: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


LENGTH = {"context_length": (4000,)}
DEPTHS = (0, 0.25, 0.5, 0.75, 1)
YES_NO = ("yes", "no")
EDIT = ("exact_match", "rouge")


def layout(context: str, instruction: str, *, header: str = "Context", stem: str = "Answer:"):
    """The prompt: header and context, instruction, and where the answer begins."""
    return f"{header}:\n{context}\n\nInstruction:\n{instruction}\n\n{stem}"


def parts(prompt: str) -> tuple[str, str]:
    """(context, instruction with what follows) of a prompt made by `layout`."""
    head, separator, instruction = prompt.partition("\n\nInstruction:\n")
    _, colon, context = head.partition(":\n")
    if not separator or not colon:
        raise ValueError(f"prompt {prompt[:60]!r}... has no context and instruction headers.")
    return context, instruction


def quoted(text: str) -> list[str]:
    """What stands in double quotes."""
    return re.findall(r'"([^"]*)"', text)


def yes_no(condition: bool) -> str:
    """The answer to a yes/no question."""
    return "yes" if condition else "no"
