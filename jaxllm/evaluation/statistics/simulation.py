"""Data from the generative models behind the intervals, and how often an interval holds the truth.

Source: Bowyer, Aitchison and Ivanova (arXiv:2503.01747): coverage is averaged over parameters drawn
from the prior and repeats of each. Letters: P parameters, R repeats, N questions, A levels.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from jaxllm.evaluation.statistics.paired import RHO_PRIOR, cell_probabilities


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How a method does at each level.

    Attributes:
      coverage: [A] share of intervals that hold the truth.
      error: [A] its Monte-Carlo standard error, over parameters (repeats share theirs).
      width: [A] mean width.
    """

    coverage: np.ndarray
    error: np.ndarray
    width: np.ndarray


def measure_coverage(
    intervals: Float[np.ndarray, "P R A 2"], truth: Float[np.ndarray, " P"]
) -> Coverage:
    """Coverage and width; an interval that is NaN misses, and its width is left out."""
    target = np.asarray(truth)[:, None, None]
    with np.errstate(invalid="ignore"):
        inside = (intervals[..., 0] <= target) & (target <= intervals[..., 1])
    by_parameter = inside.mean(1)
    widths = intervals[..., 1] - intervals[..., 0]
    number = len(by_parameter)
    return Coverage(
        coverage=by_parameter.mean(0),
        error=by_parameter.std(0, ddof=1) / number**0.5,
        width=np.nanmean(np.where(np.isfinite(widths), widths, np.nan), axis=(0, 1)),
    )


def independent_questions(
    rng: np.random.Generator, theta: Float[np.ndarray, " P"], n: int, repeats: int
) -> Int[np.ndarray, "P R"]:
    """Right answers of n: Binomial(n, theta)."""
    return rng.binomial(n, np.asarray(theta)[:, None], (len(theta), repeats))


def clustered_questions(
    rng: np.random.Generator,
    theta: Float[np.ndarray, " P"],
    spread: Float[np.ndarray, " P"],
    clusters: int,
    size: int,
    repeats: int,
) -> Int[np.ndarray, "P R T"]:
    """Right answers of each of T clusters of `size` questions."""
    a, b = (np.maximum(v, 1e-300)[:, None, None] for v in (spread * theta, spread * (1 - theta)))
    shape = (len(theta), repeats, clusters)
    # Beta as a ratio of Gammas on the log scale: a small spread underflows otherwise.
    logs = [
        np.log(rng.standard_gamma(np.broadcast_to(c + 1, shape))) + np.log(rng.random(shape)) / c
        for c in (a, b)
    ]
    rate = 1 / (1 + np.exp(np.clip(logs[1] - logs[0], -700, 700)))
    return rng.binomial(size, rate)


def paired_questions(
    rng: np.random.Generator,
    theta_a: Float[np.ndarray, " P"],
    theta_b: Float[np.ndarray, " P"],
    n: int,
    repeats: int,
) -> Int[np.ndarray, "P R 4"]:
    """(both right, only A, only B, both wrong) of n questions, the correlation from its prior."""
    rho = 2 * rng.beta(*RHO_PRIOR, len(theta_a)) - 1
    cells = np.clip(cell_probabilities(theta_a, theta_b, rho).T, 0, None)
    return multinomial(rng, cells / cells.sum(-1, keepdims=True), n, repeats)


def multinomial(
    rng: np.random.Generator, cells: Float[np.ndarray, "P C"], n: int, repeats: int
) -> Int[np.ndarray, "P R C"]:
    """Counts of n items over C cells."""
    return rng.multinomial(n, cells[:, None], (len(cells), repeats))
