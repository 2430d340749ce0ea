"""The coverage experiment, on a grid of a few seconds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments import config_files, small_sample_report, small_sample_stats
from jaxllm.evaluation.statistics import simulation

SMALL = [
    "alphas=(0.05,0.2)",
    "independent.sizes=(3,10)",
    "independent.parameters=400",
    "independent.num_samples=500",
    "clustered.sizes=(2,6)",
    "clustered.parameters=60",
    "clustered.repeats=5",
    "clustered.num_samples=500",
    "clustered.bootstrap_samples=200",
    "clustered.grid_points=50",
    "comparison.sizes=(3,10)",
    "comparison.parameters=300",
    "comparison.num_samples=500",
    "comparison.bca_sizes=(3,)",
    "comparison.bca_samples=50",
    "paired.sizes=(3,30)",
    "paired.parameters=100",
    "paired.num_samples=500",
    "paired.bootstrap_samples=200",
    "f1.sizes=(3,10)",
    "f1.parameters=200",
    "f1.num_samples=500",
    "f1.bca_sizes=(3,)",
    "f1.bca_samples=50",
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("coverage")
    config = config_files.resolve("small_sample_stats", SMALL).config
    return small_sample_stats.run(config, workdir), workdir


def test_known_coverage(outcome):
    single = outcome[0]["settings"]["independent"]
    # Summed exactly: the central limit theorem with 3 questions covers 0.496 on average.
    assert single["3"]["CLT"]["coverage"][0] == pytest.approx(0.496, abs=0.05)
    assert single["10"]["Bayes"]["coverage"][0] == pytest.approx(0.95, abs=0.02)
    clusters = outcome[0]["settings"]["clustered"]["6"]
    assert clusters["clustered Bayes (grid)"]["coverage"][0] == pytest.approx(0.95, abs=0.06)
    assert clusters["bootstrap within"]["coverage"][0] < 0.6


def test_every_setting_has_every_level(outcome):
    for table in outcome[0]["settings"].values():
        for methods in table.values():
            for entry in methods.values():
                assert len(entry["coverage"]) == len(entry["width"]) == 2
                # A lower level is a narrower interval that holds the truth less often.
                assert entry["coverage"][0] >= entry["coverage"][1]
                assert entry["width"][0] >= entry["width"][1]


def test_report(outcome):
    results, workdir = outcome
    text = (workdir / "report.md").read_text()
    for claim in results["claims"]:
        assert claim["claim"] in text and claim["measured"] in text
    for name in ("coverage", "width", "coverage_error", "levels"):
        assert (workdir / "figures" / f"{name}.png").stat().st_size > 10_000


def test_a_claim_that_does_not_hold_is_reported(outcome):
    results = dict(outcome[0], lowest_clopper_pearson={"3": -0.01})
    held = {c["claim"]: c["holds"] for c in small_sample_report.claims(results)}
    assert not next(holds for claim, holds in held.items() if "Clopper" in claim)


def test_clustered_data_have_the_model_mean_and_variance():
    rng = np.random.default_rng(0)
    theta, spread = np.array([0.3, 0.7]), np.array([0.05, 4.0])
    y = simulation.clustered_questions(rng, theta, spread, 50, 4, 2000).reshape(2, -1)
    np.testing.assert_allclose(y.mean(1), 4 * theta, atol=0.02)
    # Beta-binomial variance: n p (1 - p) (1 + (n - 1) / (d + 1)).
    expected = 4 * theta * (1 - theta) * (1 + 3 / (spread + 1))
    np.testing.assert_allclose(y.var(1), expected, rtol=0.02)


def test_paired_data_have_the_model_accuracies():
    rng = np.random.default_rng(0)
    cells = simulation.paired_questions(rng, np.array([0.8]), np.array([0.4]), 50_000, 4)[0]
    assert (cells[:, :2].sum(-1) / 50_000).mean() == pytest.approx(0.8, abs=0.01)
    assert (cells[:, [0, 2]].sum(-1) / 50_000).mean() == pytest.approx(0.4, abs=0.01)


def test_same_seed_same_numbers():
    config = config_files.resolve("small_sample_stats", SMALL).config
    alphas, key = np.array(config.alphas), jax.random.key(1)
    runs = [
        small_sample_stats.paired(config.paired, alphas, 3, np.random.default_rng(1), key)
        for _ in range(2)
    ]
    for name, ends in runs[0][0].items():
        assert np.array_equal(ends, runs[1][0][name]), name
