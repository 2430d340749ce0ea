"""Coverage of error bars for small evaluations: how often each interval holds the true value.

For five settings (one accuracy, clustered questions, two models on different and on the same
questions, F1) data are simulated from the generative model, every method makes its interval, and
the share that holds the truth is compared with the level.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm

from experiments import small_sample_report
from jaxllm.evaluation import statistics
from jaxllm.evaluation.statistics import simulation

Intervals = dict[str, np.ndarray]


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Simulates all settings and writes the report.

    Returns:
      {"settings": {setting: {size: {method: coverage, error and width a level}}}, "claims": ...}.
    """
    settings: dict[str, Callable[..., tuple[Intervals, np.ndarray]]] = {
        "independent": one_accuracy,
        "clustered": clustered,
        "comparison": comparison,
        "paired": paired,
        "f1": f1,
    }
    work = [(name, size) for name in settings for size in config[name].sizes]
    coverage: dict[str, Any] = {name: {} for name in settings}
    for number, (name, size) in enumerate(tqdm.tqdm(work, unit="setting", disable=None)):
        rng = np.random.default_rng([config.seed, number])
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        intervals, truth = settings[name](config[name], np.array(config.alphas), size, rng, key)
        coverage[name][str(size)] = {
            method: vars(simulation.measure_coverage(ends, truth))
            for method, ends in intervals.items()
        }
    results = {
        "alphas": list(config.alphas),
        "settings": coverage,
        "lowest_clopper_pearson": lowest_coverage(config),
    }
    results["claims"] = small_sample_report.claims(results)
    small_sample_report.write(workdir, results)
    return results


def lowest_coverage(config: ml_collections.ConfigDict) -> dict[str, float]:
    """Smallest excess of Clopper-Pearson's exact coverage over nominal, over a grid of theta."""
    from scipy import stats

    alphas = np.array(config.alphas)
    theta = np.linspace(0.005, 0.995, 199)
    lowest = {}
    for n in config.independent.sizes:
        k = np.arange(n + 1)
        ends = statistics.clopper_pearson(k, n, alphas)
        inside = (ends[..., 0] <= theta[:, None, None]) & (theta[:, None, None] <= ends[..., 1])
        exact = (stats.binom.pmf(k, n, theta[:, None])[..., None] * inside).sum(1)
        lowest[str(n)] = float((exact - (1 - alphas)).min())
    return lowest


def one_accuracy(config, alphas, n, rng, key):
    """Independent questions: theta ~ U(0, 1)."""
    theta = rng.random(config.parameters)
    k = simulation.independent_questions(rng, theta, n, config.repeats)
    # An interval depends on k alone: each is made once.
    every = np.arange(n + 1)
    outcomes = np.arange(n) < every[:, None]
    table = {
        "CLT": statistics.clt(every, n, alphas),
        "bootstrap": statistics.bootstrap(
            outcomes, alphas, key=key, num_samples=config.num_samples
        ),
        "Wilson": statistics.wilson(every, n, alphas),
        "Clopper-Pearson": statistics.clopper_pearson(every, n, alphas),
        "Bayes": statistics.beta_posterior(every, n, alphas),
        "Bayes (Jeffreys)": statistics.beta_posterior(every, n, alphas, prior=statistics.JEFFREYS),
    }
    return {name: ends[k] for name, ends in table.items()}, theta


def clustered(config, alphas, number, rng, key):
    """`number` clusters of equal size: theta ~ U(0, 1), spread ~ Gamma(1, 1)."""
    theta, spread = rng.random(config.parameters), rng.standard_gamma(1.0, config.parameters)
    size = config.cluster_size
    y = simulation.clustered_questions(rng, theta, spread, number, size, config.repeats)
    n = np.full(number, size)
    x = (np.arange(size) < y[..., None]).reshape(*y.shape[:-1], -1).astype(float)
    labels = np.repeat(np.arange(number), size)
    right, questions = y.sum(-1), number * size
    draws = statistics.clustered_importance(key, y, n, num_samples=config.num_samples)
    boot = {"alphas": alphas, "num_samples": config.bootstrap_samples}
    intervals = {
        "naive CLT": statistics.clt(right, questions, alphas),
        "naive Bayes": statistics.beta_posterior(right, questions, alphas),
        "clustered CLT": statistics.clustered_clt(x, labels, alphas),
        "bootstrap within": statistics.bootstrap_within(key, x, labels, **boot),
        "bootstrap clusters": statistics.bootstrap_cluster(key, x, labels, **boot),
        "clustered Bayes (draws)": draws.interval(alphas),
        "clustered Bayes (grid)": statistics.clustered_grid(
            y, n, alphas, points=config.grid_points
        )[0],
    }
    return intervals, theta


def comparison(config, alphas, n, rng, key):
    """Two models on different questions: both accuracies ~ U(0, 1)."""
    theta_a, theta_b = rng.random((2, config.parameters))
    k_a, k_b = (
        simulation.independent_questions(rng, theta, n, config.repeats)
        for theta in (theta_a, theta_b)
    )
    sides = (k_a, n, k_b, n)
    intervals = {
        "CLT": statistics.difference_clt(*sides, alphas),
        "Newcombe": statistics.difference_newcombe(*sides, alphas),
        "Bayes": statistics.difference_posterior(
            key, *sides, alphas, num_samples=config.num_samples
        ),
    }
    if n in config.bca_sizes:
        intervals["bootstrap (BCa)"] = _once_each(
            np.stack([k_a, k_b], axis=-1),
            alphas,
            lambda pair, alpha: statistics.bootstrap_bca(
                key,
                np.arange(n) < pair[0],
                np.arange(n) < pair[1],
                alpha,
                num_samples=config.bca_samples,
            ),
        )
    return intervals, theta_a - theta_b


def paired(config, alphas, n, rng, key):
    """Two models on the same questions: latent normal pairs."""
    theta_a, theta_b = rng.random((2, config.parameters))
    cells = simulation.paired_questions(rng, theta_a, theta_b, n, config.repeats)
    edges = np.cumsum(cells, axis=-1)[..., None, :]
    cell = (np.arange(n)[:, None] >= edges).sum(-1)
    a, b = (cell <= 1).astype(float), ((cell == 0) | (cell == 2)).astype(float)
    sides = (a.sum(-1), n, b.sum(-1), n)
    options = {"num_samples": config.num_samples}
    intervals = {
        "CLT unpaired": statistics.difference_clt(*sides, alphas),
        "CLT paired": statistics.paired_clt(a, b, alphas),
        "bootstrap paired": statistics.paired_bootstrap(
            key, a, b, alphas, num_samples=config.bootstrap_samples
        ),
        "Bayes unpaired": statistics.difference_posterior(key, *sides, alphas, **options),
        "Bayes paired (prior draws)": statistics.paired_posterior(
            key, cells, proposal="prior", **options
        ).interval(alphas),
        "Bayes paired": statistics.paired_posterior(key, cells, **options).interval(alphas),
        "Dirichlet": statistics.paired_dirichlet(key, cells, alphas, **options),
    }
    return intervals, theta_a - theta_b


def f1(config, alphas, n, rng, key):
    """F1 of a confusion matrix whose cell probabilities are Dirichlet(1, 1, 1, 1)."""
    probabilities = rng.dirichlet(np.ones(4), config.parameters)
    counts = simulation.multinomial(rng, probabilities, n, config.repeats)
    intervals = {
        "Bayes": statistics.metric_posterior(
            key, counts, statistics.f1, alphas, num_samples=config.num_samples
        )
    }
    if n in config.bca_sizes:
        intervals["bootstrap (BCa)"] = _once_each(
            counts,
            alphas,
            lambda cells, alpha: statistics.metric_bootstrap(
                key, cells, statistics.f1, alpha, num_samples=config.bca_samples
            ),
        )
    return intervals, statistics.f1(probabilities)


def _once_each(data: np.ndarray, alphas: np.ndarray, method: Callable[..., Any]) -> np.ndarray:
    """method(row, alpha) -> [2] for each different row of data [P, R, C], as [P, R, A, 2]."""
    rows, inverse = np.unique(data.reshape(-1, data.shape[-1]), axis=0, return_inverse=True)
    table = np.array([[method(row, float(alpha)) for alpha in alphas] for row in rows])
    return table[inverse.reshape(data.shape[:-1])]
