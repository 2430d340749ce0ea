"""Optimizers, schedules and weight decay from one validated config; all of it optax.

Every optimizer is the same chain, so that clipping, decay and the schedule mean the same for all:

    clip by global norm -> direction u (Adam, factored RMS, Muon, momentum) -> p <- p - lr_t (u + wd
    p)
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxllm.models import parameters
from jaxllm.training import partition

_NAMES = ("adamw", "adafactor", "muon", "sgd")
_SCHEDULES = ("constant", "linear", "cosine", "wsd")
# Neither decayed nor orthogonalised.
_VECTORS = re.compile(r"(^|/)(bias|scale|scales|[a-z_]*norm)(/|$)")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up to the peak, then one of four courses.

    Attributes:
      name: "constant"; "linear" or "cosine" decay to the end; "wsd" (warm-up, stable, decay:
        constant, then linear decay over the last steps, arXiv:2404.06395).
      peak: learning rate after the warm-up.
      warmup_steps: steps of the warm-up; the first step has peak / warmup_steps.
      total_steps: step at which the decay ends ("constant" does not need it).
      decay_steps: length of the decay of "wsd".
      end_fraction: final learning rate as a fraction of the peak.
    """

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    peak: float = 3e-4
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_steps: int | None = None
    end_fraction: float = 0.1

    def __post_init__(self) -> None:
        _require(
            self.name in _SCHEDULES,
            f"schedule.name={self.name!r} is unknown: expected one of {_SCHEDULES}.",
        )
        _require(self.peak > 0, f"schedule.peak={self.peak} must be positive.")
        _require(self.warmup_steps >= 0, f"schedule.warmup_steps={self.warmup_steps} is negative.")
        _require(
            0 <= self.end_fraction <= 1,
            f"schedule.end_fraction={self.end_fraction} must lie in [0, 1].",
        )
        if self.name == "constant":
            return
        _require(
            self.total_steps is not None and self.total_steps > self.warmup_steps,
            f"schedule.total_steps={self.total_steps} must exceed "
            f"schedule.warmup_steps={self.warmup_steps}.",
        )
        if self.name == "wsd":
            room = self.total_steps - self.warmup_steps
            _require(
                self.decay_steps is not None and 0 < self.decay_steps <= room,
                f"schedule.decay_steps={self.decay_steps} must lie in [1, {room}] (total less "
                "warm-up).",
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What `create_optimizer` builds.

    Attributes:
      name: "adamw"; "adafactor" (factored second moments, no momentum); "muon" (orthogonalised
        momentum for the matrices of the layers, scaled to Adam's update size; Adam for embeddings,
        head, norms, biases and routers); "sgd" (Nesterov momentum, plain with momentum=0).
      schedule: the learning rate.
      weight_decay: decoupled, times the learning rate; not on norms and biases.
      b1, b2, eps: Adam's.
      momentum: of Muon and SGD.
      adam_scale: Muon: learning rate of the Adam part as a multiple of the schedule.
      clip_norm: largest global norm of the gradient; None = no clipping.
      state_dtype: dtype of first moments; None = the parameter's.
    """

    name: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    schedule: ScheduleConfig = ScheduleConfig(name="constant")
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    adam_scale: float = 1.0
    clip_norm: float | None = 1.0
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.name in _NAMES,
            f"optimizer.name={self.name!r} is unknown: expected one of {_NAMES}.",
        )
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}={value} must lie in [0, 1).")
        for name in ("weight_decay", "eps"):
            value = getattr(self, name)
            _require(value >= 0, f"optimizer.{name}={value} must not be negative.")
        _require(self.adam_scale > 0, f"optimizer.adam_scale={self.adam_scale} must be positive.")
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optimizer.clip_norm={self.clip_norm} must be positive, or None for no clipping.",
        )


def create_schedule(config: ScheduleConfig) -> optax.Schedule:
    """Learning rate as a function of the number of updates done."""
    warmup, end = config.warmup_steps, config.peak * config.end_fraction
    steps = (config.total_steps or 0) - warmup
    if config.name == "constant":
        after = optax.constant_schedule(config.peak)
    elif config.name == "linear":
        after = optax.linear_schedule(config.peak, end, steps)
    elif config.name == "cosine":
        after = optax.cosine_decay_schedule(config.peak, steps, config.end_fraction)
    else:
        stable = steps - config.decay_steps
        decay = optax.linear_schedule(config.peak, end, config.decay_steps)
        after = optax.join_schedules([optax.constant_schedule(config.peak), decay], [stable])
    if not warmup:
        return after
    first = config.peak / warmup
    up = optax.linear_schedule(first, config.peak, max(1, warmup - 1))
    return optax.join_schedules([up, after], [warmup])


def create_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer of a config: its updates are what to add to the parameters."""
    steps = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    steps.append(_direction(config))
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    steps.append(optax.scale_by_learning_rate(create_schedule(config.schedule)))
    return optax.chain(*steps)


def decay_mask(params: Any) -> Any:
    """True for what weight decay acts on: everything but norms, biases and scales."""
    return partition.mask(params, lambda path, _: not _VECTORS.search(path))


def muon_dimensions(params: Any) -> Any:
    """Which leaves Muon orthogonalises, and which of their axes are the matrix.

    Those are the matrices of the layers, [L, in, out] or [L, E, in, out], other than routers.

    Returns:
      A tree like `params` of `optax.contrib.MuonDimensionNumbers`, None for the leaves left to
      Adam.
    """

    def dimensions(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        name = parameters.path_name(path)
        in_layer = re.search(r"(^|/)layers/", name) and not re.search(r"(^|/)router/", name)
        if not in_layer or _VECTORS.search(name) or leaf.ndim < 3:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def update_ema(ema: Any, params: Any, decay: float) -> Any:
    """decay * ema + (1 - decay) * params, in the average's dtype."""
    return jax.tree.map(lambda e, p: e + (1.0 - decay) * (p.astype(e.dtype) - e), ema, params)


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    dtype = None if config.state_dtype is None else jnp.dtype(config.state_dtype)
    if config.name == "adamw":
        return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=dtype)
    if config.name == "sgd":
        if not config.momentum:
            return optax.identity()
        return optax.trace(config.momentum, nesterov=True, accumulator_dtype=dtype)
    if config.name == "adafactor":
        return optax.chain(optax.adafactor(learning_rate=None), optax.scale(-1.0))
    # Root mean square 0.2, as Adam's updates have (arXiv:2502.16982): one learning rate fits both.
    muon = optax.contrib.muon(
        learning_rate=1.0,
        beta=config.momentum,
        eps=config.eps,
        mu_dtype=dtype,
        muon_weight_dimension_numbers=muon_dimensions,
        consistent_rms=0.2,
    )
    orthogonal = optax.chain(muon, optax.scale(-1.0))
    adam = optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=dtype),
        optax.scale(config.adam_scale),
    )
    return optax.partition({"muon": orthogonal, "adam": adam}, _muon_labels)


def _muon_labels(params: Any) -> Any:
    return jax.tree.map(
        lambda numbers: "adam" if numbers is None else "muon",
        muon_dimensions(params),
        is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers),
    )
