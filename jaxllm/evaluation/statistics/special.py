"""What the intervals are made of: quantiles, normal probabilities, checks of arguments.

Everything is float64: differences of log-beta functions lose all digits in float32 beyond some
thousand questions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy import special

Alphas = float | np.ndarray | list[float] | tuple[float, ...]


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of JAX arrays in float64, whatever the global setting, and leaves that be.

    Results come back as NumPy arrays, which keep float64 outside.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, function(*args, **kwargs))

    return run


def tails(alphas: Alphas) -> np.ndarray:
    """Probabilities [A, 2] of the ends of equal-tailed intervals: alpha / 2 and 1 - alpha / 2.

    Raises:
      ValueError: an alpha outside of (0, 1).
    """
    alphas = np.atleast_1d(np.asarray(alphas, dtype=np.float64))
    if alphas.ndim != 1 or not np.all((alphas > 0) & (alphas < 1)):
        raise ValueError(f"alphas must be one or a vector of numbers in (0, 1), got {alphas}.")
    return np.stack([alphas / 2, 1 - alphas / 2], axis=-1)


def normal_interval(center: Any, standard_error: Any, alphas: Alphas) -> np.ndarray:
    """center +- z standard_error, [..., A, 2]."""
    z = special.ndtri(tails(alphas))
    return np.asarray(center)[..., None, None] + z * np.asarray(standard_error)[..., None, None]


def counts(k: Any, n: Any, name: str = "k") -> tuple[np.ndarray, np.ndarray]:
    """Successes and trials as float64 arrays of one shape.

    Raises:
      ValueError: no trial, or successes that are not whole numbers from 0 to n.
    """
    k, n = np.broadcast_arrays(np.asarray(k, np.float64), np.asarray(n, np.float64))
    if not np.all(n >= 1):
        raise ValueError(f"n must be at least 1 question, got {n.min() if n.size else n}.")
    if not np.all((k >= 0) & (k <= n) & (k == np.round(k))):
        raise ValueError(f"{name} must be whole numbers from 0 to n.")
    return k, n


def binary(x: Any, name: str = "x") -> np.ndarray:
    """Outcomes [..., N] as float64 zeros and ones.

    Raises:
      ValueError: no question, or another value.
    """
    x = np.asarray(x, np.float64)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one question, got shape {x.shape}.")
    if not np.all((x == 0) | (x == 1)):
        raise ValueError(f"{name} must hold only 0 and 1.")
    return x


def beta_interval(a: Any, b: Any, alphas: Alphas) -> np.ndarray:
    """Equal-tailed interval of Beta(a, b), [..., A, 2]."""
    a, b = (np.asarray(value, np.float64)[..., None, None] for value in (a, b))
    return special.betaincinv(a, b, tails(alphas))


def draw_betas(uniforms: np.ndarray, a: Any, b: Any) -> np.ndarray:
    """Draws of Beta(a, b) by inversion, [..., S], from uniforms [S] shared by all.

    Equal parameters are inverted once, which is what makes simulations of many small evaluations
    cheap.
    """
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    pairs, inverse = np.unique(
        np.stack([a.ravel(), b.ravel()], axis=-1), axis=0, return_inverse=True
    )
    table = special.betaincinv(pairs[:, :1], pairs[:, 1:], uniforms)
    return table[inverse.reshape(a.shape)]


@in_float64
def uniforms(key: PRNGKeyArray, shape: tuple[int, ...]) -> Any:
    """Uniform draws in (0, 1), float64."""
    return jax.random.uniform(key, shape, jnp.float64, minval=np.finfo(np.float64).tiny)


def generator(key: PRNGKeyArray) -> np.random.Generator:
    """NumPy's generator seeded by a JAX key, for what NumPy and SciPy draw faster or at all."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())


def dirichlet(
    key: PRNGKeyArray, concentration: Float[np.ndarray, "... C"], num_samples: int
) -> Float[np.ndarray, "... S C"]:
    """Draws of Dirichlet(concentration)."""
    concentration = np.asarray(concentration, np.float64)[..., None, :]
    shape = (*concentration.shape[:-2], num_samples, concentration.shape[-1])
    draws = generator(key).standard_gamma(concentration, shape)
    return draws / draws.sum(-1, keepdims=True)


def quantiles(samples: Any, alphas: Alphas) -> np.ndarray:
    """Percentile interval [..., A, 2] of samples [..., S], interpolated linearly."""
    values = np.quantile(np.asarray(samples, np.float64), tails(alphas).ravel(), axis=-1)
    return np.moveaxis(values, 0, -1).reshape(*values.shape[1:], -1, 2)


def weighted_quantiles(values: Any, log_weights: Any, alphas: Alphas) -> np.ndarray:
    """Percentile interval [..., A, 2] of weighted samples.

    A sample sits in the middle of its share of the cumulative weight, and the quantile function is
    linear between them.

    Args:
      values: [..., S].
      log_weights: [..., S], in any scale.
      alphas: levels.
    """
    values, log_weights = np.broadcast_arrays(values, log_weights)
    order = np.argsort(values, axis=-1)
    sorted_values = np.take_along_axis(values, order, axis=-1)
    weights = np.take_along_axis(
        np.exp(log_weights - log_weights.max(-1, keepdims=True)), order, -1
    )
    weights = weights / weights.sum(-1, keepdims=True)
    middles = np.cumsum(weights, axis=-1) - weights / 2
    probabilities = tails(alphas)
    flat = sorted_values.reshape(-1, values.shape[-1])
    ends = [
        np.interp(probabilities, cumulative, row)
        for row, cumulative in zip(flat, middles.reshape(flat.shape), strict=True)
    ]
    return np.stack(ends).reshape(*values.shape[:-1], *probabilities.shape)


def effective_sample_size(log_weights: Any) -> np.ndarray:
    """(sum w)^2 / sum w^2 over the last axis."""
    weights = np.exp(log_weights - np.max(log_weights, axis=-1, keepdims=True))
    return weights.sum(-1) ** 2 / (weights**2).sum(-1)


_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(64)


def bivariate_normal_cdf(
    h: Float[Array, ...], k: Float[Array, ...], rho: Float[Array, ...]
) -> Float[Array, ...]:
    """P(X <= h, Y <= k) of standard normals with correlation rho; |rho| < 1.

    Plackett's integral over the correlation, with rho = sin(angle): the integrand stays smooth up
    to |rho| = 1, and 64 Gauss-Legendre nodes give ten digits.
    """
    angle = jnp.arcsin(rho)[..., None] * (jnp.asarray(_NODES) + 1) / 2
    h, k = h[..., None], k[..., None]
    exponent = -(h**2 - 2 * h * k * jnp.sin(angle) + k**2) / (2 * jnp.cos(angle) ** 2)
    integral = jnp.exp(exponent) @ jnp.asarray(_NODE_WEIGHTS) * jnp.arcsin(rho) / 2
    independent = jax.scipy.stats.norm.cdf(h[..., 0]) * jax.scipy.stats.norm.cdf(k[..., 0])
    return independent + integral / (2 * jnp.pi)
