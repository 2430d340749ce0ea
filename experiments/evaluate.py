"""Runs tasks of lm-evaluation-harness on a checkpoint and reports them with intervals."""

from __future__ import annotations

import hashlib
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments import generate, python_next_line, report
from experiments.errors import UsageError
from jaxllm.evaluation import statistics


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Evaluates; answers are kept in the workdir, so that a second start goes on.

    Returns:
      {"model", "tasks": {task: [{"metric", "value", "lower", "upper", ...}]}, "harness": the
      harness's own numbers}.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm-evaluation-harness is missing: pip install 'jaxllm[eval]'")
    from lm_eval.loggers import EvaluationTracker

    from jaxllm.evaluation import harness

    workdir = workdir.absolute()
    folders = [workdir / "tasks"]
    python_next_line.write(folders[0], config.seed)
    if config.task_folder is not None:
        folders.append(pathlib.Path(config.task_folder))
        if not folders[1].is_dir():
            raise UsageError(f"task_folder={config.task_folder}: there is no such folder.")
    engine = generate.load(config)
    lm = harness.JaxLM(
        engine.config,
        engine.params,
        engine.tokenizer,
        template=engine.template,
        batch_size=config.batch_size,
        max_length=config.max_length or None,
        seed=config.seed,
        name=config.model,
    )
    tracker = EvaluationTracker(output_path=str(workdir / "lm_eval"))
    try:
        found = harness.evaluate(
            lm,
            config.tasks,
            task_folder=folders,
            use_cache=workdir / f"answers-{fingerprint(engine, config)}",
            num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
            limit=config.limit or None,
            apply_chat_template=engine.template is not None,
            evaluation_tracker=tracker,
        )
    except KeyError as error:
        raise UsageError(f"tasks={tuple(config.tasks)}: {error.args[0]}") from error
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    results = {
        "model": config.model,
        "tasks": {
            task: estimates(rows, config.cluster_by, config.alpha) for task, rows in samples.items()
        },
        "harness": found["results"],
    }
    write(workdir, results, config.alpha)
    return results


def fingerprint(engine: generate.Engine, config: ml_collections.ConfigDict) -> str:
    """Names all that answers depend on beside their requests.

    The harness looks answers up by request alone: those of another model would be taken for ours.
    """
    setting = (engine.config, engine.tokenizer.fingerprint(), config.max_length, config.seed)
    digest = hashlib.sha256(repr(setting).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(engine.params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def estimates(
    samples: Sequence[dict[str, Any]], cluster_by: str, alpha: float
) -> list[dict[str, Any]]:
    """Every metric that has a number a question, with its interval.

    Args:
      samples: the harness's, of one task.
      cluster_by: field of the documents that names their source; "" or one that they lack = none.
      alpha: one minus the level.
    """
    found = []
    for name in sorted({sample["filter"] for sample in samples}):
        rows = [sample for sample in samples if sample["filter"] == name]
        sources = [sample["doc"].get(cluster_by) for sample in rows] if cluster_by else [None]
        clusters = None
        if None not in sources:
            clusters = np.unique([str(source) for source in sources], return_inverse=True)[1]
        for metric in sorted(set.intersection(*(set(sample["metrics"]) for sample in rows))):
            values = [sample[metric] for sample in rows]
            # Perplexities hold a pair a document, and have no mean over documents.
            if not all(isinstance(value, bool | int | float) for value in values):
                continue
            estimate = statistics.report_mean(np.array(values, float), clusters, alpha=alpha)
            found.append({"metric": metric, "filter": name} | vars(estimate))
    return found


def write(workdir: pathlib.Path, results: dict[str, Any], alpha: float) -> None:
    """report.md: metrics with intervals, a figure, and the harness's own numbers."""
    page = report.Report(workdir, f"Evaluation of {results['model']}")
    rows = [(task, row) for task, found in results["tasks"].items() for row in found]
    level = f"{100 * (1 - alpha):g} %"
    page.table(
        ("task", "metric", "filter", "value", f"{level} from", "to", "questions", "interval"),
        [
            (task, *(row[k] for k in ("metric", "filter", "value", "lower", "upper", "size")))
            + (row["method"],)
            for task, row in rows
        ],
    )
    if rows:
        figure, axes = report.new_figure(height=1.2 + 0.35 * len(rows))
        value, lower, upper = (
            np.array([row[name] for _, row in rows], float) for name in ("value", "lower", "upper")
        )
        places = np.arange(len(rows))[::-1]
        axes.hlines(places, lower, upper)
        axes.plot(value, places, "o")
        axes.set_yticks(places, [f"{task}, {row['metric']}" for task, row in rows])
        page.figure(figure, "metrics", f"Metrics with their {level} intervals")
    page.heading("The harness's numbers")
    page.table(
        ("task", "measure", "value"),
        [
            (task, name, value)
            for task, found in results["harness"].items()
            for name, value in found.items()
            if name not in ("alias", "name")
        ],
    )
    page.write()
