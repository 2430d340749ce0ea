"""Entries: made from a seed, written and read as JSON lines."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.evaluation.memory_tests import (
    composite,
    differences,
    match,
    recall,
    search,
    sets,
    stateful,
)
from jaxllm.evaluation.memory_tests.base import Reference, Task
from jaxllm.evaluation.memory_tests.contexts import Encodes, Source, pseudo_words

_MODULES = (search, recall, match, differences, sets, stateful, composite)
TASKS: dict[str, Task] = {task.name: task for module in _MODULES for task in module.TASKS}
# In the published data, but not in the list that its generator makes by default.
OPTIONAL = ("string_search_gibberish", "iterate_first")
DEFAULT_TASKS = tuple(name for name in TASKS if name not in OPTIONAL)
_ALIASES = {"identify_the_odd_group": "identify_odd_group"}
# Written under another name than the variable's.
_KEYS = {"operation_step": "step", "action_step": "step"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One test.

    Attributes:
      params: the varied parameters, context_length among them where the task has one.
    """

    id: str
    task: str
    category: str
    prompt: str
    reference: Reference
    params: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The flat published form."""
        fixed = dataclasses.asdict(self)
        return {**{k: v for k, v in fixed.items() if k != "params"}, **self.params}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Entry:
        """Accepts `level` for `category`, and parameters that are missing.

        Raises:
          ValueError: no prompt, reference or task, or an unknown task.
        """
        values = dict(record)
        missing = [key for key in ("prompt", "reference", "task") if key not in values]
        if missing:
            raise ValueError(f"entry {values.get('id')!r} lacks {', '.join(missing)}.")
        name = get_task(values.pop("task")).name
        level = values.pop("level", TASKS[name].family)
        return cls(
            id=values.pop("id", ""),
            task=name,
            category=values.pop("category", level),
            prompt=values.pop("prompt"),
            reference=values.pop("reference"),
            params=values,
        )


def get_task(name: str) -> Task:
    """The task of a name, also of the published generator's name for it.

    Raises:
      ValueError: no such task.
    """
    known = _ALIASES.get(name, name)
    if known not in TASKS:
        raise ValueError(f"task={name!r}: expected one of {tuple(TASKS)}.")
    return TASKS[known]


def generate(
    task: str,
    params: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
    *,
    tokenizer: Encodes,
    pool: Sequence[str] | None = None,
    samples: int | None = None,
    compat: bool = False,
) -> list[Entry]:
    """Entries of a task: every combination of the variables, label and sample.

    Each entry has a seed of its own (of task, parameters and index), so another choice of
    variables leaves the entries of a combination as they were.

    Args:
      task: name.
      params: values of variables, in place of the defaults.
      seed: of the whole set.
      tokenizer: measures contexts.
      pool: distinct lower-case words; default: pronounceable pseudo-words.
      samples: entries a combination and label; default: the task's.
      compat: reproduce the published generator's faults that change answers: several odd lists in
        identify_odd_group, references of compare_two_lists in random order, a last pair without
        value, an empty reference of processing_data_blocks, and replacement or absent words that
        may stand in the context.

    Raises:
      ValueError: an unknown task or variable, or a setting that does not fit its context.
    """
    definition = get_task(task)
    unknown = set(params or ()) - set(definition.variables)
    if unknown:
        raise ValueError(
            f"{task} has no variable {sorted(unknown)}: expected {tuple(definition.variables)}."
        )
    samples = definition.samples if samples is None else samples
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    variables = {**definition.variables, **(params or {})}
    entries = []
    for values in itertools.product(*variables.values()):
        setting = dict(zip(variables, values, strict=True))
        if definition.skip(setting):
            continue
        for index, label in itertools.product(range(samples), definition.labels or (None,)):
            name = [definition.name, setting, label, index, seed]
            digest = _digest(name)
            without_level = {k: v for k, v in setting.items() if k != "p_anomaly"}
            source = Source(
                np.random.Generator(np.random.PCG64(int.from_bytes(digest))),
                tokenizer,
                pseudo_words() if pool is None else pool,
                compat,
                int.from_bytes(_digest([definition.name, without_level, index, seed])),
            )
            try:
                prompt, reference = definition.build(source, {**setting, "label": label})
            except ValueError as error:
                raise ValueError(f"{definition.name} {setting}: {error}") from error
            keys = {_KEYS.get(k, k): v for k, v in setting.items() if v is not None}
            identity = str(uuid.UUID(bytes=digest[:16]))
            entries.append(
                Entry(identity, definition.name, definition.family, prompt, reference, keys)
            )
    return entries


def short_params(task: str, context_length: int) -> dict[str, tuple[Any, ...]]:
    """Variables that fit a context of a few hundred tokens (200 characters are enough)."""
    definition = get_task(task)
    params = dict(definition.short)
    if "context_length" in definition.variables:
        params["context_length"] = (context_length,)
    return params


def solve(task: str, prompt: str) -> Reference:
    """The exact answer, from the prompt alone."""
    return get_task(task).solve(prompt)


def save(entries: Iterable[Entry], folder: str | os.PathLike[str]) -> None:
    """Writes `<category>/<task>.jsonl` files, each whole or not at all."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.category, entry.task), []).append(json.dumps(entry.to_json()))
    for (category, task), lines in groups.items():
        path = pathlib.Path(folder) / category / f"{task}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def load(folder: str | os.PathLike[str]) -> list[Entry]:
    """Reads a tree `<category>/<task>.jsonl`, published or written by `save`.

    Raises:
      ValueError: no such files, or a line that is not an entry, by file and line.
    """
    paths = sorted(pathlib.Path(folder).glob("*/*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} has no <category>/<task>.jsonl file.")
    entries = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                entries.append(Entry.from_json(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return entries


def _digest(name: Any) -> bytes:
    return hashlib.sha256(json.dumps(name, sort_keys=True).encode()).digest()
