"""Two models on the same questions.

Bayesian model (Bowyer, Aitchison and Ivanova, arXiv:2503.01747, section 5): each question has a
latent normal pair with means Phi^-1(theta_A), Phi^-1(theta_B) and correlation rho; a model is right
where its coordinate is positive. theta_A, theta_B ~ U(0, 1), (rho + 1) / 2 ~ Beta(4, 2).

Only four counts matter: S both right, T only A, U only B, V both wrong.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from scipy import special, stats

from jaxllm.evaluation.statistics.clustered import Weighted
from jaxllm.evaluation.statistics.proportions import bootstrap
from jaxllm.evaluation.statistics.special import (
    Alphas,
    binary,
    bivariate_normal_cdf,
    dirichlet,
    effective_sample_size,
    in_float64,
    normal_interval,
    quantiles,
    uniforms,
)

RHO_PRIOR = (4.0, 2.0)
MIN_EFFECTIVE = 200


def paired_counts(x_a: Any, x_b: Any) -> Int[np.ndarray, "... 4"]:
    """(S, T, U, V) of outcomes [..., N].

    Raises:
      ValueError: different numbers of questions, or values other than 0 and 1.
    """
    x_a, x_b = binary(x_a, "x_a"), binary(x_b, "x_b")
    if x_a.shape[-1] != x_b.shape[-1]:
        raise ValueError(
            f"x_a has {x_a.shape[-1]} questions and x_b {x_b.shape[-1]}: they must be the same."
        )
    cells = (x_a * x_b, x_a * (1 - x_b), (1 - x_a) * x_b, (1 - x_a) * (1 - x_b))
    return np.stack([cell.sum(-1) for cell in cells], axis=-1).astype(np.int64)


def paired_clt(x_a: Any, x_b: Any, alphas: Alphas = 0.05) -> Float[np.ndarray, "... A 2"]:
    """Mean of d_i = a_i - b_i +- z sqrt(sum (d_i - mean)^2 / (N (N - 1))); any values."""
    difference = np.asarray(x_a, np.float64) - np.asarray(x_b, np.float64)
    size = difference.shape[-1]
    if size < 2:
        raise ValueError("the paired interval needs at least 2 questions.")
    error = difference.std(-1, ddof=1) / np.sqrt(size)
    return normal_interval(difference.mean(-1), error, alphas)


def paired_bootstrap(
    key: PRNGKeyArray, x_a: Any, x_b: Any, alphas: Alphas = 0.05, *, num_samples: int = 10_000
) -> Float[np.ndarray, "... A 2"]:
    """Percentile bootstrap of the differences."""
    difference = np.asarray(x_a, np.float64) - np.asarray(x_b, np.float64)
    return bootstrap(difference, alphas, key=key, num_samples=num_samples)


def paired_posterior(
    key: PRNGKeyArray,
    cells: Int[np.ndarray, "... 4"],
    *,
    num_samples: int = 10_000,
    proposal: Literal["auto", "prior", "posterior"] = "auto",
) -> Weighted:
    """Posterior of theta_A - theta_B by importance sampling.

    Args:
      key: for the draws, which rows with the prior as proposal share.
      cells: (S, T, U, V).
      num_samples: draws.
      proposal: where theta_A and theta_B are drawn from: "prior" (the paper's choice), which wastes
        nearly all draws beyond some hundred questions, "posterior" (each model's own Beta
        posterior), or "auto": the prior, and the posterior for the rows with an effective size
        below 200.
    """
    cells = _check_cells(cells)
    if proposal not in ("auto", "prior", "posterior"):
        raise ValueError(f"proposal={proposal!r} must be 'auto', 'prior' or 'posterior'.")
    draws = uniforms(key, (3, num_samples))
    rho = 2 * special.betaincinv(*RHO_PRIOR, draws[2]) - 1
    flat = cells.reshape(-1, 4)
    if proposal == "posterior":
        rows = [_from_posterior(draws[0], draws[1], rho, row) for row in flat]
        values, logs = (np.stack(part) for part in zip(*rows, strict=True))
    else:
        logs = log_likelihood(draws[0], draws[1], rho, flat)
        values = np.broadcast_to(draws[0] - draws[1], logs.shape)
        weak = np.flatnonzero(effective_sample_size(logs) < MIN_EFFECTIVE)
        if proposal == "auto" and len(weak):
            values = values.copy()
            for row in weak:
                values[row], logs[row] = _from_posterior(draws[0], draws[1], rho, flat[row])
    shape = (*cells.shape[:-1], num_samples)
    return Weighted(values.reshape(shape), logs.reshape(shape))


def _from_posterior(u_a, u_b, rho, row):
    """Differences and log weights with Beta posteriors of the single models as proposal."""
    both, only_a, only_b, neither = row
    a_a, b_a = 1 + both + only_a, 1 + only_b + neither
    a_b, b_b = 1 + both + only_b, 1 + only_a + neither
    theta_a, theta_b = special.betaincinv(a_a, b_a, u_a), special.betaincinv(a_b, b_b, u_b)
    density = stats.beta.logpdf(theta_a, a_a, b_a) + stats.beta.logpdf(theta_b, a_b, b_b)
    return theta_a - theta_b, log_likelihood(theta_a, theta_b, rho, row[None])[0] - density


def log_likelihood(
    theta_a: Float[np.ndarray, " S"],
    theta_b: Float[np.ndarray, " S"],
    rho: Float[np.ndarray, " S"],
    cells: Int[np.ndarray, "... 4"],
) -> Float[np.ndarray, "... S"]:
    """S ln theta_S + T ln theta_T + U ln theta_U + V ln theta_V for each draw."""
    logs = _log_cells(theta_a, theta_b, rho)
    # An empty cell counts nothing even where its probability is 0 (log = -inf).
    logs = np.maximum(logs, np.finfo(np.float64).min / 1e9)
    return np.asarray(cells, np.float64) @ logs


def cell_probabilities(
    theta_a: Float[np.ndarray, ...],
    theta_b: Float[np.ndarray, ...],
    rho: Float[np.ndarray, ...],
) -> Float[np.ndarray, "4 ..."]:
    """Probabilities of (S, T, U, V) for one question."""
    return np.exp(_log_cells(theta_a, theta_b, rho))


@in_float64
@jax.jit
def _log_cells(theta_a, theta_b, rho):
    theta_a, theta_b, rho = jnp.broadcast_arrays(theta_a, theta_b, rho)
    quantile = jax.scipy.stats.norm.ppf
    neither = bivariate_normal_cdf(-quantile(theta_a), -quantile(theta_b), rho)
    cells = (theta_a + theta_b + neither - 1, 1 - theta_b - neither, 1 - theta_a - neither, neither)
    return jnp.log(jnp.maximum(jnp.stack(cells), 0))


def paired_dirichlet(
    key: PRNGKeyArray,
    cells: Int[np.ndarray, "... 4"],
    alphas: Alphas = 0.05,
    *,
    num_samples: int = 10_000,
) -> Float[np.ndarray, "... A 2"]:
    """Interval of theta_A - theta_B = p_T - p_U under Dirichlet(1, 1, 1, 1) on the four cells."""
    draws = dirichlet(key, 1.0 + _check_cells(cells), num_samples)
    return quantiles(draws[..., 1] - draws[..., 2], alphas)


def mcnemar(cells: Int[np.ndarray, "... 4"]) -> Float[np.ndarray, ...]:
    """Two-sided p-value of the exact McNemar test: T of T + U at probability 1/2."""
    checked = _check_cells(cells)
    only_a, only_b = checked[..., 1], checked[..., 2]
    tail = stats.binom.cdf(np.minimum(only_a, only_b), only_a + only_b, 0.5)
    return np.minimum(1.0, 2 * tail)


def _check_cells(cells: Any) -> np.ndarray:
    cells = np.asarray(cells)
    if cells.shape[-1:] != (4,) or not np.all(cells >= 0) or not np.all(cells == np.round(cells)):
        raise ValueError("cells must be four whole numbers (S, T, U, V) along the last axis.")
    return cells.astype(np.int64)
