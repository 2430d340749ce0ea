"""Runs a model over entries and sums up its scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.evaluation.memory_tests.entries import Entry, get_task
from jaxllm.evaluation.memory_tests.scorers import score
from jaxllm.evaluation.statistics import Estimate, report_mean

ModelFn = Callable[[Sequence[str]], Sequence[str | None]]


@dataclasses.dataclass(frozen=True)
class Scored:
    """An entry with the answer and its scores by name ("strict" among them)."""

    entry: Entry
    generation: str | None
    scores: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Report:
    """All answers of one model."""

    records: tuple[Scored, ...]

    def tasks(self) -> dict[str, dict[str, Estimate]]:
        """Mean of every score by task, each with a 95 % interval."""
        return {
            name: {metric: self._mean(group, metric) for metric in group[0].scores}
            for name, group in self._groups(lambda record: record.entry.task)
        }

    def families(self) -> dict[str, Estimate]:
        """Mean strict score by family, over its entries."""
        groups = self._groups(lambda record: record.entry.category)
        return {name: self._mean(group, "strict") for name, group in groups}

    def parameters(self) -> list[tuple[str, str, Any, Estimate]]:
        """(task, parameter, value, mean strict score) for parameters with several values."""
        rows = []
        for task, group in self._groups(lambda record: record.entry.task):
            for name in group[0].entry.params:
                values = {r.entry.params[name] for r in group if name in r.entry.params}
                if len(values) < 2:
                    continue
                for value in sorted(values, key=lambda v: (str(type(v)), v)):
                    chosen = [r for r in group if r.entry.params.get(name) == value]
                    rows.append((task, name, value, self._mean(chosen, "strict")))
        return rows

    def _groups(self, key) -> Iterator[tuple[str, list[Scored]]]:
        groups: dict[str, list[Scored]] = {}
        for record in self.records:
            groups.setdefault(key(record), []).append(record)
        yield from groups.items()

    @staticmethod
    def _mean(group: Sequence[Scored], metric: str) -> Estimate:
        return report_mean(np.array([record.scores[metric] for record in group]))


def score_entry(entry: Entry, generation: str | None) -> Scored:
    """Scores of one answer by all metrics of its task and the strict one."""
    task = get_task(entry.task)
    scores: dict[str, float] = {}
    for metric in (*task.metrics, f"strict_{task.strict}"):
        scores |= score(metric, entry.reference, generation)
    return Scored(entry, generation, scores)


def run(task_set: Sequence[Entry], model_fn: ModelFn, batch: int = 8) -> Report:
    """Asks the model all prompts, task by task, and scores the answers.

    Args:
      task_set: entries.
      model_fn: prompts -> answers, one each.
      batch: prompts a call.

    Raises:
      ValueError: no entries, a batch below 1, or a model that returns another number of answers.
    """
    if not task_set:
        raise ValueError("task_set is empty; generate or load some entries.")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1.")
    ordered = sorted(task_set, key=lambda entry: entry.task)
    records = []
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        answers = model_fn([entry.prompt for entry in part])
        if len(answers) != len(part):
            raise ValueError(f"model_fn gave {len(answers)} answers to {len(part)} prompts.")
        records += [score_entry(e, a) for e, a in zip(part, answers, strict=True)]
    return Report(tuple(records))
