"""Two models on different draws of questions: differences, odds ratios, tests.

Source: Bowyer, Aitchison and Ivanova, arXiv:2503.01747, section 5. Counts kA of NA and kB of NB
broadcast against each other; intervals are [..., A, 2].
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, PRNGKeyArray
from scipy import special, stats

from jaxllm.evaluation.statistics import proportions
from jaxllm.evaluation.statistics.special import (
    Alphas,
    binary,
    counts,
    draw_betas,
    generator,
    normal_interval,
    quantiles,
    uniforms,
)


class OddsRatio(NamedTuple):
    """Conditional maximum-likelihood odds ratio (0 to infinity) and its exact interval."""

    estimate: np.ndarray
    interval: np.ndarray


def difference_clt(
    k_a: Any, n_a: Any, k_b: Any, n_b: Any, alphas: Alphas = 0.05
) -> Float[np.ndarray, "... A 2"]:
    """p_A - p_B +- z sqrt(p_A (1 - p_A) / N_A + p_B (1 - p_B) / N_B)."""
    (k_a, n_a), (k_b, n_b) = counts(k_a, n_a, "k_a"), counts(k_b, n_b, "k_b")
    p_a, p_b = k_a / n_a, k_b / n_b
    variance = p_a * (1 - p_a) / n_a + p_b * (1 - p_b) / n_b
    return normal_interval(p_a - p_b, np.sqrt(variance), alphas)


def difference_newcombe(
    k_a: Any, n_a: Any, k_b: Any, n_b: Any, alphas: Alphas = 0.05
) -> Float[np.ndarray, "... A 2"]:
    """Newcombe's hybrid score interval of p_A - p_B, from Wilson's of each (Stat. Med. 1998)."""
    (k_a, n_a), (k_b, n_b) = counts(k_a, n_a, "k_a"), counts(k_b, n_b, "k_b")
    p_a, p_b = (k_a / n_a)[..., None], (k_b / n_b)[..., None]
    low_a, high_a = np.moveaxis(proportions.wilson(k_a, n_a, alphas), -1, 0)
    low_b, high_b = np.moveaxis(proportions.wilson(k_b, n_b, alphas), -1, 0)
    difference = p_a - p_b
    lower = difference - np.hypot(p_a - low_a, high_b - p_b)
    upper = difference + np.hypot(high_a - p_a, p_b - low_b)
    return np.stack([lower, upper], axis=-1)


def posterior_draws(
    key: PRNGKeyArray,
    k_a: Any,
    n_a: Any,
    k_b: Any,
    n_b: Any,
    *,
    prior: tuple[float, float] = proportions.UNIFORM,
    num_samples: int = 10_000,
) -> tuple[Float[np.ndarray, "... S"], Float[np.ndarray, "... S"]]:
    """Draws of (theta_A, theta_B) from their Beta posteriors; all rows share the random numbers."""
    (k_a, n_a), (k_b, n_b) = counts(k_a, n_a, "k_a"), counts(k_b, n_b, "k_b")
    draws = uniforms(key, (2, num_samples))
    a, b = prior
    return (
        draw_betas(draws[0], a + k_a, b + n_a - k_a),
        draw_betas(draws[1], a + k_b, b + n_b - k_b),
    )


def difference_posterior(
    key: PRNGKeyArray,
    k_a: Any,
    n_a: Any,
    k_b: Any,
    n_b: Any,
    alphas: Alphas = 0.05,
    *,
    prior: tuple[float, float] = proportions.UNIFORM,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Credible interval of theta_A - theta_B."""
    theta_a, theta_b = posterior_draws(
        key, k_a, n_a, k_b, n_b, prior=prior, num_samples=num_samples
    )
    return quantiles(theta_a - theta_b, alphas)


def odds_ratio_posterior(
    key: PRNGKeyArray,
    k_a: Any,
    n_a: Any,
    k_b: Any,
    n_b: Any,
    alphas: Alphas = 0.05,
    *,
    prior: tuple[float, float] = proportions.UNIFORM,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Credible interval of theta_A / (1 - theta_A) over theta_B / (1 - theta_B)."""
    theta_a, theta_b = posterior_draws(
        key, k_a, n_a, k_b, n_b, prior=prior, num_samples=num_samples
    )
    # Interpolated on the log scale: the ratio spans many orders of magnitude.
    return np.exp(quantiles(special.logit(theta_a) - special.logit(theta_b), alphas))


def probability_greater(
    k_a: Any, n_a: Any, k_b: Any, n_b: Any, *, prior: tuple[float, float] = proportions.UNIFORM
) -> Float[np.ndarray, ...]:
    """P(theta_A > theta_B | data), exact for whole posterior parameters of A.

    Otherwise by 2,000 Gauss-Legendre nodes over the quantiles of theta_A.
    """
    (k_a, n_a), (k_b, n_b) = counts(k_a, n_a, "k_a"), counts(k_b, n_b, "k_b")
    k_a, n_a, k_b, n_b = np.broadcast_arrays(k_a, n_a, k_b, n_b)
    a, b = prior
    a_a, b_a, a_b, b_b = (v[..., None] for v in (a + k_a, b + n_a - k_a, a + k_b, b + n_b - k_b))
    if np.all(a_a == np.round(a_a)):
        i = np.arange(a_a.max())
        terms = (
            special.betaln(a_b + i, b_a + b_b)
            - np.log(b_a + i)
            - special.betaln(1 + i, b_a)
            - special.betaln(a_b, b_b)
        )
        return np.where(i < a_a, np.exp(terms), 0.0).sum(-1)
    nodes, weights = np.polynomial.legendre.leggauss(2000)
    theta_a = special.betaincinv(a_a, b_a, (nodes + 1) / 2)
    return special.betainc(a_b, b_b, theta_a) @ weights / 2


def odds_ratio_fisher(k_a: Any, n_a: Any, k_b: Any, n_b: Any, alphas: Alphas = 0.05) -> OddsRatio:
    """Fisher's conditional odds ratio, by inverting the noncentral hypergeometric distribution.

    Where a margin is degenerate (all right or all wrong) the estimate is NaN and the interval
    (0, inf).
    """
    levels = np.atleast_1d(alphas)
    cells = _cells(k_a, n_a, k_b, n_b)
    shape = cells[0].shape
    estimates = np.empty(shape)
    intervals = np.empty((*shape, len(levels), 2))
    for index in np.ndindex(shape):
        table = np.array([cell[index] for cell in cells], dtype=np.int64).reshape(2, 2)
        result = stats.contingency.odds_ratio(table, kind="conditional")
        estimates[index] = result.statistic
        intervals[index] = [result.confidence_interval(1 - alpha) for alpha in levels]
    return OddsRatio(estimates, intervals)


Test = Literal["fisher", "barnard", "boschloo", "welch", "z"]


def p_value_greater(k_a: Any, n_a: Any, k_b: Any, n_b: Any, test: Test) -> Float[np.ndarray, ...]:
    """One-sided p-values of "A is not better than B".

    Args:
      k_a, n_a, k_b, n_b: right answers and questions of each.
      test: "fisher", "barnard" and "boschloo" are exact (the latter two get slow beyond some
        hundred questions), "welch" is the t-test, "z" the pooled two-sample test.
    """
    exact = {
        "fisher": lambda table: stats.fisher_exact(table, alternative="greater").pvalue,
        "barnard": lambda table: stats.barnard_exact(table, alternative="greater").pvalue,
        "boschloo": lambda table: stats.boschloo_exact(table, alternative="greater").pvalue,
    }
    right_a, wrong_a, right_b, wrong_b = cells = _cells(k_a, n_a, k_b, n_b)
    if test in exact:
        # Columns are the models, rows right and wrong.
        order = (cells[0], cells[2], cells[1], cells[3])
        values = np.empty(cells[0].shape)
        for index in np.ndindex(values.shape):
            table = np.array([cell[index] for cell in order], dtype=np.int64).reshape(2, 2)
            values[index] = exact[test](table)
        return values
    size_a, size_b = right_a + wrong_a, right_b + wrong_b
    p_a, p_b = right_a / size_a, right_b / size_b
    with np.errstate(divide="ignore", invalid="ignore"):
        if test == "z":
            pooled = (right_a + right_b) / (size_a + size_b)
            error = np.sqrt(pooled * (1 - pooled) * (1 / size_a + 1 / size_b))
            return stats.norm.sf((p_a - p_b) / error)
        if test == "welch":
            v_a, v_b = (p * (1 - p) / (size - 1) for p, size in ((p_a, size_a), (p_b, size_b)))
            freedom = (v_a + v_b) ** 2 / (v_a**2 / (size_a - 1) + v_b**2 / (size_b - 1))
            return stats.t.sf((p_a - p_b) / np.sqrt(v_a + v_b), freedom)
    raise ValueError(f"test={test!r} must be one of {[*exact, 'welch', 'z']}.")


def bootstrap_bca(
    key: PRNGKeyArray,
    x_a: Float[np.ndarray, " NA"],
    x_b: Float[np.ndarray, " NB"],
    alpha: float = 0.05,
    *,
    statistic: Literal["difference", "odds_ratio"] = "difference",
    num_samples: int = 10_000,
) -> Float[np.ndarray, " 2"]:
    """BCa bootstrap of the difference or odds ratio of two accuracies; NaN where it is degenerate.

    The odds ratio clips accuracies to [1e-9, 1 - 1e-9].
    """

    def difference(a, b, axis):
        return a.mean(axis) - b.mean(axis)

    def odds_ratio(a, b, axis):
        p_a, p_b = (np.clip(x.mean(axis), 1e-9, 1 - 1e-9) for x in (a, b))
        return np.exp(special.logit(p_a) - special.logit(p_b))

    functions = {"difference": difference, "odds_ratio": odds_ratio}
    if statistic not in functions:
        raise ValueError(f"statistic={statistic!r} must be one of {list(functions)}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate data: the result is NaN, as documented
        interval = stats.bootstrap(
            (binary(x_a, "x_a"), binary(x_b, "x_b")),
            functions[statistic],
            vectorized=True,
            n_resamples=num_samples,
            confidence_level=1 - alpha,
            method="BCa",
            rng=generator(key),
        ).confidence_interval
    return np.array(interval)


def _cells(k_a, n_a, k_b, n_b) -> tuple[np.ndarray, ...]:
    """Right and wrong answers of A, then of B, broadcast."""
    (k_a, n_a), (k_b, n_b) = counts(k_a, n_a, "k_a"), counts(k_b, n_b, "k_b")
    return tuple(np.broadcast_arrays(k_a, n_a - k_a, k_b, n_b - k_b))
