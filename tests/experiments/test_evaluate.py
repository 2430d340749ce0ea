"""Tasks on a checkpoint: the built-in questions, intervals, and what a second start does."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")

from experiments import config_files, evaluate, python_next_line  # noqa: E402
from experiments.errors import UsageError  # noqa: E402
from jaxllm.evaluation import harness, statistics  # noqa: E402


@pytest.fixture
def config(shared_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    model = shared_dir / "data" / "models" / "stories260k"
    return config_files.resolve("evaluate", [f"model={model}", "limit=9", "max_length=96"]).config


def test_results_have_intervals_and_a_second_start_asks_nothing(config, tmp_path, monkeypatch):
    results = evaluate.run(config, tmp_path)
    rows = {row["metric"]: row for row in results["tasks"][python_next_line.NAME]}
    assert set(rows) == {"acc", "acc_norm"}
    theirs = results["harness"][python_next_line.NAME]
    assert rows["acc"]["value"] == pytest.approx(theirs["acc,none"])
    # 9 questions, 6 a module.
    assert rows["acc"]["method"] == "clustered posterior" and rows["acc"]["size"] == 9
    assert 0 <= rows["acc"]["lower"] < rows["acc"]["upper"] <= 1
    (saved,) = (tmp_path / "lm_eval").rglob("results_*.json")
    assert (
        json.loads(saved.read_text())["results"][python_next_line.NAME]["acc,none"]
        == (theirs["acc,none"])
    )
    assert len(list((tmp_path / "lm_eval").rglob("samples_*.jsonl"))) == 1
    assert "clustered posterior" in (tmp_path / "report.md").read_text()

    def refuse(*_, **__):
        raise AssertionError("the answer should have come from the workdir")

    monkeypatch.setattr(harness.scoring, "score_continuations", refuse)
    assert evaluate.run(config, tmp_path) == results


def test_answers_of_another_model_are_not_taken(config):
    engine = evaluate.generate.load(config)
    name = evaluate.fingerprint(engine, config)
    assert evaluate.fingerprint(evaluate.generate.load(config), config) == name
    other = jax.tree.map(lambda x: x.at[..., -1].add(1e-3), engine.params)
    assert evaluate.fingerprint(dataclasses.replace(engine, params=other), config) != name
    for option in ("max_length", "seed"):
        changed = config.copy_and_resolve_references()
        changed[option] += 1
        assert evaluate.fingerprint(engine, changed) != name


def test_unknown_tasks_and_folders_are_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.generate, "load", lambda config: pytest.fail("loaded first"))
    with config.unlocked():
        config.task_folder = str(tmp_path / "none")
    with pytest.raises(UsageError, match="no such folder"):
        evaluate.run(config, tmp_path)


def test_questions_are_answerable_and_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        python_next_line.write(tmp_path / name)
    texts = [(tmp_path / name / "python_next_line.jsonl").read_text() for name in ("a", "b")]
    assert texts[0] == texts[1]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert len(rows) > 80 and len({row["source"] for row in rows}) > 15
    for row in rows:
        assert len(set(row["choices"])) == python_next_line.CHOICES
        assert len(row["context"].splitlines()) == python_next_line.CONTEXT_LINES
        indents = {len(line) - len(line.lstrip()) for line in row["choices"]}
        assert len(indents) == 1
    assert {row["answer"] for row in rows} == set(range(python_next_line.CHOICES))


def sample(doc, score, name="none", metric="acc"):
    return {"doc": doc, "filter": name, "metrics": [metric], metric: score}


def test_estimates_by_filter_and_cluster():
    right = [1.0, 0.0, 1.0, 1.0]
    plain = [sample({"source": i // 2}, x) for i, x in enumerate(right)]
    strict = [sample({"source": i // 2}, 0.0, "strict") for i in range(4)]
    by_filter = evaluate.estimates([*plain, *strict], "", 0.05)
    assert [(row["filter"], row["value"]) for row in by_filter] == [("none", 0.75), ("strict", 0)]
    assert by_filter[0]["method"] == "Beta posterior"
    (clustered,) = evaluate.estimates(plain, "source", 0.05)
    expected = statistics.report_mean(np.array(right), np.array([0, 0, 1, 1]))
    assert (clustered["lower"], clustered["upper"]) == (expected.lower, expected.upper)
    # Perplexities come as (log-likelihood, words) a document.
    assert evaluate.estimates([sample({}, (-3.0, 4), metric="word_perplexity")], "", 0.05) == []
