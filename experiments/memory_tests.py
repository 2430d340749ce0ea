"""Memory tests written by programs: exact solvers and a small trained decoder, or a checkpoint."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np
import tqdm

from experiments import generate, memory_tests_report, memory_tests_toy, report
from experiments.errors import UsageError
from jaxllm.evaluation import memory_tests
from jaxllm.evaluation.statistics import report_mean


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs the tests and writes the report.

    Returns:
      Of `tiny`: {"solvers": {task: score}, "toy": see `memory_tests_toy.train`, "claims": [...]}.
      Of a checkpoint: {"tasks", "families", "parameters"} with means and intervals.
    """
    if "toy" in config:
        results: dict[str, Any] = {
            "solvers": check_solvers(config),
            "toy": memory_tests_toy.train(config, config.seed, pathlib.Path(workdir) / "toy"),
        }
        results["claims"] = memory_tests_report.claims(results)
        memory_tests_report.write_tiny(workdir, results)
    else:
        results = test_model(config, workdir)
        memory_tests_report.write_model(workdir, results)
    return results


class Characters:
    """Four characters a token, roughly as in tokenizers of English."""

    def encode(self, text: str) -> list[int]:
        """A zero for every token."""
        return [0] * -(-len(text) // 4)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and the characters of each."""
        starts = range(0, len(text), 4)
        return self.encode(text), list(zip(starts, [*starts[1:], len(text)], strict=True))


def check_solvers(config: ml_collections.ConfigDict) -> dict[str, dict[str, Any]]:
    """Strict score of the exact solver on every task: {task: mean with interval}."""
    scores = {}
    for task in memory_tests.TASKS:
        entries = memory_tests.generate(
            task,
            memory_tests.short_params(task, config.solvers.context_tokens),
            config.seed,
            tokenizer=Characters(),
            samples=config.solvers.samples,
        )
        strict = [
            memory_tests.score_entry(
                entry, memory_tests.answer_text(memory_tests.solve(task, entry.prompt))
            ).scores["strict"]
            for entry in entries
        ]
        scores[task] = vars(report_mean(np.array(strict)))
    return scores


def test_model(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Greedy answers of a checkpoint to all entries, scored; answers go to answers.json.

    Raises:
      UsageError: an option, the checkpoint or a setting of the tests cannot be used.
    """
    names = config.tasks or memory_tests.DEFAULT_TASKS
    engine = generate.load(config)
    short = config.context_tokens
    try:
        entries = [
            entry
            for name in names
            for entry in memory_tests.generate(
                name,
                memory_tests.short_params(name, short) if short else None,
                config.seed,
                tokenizer=engine.tokenizer,
                samples=config.samples or None,
            )
        ]
    except ValueError as error:
        raise UsageError(f"{error} Choose --config.tasks or --config.context_tokens.") from error
    system = [{"role": "system", "content": config.system}] if config.system else []
    bar = tqdm.tqdm(total=len(entries), unit="answer", disable=None)

    def model_fn(prompts: Sequence[str]) -> list[str]:
        dialogues = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
        replies = engine.answer(dialogues, config)
        bar.update(len(prompts))
        return [_first_answer(text) for text, _ in replies]

    with bar:
        found = memory_tests.run(entries, model_fn, config.batch)
    lines = [
        {**record.entry.to_json(), "generation": record.generation, "scores": record.scores}
        for record in found.records
    ]
    report.write_json(pathlib.Path(workdir) / "answers.json", lines)
    return {
        "model": config.model,
        "entries": len(entries),
        "tasks": {
            task: {metric: vars(mean) for metric, mean in scores.items()}
            for task, scores in found.tasks().items()
        },
        "families": {family: vars(mean) for family, mean in found.families().items()},
        "parameters": [
            {"task": task, "parameter": name, "value": value, "strict": vars(mean)}
            for task, name, value, mean in found.parameters()
        ],
    }


def _first_answer(text: str) -> str:
    """Base models go on with tests of their own."""
    return re.split(r"\n\s*Instruction:", text)[0]
