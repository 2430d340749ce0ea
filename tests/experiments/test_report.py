"""Results, metrics, intervals and reports."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from experiments import report


def test_results_are_plain_json_and_written_whole(tmp_path):
    report.write_results(tmp_path, {"x": np.float32(0.5), "y": np.arange(3), "z": [math.inf, None]})
    assert json.loads((tmp_path / "results.json").read_text()) == {
        "x": 0.5,
        "y": [0, 1, 2],
        "z": ["inf", None],
    }
    with pytest.raises(TypeError, match="set"):
        report.write_results(tmp_path, {"x": {1, 2}})
    assert json.loads((tmp_path / "results.json").read_text())["x"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_metrics_of_a_resumed_run_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0, "note": "text"},
        {"step": 2, "loss": 4.5},
        {"step": 3, "eval_loss": 3.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    metrics = report.read_metrics(path)
    assert set(metrics) == {"loss", "eval_loss"}
    np.testing.assert_array_equal(metrics["loss"][0], [1, 2])
    np.testing.assert_array_equal(metrics["loss"][1], [5.0, 4.5])
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        report.read_metrics(path)


def test_mean_interval_is_student_t():
    mean, low, high = report.mean_interval([[1.0, 5.0], [3.0, 5.0]])
    np.testing.assert_allclose(mean, [2.0, 5.0])
    # Two values one apart from their mean: t quantile 12.706 with one degree, error 1.
    np.testing.assert_allclose(high - mean, [12.706, 0.0], atol=1e-3)
    np.testing.assert_allclose(mean - low, high - mean)


def test_report_has_its_figures_tables_and_text(tmp_path):
    page = report.Report(tmp_path, "A title")
    figure, axes = report.new_figure()
    report.plot_curve(axes, [1, 2, 3], [[3, 2, 1], [4, 2, 2]], "loss")
    page.figure(figure, "loss", "The loss")
    page.heading("Numbers")
    page.table(["name", "value"], [["a|b", 1.23456789], ["c", 2]])
    page.code("```\ninner\n```")
    text = page.write().read_text()
    assert text.startswith("# A title\n")
    assert "![The loss](figures/loss.png)" in text
    assert "| a\\|b | 1.235 |" in text
    assert "````text\n```\ninner\n```\n````" in text
    assert (tmp_path / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "report.md"]
