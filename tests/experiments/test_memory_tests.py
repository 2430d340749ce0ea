"""The memory-test experiment: a training run of a few steps, and a small checkpoint."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments import config_files, launch, memory_tests_report, memory_tests_toy
from jaxllm.evaluation import memory_tests
from jaxllm.models import hf, parameters
from jaxllm.models.config import ModelConfig

SMALL = {
    "solvers.samples": 1,
    "toy.words": 40,
    "toy.embed_dim": 16,
    "toy.num_layers": 1,
    "toy.num_heads": 2,
    "toy.lengths": "(24,36)",
    "toy.rows_per_task": 1,
    "toy.steps": 4,
    "toy.warmup_steps": 1,
    "toy.log_every": 2,
    "toy.eval_every": 2,
    "toy.test_entries": 2,
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("memory_tests")
    flags = [f"--config.{name}={value}" for name, value in SMALL.items()]
    assert launch.main(["--config", "memory_tests", "--workdir", str(workdir), *flags]) == 0
    return json.loads((workdir / "results.json").read_text()), workdir


def test_results(outcome):
    results, workdir = outcome
    assert set(results["solvers"]) == set(memory_tests.TASKS)
    assert all(mean["value"] == 1 for mean in results["solvers"].values())
    toy = results["toy"]
    assert toy["steps"] == [2, 4] and set(toy["ladder"]) == {"24", "36"}
    for task in memory_tests_toy.TASKS:
        assert len(toy["accuracy"][task]) == len(toy["ladder"]["36"][task]) == 2
    text = (workdir / "report.md").read_text()
    for claim in results["claims"]:
        assert claim["claim"] in text and claim["measured"] in text
    for name in ("learning", "ladder"):
        assert (workdir / "figures" / f"{name}.png").stat().st_size > 5_000


def test_claims_follow_the_numbers(outcome):
    toy = dict(outcome[0]["toy"])
    names = memory_tests_toy.TASKS
    toy["ladder"] = {
        "24": {name: [1.0 if name in memory_tests_toy.COPYING else 0.0] * 30 for name in names},
        "36": {name: [0.0] * 10 + [1.0] * 20 for name in names},
    }
    toy["accuracy"] = {name: [0.0, toy["ladder"]["24"][name][0]] for name in names}

    def held(**changes):
        claims = memory_tests_report.claims(
            {"solvers": outcome[0]["solvers"], "toy": toy | changes}
        )
        return [claim["holds"] for claim in claims]

    majority = dict.fromkeys(names, 0.2)
    assert held(majority=majority) == [True, True, True, True, True, False]
    early = toy["accuracy"] | {"count": [1.0, 1.0]}
    assert not held(majority=majority, accuracy=early)[1]


def test_batches_hold_the_answers_and_nothing_else():
    pool = memory_tests.pseudo_words(40)
    tokenizer = memory_tests_toy.make_tokenizer(pool)
    loader = memory_tests_toy.Batches(tokenizer, pool, 24, 2, 0)
    first, again = next(loader.iterator(3)), loader.batch(3)
    for name, values in first.items():
        assert np.array_equal(values, again[name]), name
    texts = 0
    for tokens, targets, weights, segments, positions in zip(*first.values(), strict=True):
        for segment in range(1, segments.max() + 1):
            [used] = np.nonzero(segments == segment)
            assert np.array_equal(positions[used], np.arange(len(used)))
            # Each target is the next token; the last one ends the text.
            assert np.array_equal(targets[used[:-1]], tokens[used[1:]])
            assert targets[used[-1]] == tokenizer.eos_id
            # Answers only, at the end and whole: the prompts' last words come just before.
            answer = used[weights[used] > 0]
            assert np.array_equal(answer, used[-len(answer) :]) and 2 <= len(answer) < len(used)
            assert tokenizer.decode(tokens[answer[:1]]) in ("Answer", "ANSWER", "is") or (
                tokenizer.decode(tokens[answer[0] - 2 : answer[0]]) == "Occurrences, of"
            )
            texts += 1
        assert not weights[segments == 0].any()
    assert texts == 2 * len(memory_tests_toy.TASKS)


@pytest.fixture
def checkpoint(tmp_path):
    """A decoder with random weights that reads bytes."""
    model = ModelConfig(
        vocab_size=260, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32
    )
    folder = tmp_path / "model"
    hf.save_hf(folder, model, parameters.init_params(model, jax.random.key(0)))
    return folder


def test_a_checkpoint_is_tested(checkpoint, tmp_path):
    options = {
        "model": checkpoint,
        "tokenizer": "byte",
        "tasks": "('key_value_search','quantity_state')",
        "context_tokens": 60,
        "max_new_tokens": 4,
    }
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    workdir = tmp_path / "out"
    assert launch.main(["--config", "memory_tests:model", "--workdir", str(workdir), *flags]) == 0
    results = json.loads((workdir / "results.json").read_text())
    answers = json.loads((workdir / "answers.json").read_text())
    assert set(results["tasks"]) == {"key_value_search", "quantity_state"}
    assert results["entries"] == len(answers) > 5
    for answer in answers:
        assert len(answer["generation"]) <= 4
        assert memory_tests.solve(answer["task"], answer["prompt"]) == answer["reference"]
    assert results["families"]["search"]["size"] == 5
    assert (workdir / "figures" / "families.png").stat().st_size > 5_000
    assert "key_value_search" in (workdir / "report.md").read_text()


def test_a_context_too_short_is_a_usage_error(checkpoint, tmp_path, capsys):
    flags = [f"--config.model={checkpoint}", "--config.tokenizer=byte"]
    flags += ["--config.context_tokens=20", "--config.tasks=('compare_positions',)"]
    arguments = ["--config", "memory_tests:model", "--workdir", str(tmp_path / "out"), *flags]
    assert launch.main(arguments) != 0
    assert "context_length=20" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["tiny", "model", "paper"])
def test_variants_resolve(variant):
    assert config_files.resolve(f"memory_tests:{variant}").config.seed == 0
