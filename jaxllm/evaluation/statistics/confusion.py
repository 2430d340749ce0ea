"""Metrics of a confusion matrix (F1 and its kin), which are no averages over questions.

Counts are (TP, FP, FN, TN) along the last axis, with prior Dirichlet(1, 1, 1, 1) (Bowyer, Aitchison
and Ivanova, arXiv:2503.01747, section 6). A metric is any function of these four numbers that
broadcasts over leading axes and does not change when they are scaled.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from scipy import stats

from jaxllm.evaluation.statistics.special import Alphas, dirichlet, generator, quantiles

Metric = Callable[[np.ndarray], np.ndarray]


def _ratio(numerator: Any, denominator: Any) -> np.ndarray:
    """0 where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    out = np.zeros(numerator.shape)
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


def _columns(counts: Any) -> tuple[np.ndarray, ...]:
    counts = np.asarray(counts, np.float64)
    if counts.shape[-1:] != (4,):
        raise ValueError(f"counts have shape {counts.shape}, expected (..., 4): TP, FP, FN, TN.")
    return tuple(np.moveaxis(counts, -1, 0))


def precision(counts: Float[np.ndarray, "... 4"]) -> Float[np.ndarray, ...]:
    """TP / (TP + FP)."""
    tp, fp, _, _ = _columns(counts)
    return _ratio(tp, tp + fp)


def recall(counts: Float[np.ndarray, "... 4"]) -> Float[np.ndarray, ...]:
    """TP / (TP + FN)."""
    tp, _, fn, _ = _columns(counts)
    return _ratio(tp, tp + fn)


def f_beta(counts: Float[np.ndarray, "... 4"], beta: float = 1.0) -> Float[np.ndarray, ...]:
    """(1 + beta^2) P R / (beta^2 P + R); beta = 1 is F1. Does not depend on TN."""
    p, r = precision(counts), recall(counts)
    return _ratio((1 + beta**2) * p * r, beta**2 * p + r)


f1 = functools.partial(f_beta, beta=1.0)


def matthews(counts: Float[np.ndarray, "... 4"]) -> Float[np.ndarray, ...]:
    """Matthews' correlation coefficient."""
    tp, fp, fn, tn = _columns(counts)
    return _ratio(tp * tn - fp * fn, np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))


def kappa(counts: Float[np.ndarray, "... 4"]) -> Float[np.ndarray, ...]:
    """Cohen's kappa."""
    tp, fp, fn, tn = _columns(counts)
    total = tp + fp + fn + tn
    chance = _ratio((tp + fp) * (tp + fn) + (fn + tn) * (fp + tn), total**2)
    return _ratio(_ratio(tp + tn, total) - chance, 1 - chance)


def metric_posterior(
    key: PRNGKeyArray,
    counts: Int[np.ndarray, "... 4"],
    metric: Metric = f1,
    alphas: Alphas = 0.05,
    *,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Credible interval of a metric."""
    draws = dirichlet(key, 1.0 + np.stack(_columns(counts), axis=-1), num_samples)
    return quantiles(metric(draws), alphas)


def metric_bootstrap(
    key: PRNGKeyArray,
    counts: Int[np.ndarray, " 4"],
    metric: Metric = f1,
    alpha: float = 0.05,
    *,
    num_samples: int = 10_000,
) -> Float[np.ndarray, " 2"]:
    """BCa bootstrap over the items behind the counts; NaN where it is degenerate."""
    cells = np.repeat(np.arange(4), np.asarray(counts, np.int64))

    def statistic(items, axis):
        tally = np.stack([(items == cell).sum(axis) for cell in range(4)], axis=-1)
        return metric(tally)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate data: the result is NaN, as documented
        interval = stats.bootstrap(
            (cells,),
            statistic,
            vectorized=True,
            n_resamples=num_samples,
            confidence_level=1 - alpha,
            method="BCa",
            rng=generator(key),
        ).confidence_interval
    return np.array(interval)
