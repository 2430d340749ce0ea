"""A small decoder trained on four memory tests at once, in a language of one token a word."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments import report
from experiments.errors import Interrupted
from jaxllm.evaluation import memory_tests
from jaxllm.inference.generate import generate
from jaxllm.models import parameters
from jaxllm.models.config import ModelConfig
from jaxllm.training import loop, objectives, optimizers

COPYING = ("key_value_search", "snapshot_unique_words")
TRACKING = ("count", "quantity_state")
TASKS = (*COPYING, *TRACKING)
MODULUS = 10


@dataclasses.dataclass(frozen=True)
class WordTokenizer:
    """One token a word or number; punctuation has none, so that n tokens of context are n words.

    Token 0 ends a text and pads rows.
    """

    words: tuple[str, ...]

    eos_id = 0

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Ids of all words; an unknown one is a ValueError."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of all words, and the characters of each."""
        found = list(re.finditer(r"\w+", text))
        unknown = {match.group() for match in found} - self._ids.keys()
        if unknown:
            raise ValueError(f"no token for {sorted(unknown)}.")
        return [self._ids[m.group()] for m in found], [m.span() for m in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The words, separated by commas as in the contexts."""
        return ", ".join(self.words[i] for i in ids)


def make_tokenizer(pool: Sequence[str]) -> WordTokenizer:
    """Tokens for the pool, small numbers, and the words of the tasks' prompts."""

    class Anything:
        def encode_with_offsets(self, text):
            spans = [match.span() for match in re.finditer(r"\w+", text)]
            return list(range(len(spans))), spans

        def encode(self, text):
            return self.encode_with_offsets(text)[0]

    rng = np.random.default_rng(0)
    prompts = [e.prompt for e in _entries(TASKS, 16, 4, rng, Anything(), pool)]
    known = [*pool, *map(str, range(33))]
    wording = set(re.findall(r"\w+", " ".join(prompts))) - set(known)
    return WordTokenizer(("<end>", *known, *sorted(wording)))


def _entries(tasks, length, count, rng, tokenizer, pool) -> list[memory_tests.Entry]:
    """`count` entries of each task with contexts of `length` words."""
    entries = []
    for task in tasks:
        for _ in range(count):
            params: dict[str, Any] = {"context_length": (length,)}
            if task == "key_value_search":
                params["context_depth"] = (float(rng.random()),)
            elif task == "count":
                params["repetition_count"] = (int(rng.integers(1, 11)),)
            elif task == "quantity_state":
                # Two words a step: "Add 3".
                params = {"operation_step": (length // 2 - 1,), "modulus": (MODULUS,)}
            seed = int(rng.integers(2**62))
            entries += memory_tests.generate(
                task, params, seed, tokenizer=tokenizer, pool=pool, samples=1
            )[:1]
    return entries


@dataclasses.dataclass(frozen=True)
class Batches:
    """Rows of prompt and answer; only the tokens of answers count.

    Batch i is a function of (seed, i). A `jaxllm.training.loop.Loader`.
    """

    tokenizer: WordTokenizer
    pool: tuple[str, ...]
    length: int
    rows_per_task: int
    seed: int

    def iterator(self, start_step: int = 0) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches from a step on."""
        while True:
            yield self.batch(start_step)
            start_step += 1

    def fingerprint(self) -> Mapping[str, Any]:
        """What the batches depend on."""
        names = ("length", "rows_per_task", "seed")
        return {"words": len(self.pool), **{name: getattr(self, name) for name in names}}

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """tokens, targets, weights, segment_ids, positions: [rows, time]."""
        rng = np.random.default_rng([self.seed, step])
        entries = _entries(TASKS, self.length, self.rows_per_task, rng, self.tokenizer, self.pool)
        # A repeated context fills a row; of the other tests a row holds two.
        shape = (-(-5 * self.rows_per_task // 2), 2 * self.length + 48)
        tokens, targets, segments, positions = np.zeros((4, *shape), np.int32)
        weights = np.zeros(shape, np.float32)
        used = [0] * shape[0]
        texts = []
        for entry in entries:
            prompt = self.tokenizer.encode(entry.prompt)
            answer = self.tokenizer.encode(memory_tests.answer_text(entry.reference))
            texts.append(([*prompt, *answer, self.tokenizer.eos_id], len(prompt) - 1))
        for ids, first in sorted(texts, key=lambda text: -len(text[0])):
            size = len(ids) - 1
            row = next(i for i, start in enumerate(used) if start + size <= shape[1])
            place = slice(used[row], used[row] + size)
            used[row] += size
            tokens[row, place], targets[row, place] = ids[:-1], ids[1:]
            segments[row, place] = segments[row].max() + 1
            positions[row, place] = np.arange(size)
            weights[row, place][first:] = 1
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "segment_ids": segments,
            "positions": positions,
        }


def answers(
    model: ModelConfig, params: Any, tokenizer: WordTokenizer, entries, max_new_tokens: int
) -> memory_tests.Report:
    """The model's greedy answers to entries, all in one batch."""

    def model_fn(prompts: Sequence[str]) -> list[str]:
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        new = generate(model, params, ids, max_new_tokens=max_new_tokens, temperature=0.0)
        return [tokenizer.decode(row) for row in new]

    return memory_tests.run(entries, model_fn, batch=len(entries))


def train(config: ml_collections.ConfigDict, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """Trains with one seed, and measures accuracy over training and on longer contexts.

    Returns:
      {"steps": [...], "accuracy": {task: [...]}, "majority": {task: ...},
      "ladder": {length: {task: [score of every entry]}}}.

    Raises:
      Interrupted: asked to end early; the same call goes on.
    """
    options = config.toy
    pool = memory_tests.pseudo_words(options.words)
    tokenizer = make_tokenizer(pool)
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        embed_dim=options.embed_dim,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        num_kv_heads=options.num_heads,
        mlp_dim=4 * options.embed_dim,
        max_positions=2 * max(options.lengths) + 32,
        eos_token_ids=(tokenizer.eos_id,),
    )
    tests = {
        length: _entries(
            TASKS,
            length,
            options.test_entries,
            # Beyond the seeds of training.
            np.random.default_rng([10**6, seed, length]),
            tokenizer,
            pool,
        )
        for length in options.lengths
    }
    length = options.lengths[0]

    def evaluate(state: Any) -> Mapping[str, float]:
        found = answers(model, state.params, tokenizer, tests[length], length + 8)
        return {task: scores["strict"].value for task, scores in found.tasks().items()}

    result = loop.train(
        loop.LoopConfig(
            steps=options.steps,
            log_every=options.log_every,
            eval_every=options.eval_every,
            checkpoint_every=options.eval_every,
            keep=1,
            seed=seed,
            tensorboard=False,
        ),
        loss=objectives.language_model_loss(model),
        params=lambda: parameters.init_params(model, jax.random.key(seed)),
        optimizer=optimizers.OptimizerConfig(
            schedule=optimizers.ScheduleConfig(
                name="cosine",
                peak=options.learning_rate,
                warmup_steps=options.warmup_steps,
                total_steps=options.steps,
            ),
            weight_decay=options.weight_decay,
        ),
        loader=Batches(tokenizer, pool, length, options.rows_per_task, seed),
        workdir=folder,
        evaluate=evaluate,
    )
    if result.interrupted:
        raise Interrupted(f"saved step {int(result.state.step)}; the same command goes on.")
    series = report.read_metrics(folder / "metrics.jsonl")
    ladder: dict[str, dict[str, list[float]]] = {}
    for length, entries in tests.items():
        found = answers(model, result.state.params, tokenizer, entries, length + 8)
        ladder[str(length)] = {
            task: [r.scores["strict"] for r in found.records if r.entry.task == task]
            for task in TASKS
        }
    return {
        "steps": series[f"eval/{TASKS[0]}"][0].tolist(),
        "accuracy": {task: series[f"eval/{task}"][1].tolist() for task in TASKS},
        "majority": _majority(options.lengths[0], tokenizer, pool),
        "ladder": ladder,
    }


def _majority(length: int, tokenizer: WordTokenizer, pool: Sequence[str]) -> dict[str, float]:
    """The share of the most frequent answer: what knowing only the task reaches."""
    # Many more entries than are tested: the largest share of a small sample is too high.
    entries = _entries(TASKS, length, 300, np.random.default_rng(1), tokenizer, pool)
    references = {task: [str(e.reference) for e in entries if e.task == task] for task in TASKS}
    return {task: max(map(found.count, found)) / len(found) for task, found in references.items()}
