"""Intervals of one accuracy where questions come in clusters (several a text, a topic, a problem).

Model (Bowyer, Aitchison and Ivanova, arXiv:2503.01747, section 4): a spread d ~ Gamma(1, 1), an
accuracy theta ~ Beta(1, 1), for every cluster theta_t ~ Beta(d theta, d (1 - theta)), and its y_t
correct answers of N_t are Binomial(N_t, theta_t). The target is theta; small d = strongly
clustered. Integrating theta_t out leaves a beta-binomial likelihood of (theta, d).

Letters: T clusters, N questions, S draws, A levels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from scipy import special

from jaxllm.evaluation.statistics.special import (
    Alphas,
    counts,
    effective_sample_size,
    normal_interval,
    quantiles,
    tails,
    uniforms,
    weighted_quantiles,
)


def cluster_sums(
    x: Float[np.ndarray, "... N"], clusters: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, "... T"], Int[np.ndarray, " T"]]:
    """Sums over the questions of each cluster, and the sizes of the clusters.

    Raises:
      ValueError: the lengths differ.
    """
    x, clusters = np.asarray(x, np.float64), np.asarray(clusters)
    if clusters.shape != x.shape[-1:]:
        raise ValueError(
            f"clusters has shape {clusters.shape}, expected {x.shape[-1:]}: one label a question."
        )
    labels, index = np.unique(clusters, return_inverse=True)
    membership = np.eye(len(labels))[index]
    return x @ membership, membership.sum(0).astype(np.int64)


def clustered_clt(
    x: Float[np.ndarray, "... N"], clusters: Int[np.ndarray, " N"], alphas: Alphas = 0.05
) -> Float[np.ndarray, "... A 2"]:
    """Mean +- z SE with the clustered standard error of Miller (arXiv:2411.00640).

    SE^2 = sum_t (sum_{i in t} x_i - mean)^2 / N^2, for values of any kind; 0 with one cluster.
    """
    x = np.asarray(x, np.float64)
    mean = x.mean(-1)
    residuals, _ = cluster_sums(x - mean[..., None], clusters)
    return normal_interval(mean, np.sqrt((residuals**2).sum(-1)) / x.shape[-1], alphas)


def bootstrap_within(
    key: PRNGKeyArray,
    x: Float[np.ndarray, "... N"],
    clusters: Int[np.ndarray, " N"],
    alphas: Alphas = 0.05,
    *,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Percentile bootstrap that resamples questions inside each cluster: the paper's baseline.

    Clusters count alike. It never resamples clusters, so that the spread between them is missed.
    """
    return _bootstrap(key, x, clusters, alphas, num_samples, resample_clusters=False)


def bootstrap_cluster(
    key: PRNGKeyArray,
    x: Float[np.ndarray, "... N"],
    clusters: Int[np.ndarray, " N"],
    alphas: Alphas = 0.05,
    *,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Percentile bootstrap in two stages: clusters, then questions in each of them.

    The statistic is the mean over all questions drawn.
    """
    return _bootstrap(key, x, clusters, alphas, num_samples, resample_clusters=True)


def _bootstrap(key, x, clusters, alphas, num_samples, *, resample_clusters: bool):
    x = np.asarray(x, np.float64)
    _, sizes = cluster_sums(x, clusters)
    order = np.argsort(np.asarray(clusters), kind="stable")
    starts = np.cumsum(sizes) - sizes
    cluster_key, question_key = jax.random.split(key)
    number = len(sizes)
    chosen = np.broadcast_to(np.arange(number), (num_samples, number))
    if resample_clusters:
        draws = uniforms(cluster_key, (num_samples, number))
        chosen = np.floor(draws * number).astype(np.int64)
    # [K, T, largest cluster]; places beyond a cluster's size are dropped.
    draws = uniforms(question_key, (num_samples, number, int(sizes.max())))
    size = sizes[chosen][..., None]
    picked = order[starts[chosen][..., None] + np.floor(draws * size).astype(np.int64)]
    inside = np.arange(draws.shape[-1]) < size
    share = inside / (inside.sum((1, 2), keepdims=True) if resample_clusters else size * number)
    flat = np.arange(num_samples)[:, None, None] * x.shape[-1] + picked
    weights = np.bincount(flat.ravel(), share.ravel(), minlength=num_samples * x.shape[-1])
    return quantiles(x @ weights.reshape(num_samples, -1).T, alphas)


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Weighted draws of a posterior.

    Attributes:
      values: draws of the quantity of interest, [S] or [..., S].
      log_weights: their log weights [..., S] in any scale.
    """

    values: np.ndarray
    log_weights: np.ndarray

    def interval(self, alphas: Alphas = 0.05) -> Float[np.ndarray, "... A 2"]:
        """Equal-tailed interval."""
        return weighted_quantiles(self.values, self.log_weights, alphas)

    def mean(self) -> Float[np.ndarray, ...]:
        """Posterior mean."""
        return (special.softmax(self.log_weights, axis=-1) * self.values).sum(-1)

    def probability_positive(self) -> Float[np.ndarray, ...]:
        """Posterior probability that the quantity is above 0."""
        return (special.softmax(self.log_weights, axis=-1) * (self.values > 0)).sum(-1)

    def effective_size(self) -> Float[np.ndarray, ...]:
        """How many independent draws these are worth; below some 200 do not trust the interval."""
        return effective_sample_size(self.log_weights)


def clustered_importance(
    key: PRNGKeyArray, y: Any, n: Any, *, num_samples: int = 10_000
) -> Weighted:
    """Posterior of theta by importance sampling from the prior.

    Args:
      key: for the draws, which all rows share.
      y, n: correct answers and questions of each cluster, [..., T]; n = 0 pads.
      num_samples: S.
    """
    draws = uniforms(key, (2, num_samples))
    theta, spread = draws[0], -np.log1p(-draws[1])
    return Weighted(theta, log_likelihood(theta, spread, y, n))


def clustered_grid(
    y: Any, n: Any, alphas: Alphas = 0.05, *, points: int = 400
) -> tuple[Float[np.ndarray, "... A 2"], Float[np.ndarray, ...]]:
    """Equal-tailed interval and mean of theta on a grid: deterministic, and the one to use.

    Midpoints of theta times prior quantiles of d; d is summed out and the distribution function
    interpolated linearly.

    Args:
      y, n: correct answers and questions of each cluster, [..., T]; n = 0 pads.
      alphas: levels.
      points: grid points along each axis.

    Returns:
      (interval, mean).
    """
    middles = (np.arange(points) + 0.5) / points
    theta, spread = (
        grid.ravel() for grid in np.meshgrid(middles, -np.log1p(-middles), indexing="ij")
    )
    edges = np.arange(points + 1) / points
    histogram, table = _likelihood_table(theta, spread, y, n)
    probabilities = tails(alphas)
    rows = histogram.reshape(-1, histogram.shape[-1])
    intervals = np.empty((len(rows), *probabilities.shape))
    means = np.empty(len(rows))
    for row, weights in enumerate(rows):
        logs = table @ weights
        mass = np.exp(logs - logs.max()).reshape(points, points).sum(1)
        mass /= mass.sum()
        distribution = np.concatenate([[0.0], np.cumsum(mass)])
        intervals[row] = np.interp(probabilities, distribution, edges)
        means[row] = mass @ middles
    shape = histogram.shape[:-1]
    return intervals.reshape(*shape, *probabilities.shape), means.reshape(shape)


def log_likelihood(
    theta: Float[np.ndarray, " S"], spread: Float[np.ndarray, " S"], y: Any, n: Any
) -> Float[np.ndarray, "... S"]:
    """sum_t log BetaBinomial(y_t | N_t, d theta, d (1 - theta)) for each of S pairs (theta, d)."""
    histogram, table = _likelihood_table(theta, spread, y, n)
    return histogram @ table.T


def _likelihood_table(theta, spread, y, n) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair (y_t, N_t) occurs [..., U], and its log-likelihood [S, U].

    Clusters of one size have few different counts: the beta functions are evaluated once for each,
    not once a cluster.
    """
    y, n = np.broadcast_arrays(np.asarray(y, np.float64), np.asarray(n, np.float64))
    counts(y, np.maximum(n, 1), "y")
    if not np.all(y <= n):
        raise ValueError("y must not be larger than n.")
    pairs, inverse = np.unique(
        np.stack([y.ravel(), n.ravel()], axis=-1), axis=0, return_inverse=True
    )
    inverse = inverse.reshape(-1, y.shape[-1])
    flat = np.arange(len(inverse))[:, None] * len(pairs) + inverse
    histogram = np.bincount(flat.ravel(), minlength=len(inverse) * len(pairs))
    table = _log_beta_binomial(pairs[:, 0], pairs[:, 1], theta[:, None], spread[:, None])
    return histogram.reshape(*y.shape[:-1], len(pairs)).astype(np.float64), table


def _log_beta_binomial(y, n, theta, spread):
    """log of the beta-binomial probability; 0 where n = 0."""
    # A spread that underflows would make 0 / 0 of an empty cell.
    tiny = np.finfo(np.float64).tiny
    a, b = np.maximum(spread * theta, tiny), np.maximum(spread * (1 - theta), tiny)
    choose = -np.log1p(n) - special.betaln(n - y + 1, y + 1)
    logs = choose + special.betaln(y + a, n - y + b) - special.betaln(a, b)
    return np.where(n == 0, 0.0, logs)
