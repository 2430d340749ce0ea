"""Intervals of one accuracy over independent questions.

Outcomes x_i are Bernoulli(theta), k = sum_i x_i of N. All follow Bowyer, Aitchison and Ivanova
(arXiv:2503.01747, section 3): the interval of the central limit theorem is far too narrow below a
few hundred questions, Wilson's and the Bayesian one keep what they promise.

Shapes: counts broadcast; results are [..., A, 2] for A levels alpha, (lower, upper).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from scipy import special

from jaxllm.evaluation.statistics.special import (
    Alphas,
    beta_interval,
    counts,
    normal_interval,
    quantiles,
    tails,
    uniforms,
)

UNIFORM, JEFFREYS = (1.0, 1.0), (0.5, 0.5)


def clt(k: Any, n: Any, alphas: Alphas = 0.05) -> Float[np.ndarray, "... A 2"]:
    """Wald's interval, p +- z sqrt(p (1 - p) / N): not clipped, of width 0 at k = 0 and k = N."""
    k, n = counts(k, n)
    rate = k / n
    return normal_interval(rate, np.sqrt(rate * (1 - rate) / n), alphas)


def wilson(k: Any, n: Any, alphas: Alphas = 0.05) -> Float[np.ndarray, "... A 2"]:
    """Wilson's score interval, clipped to [0, 1]."""
    k, n = (value[..., None] for value in counts(k, n))
    z = special.ndtri(tails(alphas)[:, 1])
    rate = k / n
    shrink = 1 + z**2 / n
    center = (rate + z**2 / (2 * n)) / shrink
    half = z / shrink * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    return np.clip(np.stack([center - half, center + half], axis=-1), 0, 1)


def clopper_pearson(k: Any, n: Any, alphas: Alphas = 0.05) -> Float[np.ndarray, "... A 2"]:
    """The exact interval: never covers less than promised, and mostly more."""
    k, n = (value[..., None] for value in counts(k, n))
    low, high = np.moveaxis(tails(alphas), -1, 0)
    lower = np.where(k == 0, 0.0, special.betaincinv(np.maximum(k, 1), n - k + 1, low))
    upper = np.where(k == n, 1.0, special.betaincinv(k + 1, np.maximum(n - k, 1), high))
    return np.stack([lower, upper], axis=-1)


def beta_posterior(
    k: Any,
    n: Any,
    alphas: Alphas = 0.05,
    *,
    prior: tuple[float, float] = UNIFORM,
    kind: Literal["equal_tailed", "hdi"] = "equal_tailed",
) -> Float[np.ndarray, "... A 2"]:
    """Credible interval of the posterior Beta(a + k, b + N - k).

    Args:
      k, n: successes and questions.
      alphas: levels.
      prior: (a, b); `UNIFORM` or `JEFFREYS`.
      kind: with equal tails, or the shortest ("hdi", highest density). At k = N the equal-tailed
        interval leaves out k / N = 1, as it should.
    """
    k, n = counts(k, n)
    if min(prior) <= 0:
        raise ValueError(f"prior={prior} must be two positive numbers.")
    a, b = prior[0] + k, prior[1] + n - k
    if kind == "equal_tailed":
        return beta_interval(a, b, alphas)
    if kind != "hdi":
        raise ValueError(f"kind={kind!r} must be 'equal_tailed' or 'hdi'.")
    return _shortest(a[..., None], b[..., None], 2 * tails(alphas)[:, 0])


def _shortest(a: np.ndarray, b: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Golden-section search for the lower tail of the shortest interval (the width is convex)."""
    shape = np.broadcast_shapes(a.shape, alpha.shape)
    low, high = np.zeros(shape), np.broadcast_to(alpha, shape).copy()
    ratio = (np.sqrt(5) - 1) / 2

    def ends(tail):
        upper = special.betaincinv(a, b, np.minimum(tail + 1 - alpha, 1.0))
        return special.betaincinv(a, b, tail), upper

    def width(tail):
        lower, upper = ends(tail)
        return upper - lower

    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        goes_left = width(left) <= width(right)
        low, high = np.where(goes_left, low, left), np.where(goes_left, right, high)
    return np.stack(ends((low + high) / 2), axis=-1)


def bootstrap(
    x: Float[np.ndarray, "... N"],
    alphas: Alphas = 0.05,
    *,
    key: PRNGKeyArray | None = None,
    num_samples: int = 10_000,
    indices: Int[np.ndarray, "N K"] | None = None,
) -> Float[np.ndarray, "... A 2"]:
    """Percentile bootstrap of a mean; too narrow for small N, as the central limit theorem is.

    Args:
      x: values of any kind, one a question.
      alphas: levels.
      key: for the resampling; required without `indices`.
      num_samples: K resamples, shared by all rows.
      indices: the resampled questions themselves, one resample a column.
    """
    x = np.asarray(x, np.float64)
    size = x.shape[-1]
    if indices is None:
        if key is None:
            raise ValueError("bootstrap needs a key (jax.random.key(seed)) or indices.")
        indices = np.floor(uniforms(key, (size, num_samples)) * size).astype(np.int64)
    return quantiles(x @ resample_weights(np.asarray(indices), size).T, alphas)


def resample_weights(indices: Int[np.ndarray, "N K"], size: int) -> Float[np.ndarray, "K size"]:
    """How often each resample holds each question, over N: the mean is a product with it."""
    drawn, samples = indices.shape
    flat = (np.arange(samples) * size + indices).ravel()
    return np.bincount(flat, minlength=samples * size).reshape(samples, size) / drawn
