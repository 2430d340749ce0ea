"""The interval of a reported number: one function for a metric, one for a comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from jaxllm.evaluation.statistics import clustered, independent, paired, proportions
from jaxllm.evaluation.statistics.special import tails


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
      value: the plain mean (or difference of means).
      lower, upper: ends of the interval. They need not contain the mean: at 20 of 20 right an
        equal-tailed interval ends below 1.
      method: how the interval was made.
      size: questions behind it.
      probability_greater: of a comparison: P(A better than B).
    """

    value: float
    lower: float
    upper: float
    method: str
    size: int
    probability_greater: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


def report_mean(
    values: Float[np.ndarray, " N"],
    clusters: Int[np.ndarray, " N"] | None = None,
    *,
    alpha: float = 0.05,
) -> Estimate:
    """Mean over questions with an interval that suits the values.

    Zeros and ones: the Beta(1, 1) posterior, or with clusters that of the clustered model. Other
    values: Student's t, with T clusters from their sums and T - 1 degrees of freedom.

    Args:
      values: one a question.
      clusters: label of the source of each question (document, problem); None = independent.
      alpha: one minus the level.

    Raises:
      ValueError: no values, values that are not finite, or labels that do not fit.
    """
    values = _finite(values, "values")
    size = len(values)
    mean = float(values.mean())
    if clusters is not None and len(np.unique(clusters)) == size:
        clusters = None
    if set(np.unique(values)) <= {0.0, 1.0}:
        if clusters is None:
            interval = proportions.beta_posterior(values.sum(), size, alpha)[0].tolist()
            return Estimate(mean, interval[0], interval[1], "Beta posterior", size)
        y, n = clustered.cluster_sums(values, clusters)
        interval = clustered.clustered_grid(y, n, alpha)[0][0].tolist()
        return Estimate(mean, interval[0], interval[1], "clustered posterior", size)
    return dataclasses.replace(_student(values, clusters, alpha), probability_greater=None)


def compare(
    a: Float[np.ndarray, " NA"],
    b: Float[np.ndarray, " NB"],
    *,
    same_questions: bool = True,
    clusters: Int[np.ndarray, " N"] | None = None,
    alpha: float = 0.05,
    seed: int = 0,
) -> Estimate:
    """Difference of two means, A - B, with an interval and P(A > B).

    Zeros and ones: the paired posterior on the same questions, two Beta posteriors on different
    ones. Other values, and clusters: the mean difference as in `report_mean` (on the same
    questions), or Welch's interval.

    Args:
      a, b: values, one a question.
      same_questions: whether a[i] and b[i] belong to the same question.
      clusters: labels of the questions; only with `same_questions`.
      alpha: one minus the level.
      seed: of the Monte-Carlo draws.

    Raises:
      ValueError: lengths that differ on the same questions, clusters on different ones.
    """
    a, b = _finite(a, "a"), _finite(b, "b")
    if same_questions and len(a) != len(b):
        raise ValueError(f"a has {len(a)} questions and b {len(b)}: give same_questions=False.")
    if clusters is not None and not same_questions:
        raise ValueError("clusters need the same questions for both models.")
    difference = float(a.mean() - b.mean())
    zero_one = set(np.unique([*a, *b])) <= {0.0, 1.0}
    key = jax.random.key(seed)
    if same_questions and zero_one and clusters is None:
        draws = paired.paired_posterior(key, paired.paired_counts(a, b))
        ends, greater = draws.interval(alpha)[0].tolist(), float(draws.probability_positive())
        return Estimate(difference, ends[0], ends[1], "paired posterior", len(a), greater)
    if same_questions:
        return _student(a - b, clusters, alpha)
    if zero_one:
        sides = (a.sum(), len(a), b.sum(), len(b))
        ends = independent.difference_posterior(key, *sides, alpha)[0].tolist()
        greater = float(independent.probability_greater(*sides))
        return Estimate(
            difference, ends[0], ends[1], "two Beta posteriors", len(a) + len(b), greater
        )
    result = stats.ttest_ind(a, b, equal_var=False)
    ends = result.confidence_interval(1 - alpha)
    greater = float(stats.t.cdf(result.statistic, result.df))
    return Estimate(difference, ends[0], ends[1], "Welch t", len(a) + len(b), greater)


def _student(values: np.ndarray, clusters: np.ndarray | None, alpha: float) -> Estimate:
    """Student's t interval of a mean, from the sums over clusters; P(mean > 0) beside it."""
    size, mean = len(values), float(values.mean())
    labels = np.arange(size) if clusters is None else clusters
    sums, sizes = clustered.cluster_sums(values - mean, labels)
    groups = len(sizes)
    method = "Student t" if groups == size else "clustered Student t"
    if groups < 2:
        return Estimate(mean, -np.inf, np.inf, method, size)
    # With clusters of one question this is the usual standard error.
    error = np.sqrt((sums**2).sum() * groups / (groups - 1)) / size
    half = stats.t.ppf(tails(alpha)[0, 1], groups - 1) * error
    greater = float(stats.t.cdf(mean / error, groups - 1)) if error else float(mean > 0)
    return Estimate(mean, float(mean - half), float(mean + half), method, size, greater)


def _finite(values: Any, name: str) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{name} must be a vector with a value a question, got {values.shape}.")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{name} must be finite.")
    return values
