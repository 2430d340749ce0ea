"""Intervals against numbers made with the authors' functions, statsmodels and SciPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxllm.evaluation import statistics
from jaxllm.evaluation.statistics import clustered, paired

EXACT = 1e-9


@pytest.fixture
def numbers(golden):
    return lambda name: golden(f"small_sample_stats/{name}")


def close(ours, theirs, tolerance=EXACT):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def levels_first(intervals):
    return np.moveaxis(intervals, -2, 0)


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("clt", statistics.clt, {}),
        ("wilson", statistics.wilson, {}),
        ("clopper_pearson", statistics.clopper_pearson, {}),
        ("bayes_uniform", statistics.beta_posterior, {}),
        ("bayes_jeffreys", statistics.beta_posterior, {"prior": statistics.JEFFREYS}),
    ],
)
def test_one_accuracy(numbers, name, method, options):
    stored = numbers("iid_intervals")
    close(method(stored["k"], stored["n"], stored["alphas"], **options), stored[name])


def test_bootstrap_given_the_resamples(numbers):
    stored = numbers("bootstrap")
    ours = statistics.bootstrap(stored["data"], stored["alphas"], indices=stored["indices"])
    close(levels_first(ours), stored["intervals"])


def test_clustered_standard_error(numbers):
    stored = numbers("clustered")
    ours = statistics.clustered_clt(stored["flat"], stored["cluster"], stored["alphas"])
    close(levels_first(ours), stored["clt_clustered"])
    y, n = statistics.cluster_sums(stored["flat"], stored["cluster"])
    assert np.array_equal(y, stored["successes"])
    assert np.array_equal(n, stored["sizes"])


def test_clustered_likelihood(numbers):
    stored = numbers("clustered")
    for row in range(5):
        ours = clustered.log_likelihood(
            stored["is_theta"][row], stored["is_d"][row], stored["successes"][row], stored["sizes"]
        )
        theirs = stored["is_logw"][row]
        # Constants of the data do not matter to a weight.
        close(ours - ours[0], theirs - theirs[0], 1e-8)


def test_clustered_posterior(numbers):
    stored = numbers("clustered")
    y, n, alphas = stored["successes"], stored["sizes"], stored["alphas"]
    interval, mean = statistics.clustered_grid(y, n, alphas)
    close(interval, stored["quad_interval"], 2e-3)
    close(mean, stored["quad_mean"], 2e-3)
    draws = statistics.clustered_importance(jax.random.key(0), y, n)
    close(levels_first(draws.interval(alphas)), stored["is_interval_authors"], 0.03)
    close(draws.mean(), stored["is_posterior_mean"], 0.02)
    np.testing.assert_allclose(draws.effective_size(), stored["is_ess"], rtol=0.1)


def test_independent_comparison(numbers):
    stored = numbers("independent_comparison")
    sides = (stored["kA"], stored["N"], stored["kB"], stored["N"])
    close(statistics.difference_clt(*sides)[:, 0], stored["clt_diff"])
    close(statistics.difference_newcombe(*sides)[:, 0], stored["newcombe_diff"])
    close(statistics.probability_greater(*sides), stored["prob_A_greater"])
    close(statistics.p_value_greater(*sides, "fisher"), stored["fisher_greater"])
    odds = statistics.odds_ratio_fisher(*sides)
    ours = np.column_stack([odds.estimate, odds.interval[:, 0]])
    np.testing.assert_allclose(ours, stored["odds_ratio_conditional"], rtol=1e-9)


@pytest.mark.parametrize("test", ["boschloo", "barnard"])
def test_unconditional_tests(numbers, test):
    stored = numbers("independent_comparison")
    small = np.flatnonzero(stored["N"] <= 10)
    n, k_a, k_b = (stored[name][small] for name in ("N", "kA", "kB"))
    close(statistics.p_value_greater(k_a, n, k_b, n, test), stored[f"{test}_greater"][small], 1e-3)


def test_paired(numbers):
    stored = numbers("paired")
    a, b, alphas = stored["data_A"], stored["data_B"], stored["alphas"]
    cells = statistics.paired_counts(a, b)
    assert np.array_equal(cells, np.stack([stored[name] for name in "STUV"], axis=-1))
    close(levels_first(statistics.paired_clt(a, b, alphas)), stored["clt_paired"])
    unpaired = statistics.difference_clt(a.sum(-1), 25, b.sum(-1), 25, alphas)
    close(levels_first(unpaired), stored["clt_unpaired"])
    draws = statistics.paired_posterior(jax.random.key(1), cells)
    assert draws.effective_size().min() > 200
    close(levels_first(draws.interval(alphas)), stored["is_interval_authors_mean5"], 0.03)


def test_latent_normal_cells(numbers):
    stored = numbers("paired")
    draws = (stored["bvn_thetaA"], stored["bvn_thetaB"], stored["bvn_rho"])
    neither = statistics.cell_probabilities(*draws)[3]
    close(neither, stored["bvn_cdf_exact"])
    # The authors' closed form is an approximation.
    assert 1e-5 < np.abs(neither - stored["bvn_cdf_authors_approx"]).max() < 1e-3
    row = statistics.paired_counts(stored["data_A"][0], stored["data_B"][0])
    close(paired.log_likelihood(*draws, row), stored["loglik_row0"])


def test_f1(numbers):
    stored = numbers("f1")
    counts = stored["confusion_tp_fp_fn_tn"]
    close(statistics.f1(counts), stored["f1"])
    close(statistics.f1(stored["dirichlet_draws_first200"]), stored["f1_of_draws_first200"])
    ours = statistics.metric_posterior(jax.random.key(0), counts, num_samples=100_000)
    close(ours[:, 0], stored["interval_mc"][:, [0, 2]], 6e-3)
