"""Which body of an operation runs: the TPU kernel, the GPU kernel, or plain JAX.

Every operation has one meaning, its `reference.py`, and kernels that compute the same for the
shapes that they support. The choice falls when a program is lowered, by the platform that it is
lowered for, so that one traced program runs on a CPU and compiles for a TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax

from pallas_kernels.partition import Partition, free_axes, over_mesh

Implementation = Literal["tpu", "gpu", "xla"]

_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Takes a kernel's place where it cannot handle the arguments.

    Attributes:
      reason: what it cannot handle, for users ("d_in=100 is no multiple of 128").
    """

    reason: str


Body = Callable[..., Any] | Unsupported


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of an operation, planned for the shapes of some arguments."""

    tpu: Body
    gpu: Body


def call(
    name: str,
    *arguments: jax.Array,
    xla: Callable[..., Any],
    kernels: Callable[..., Kernels],
    rule: str,
    whole: Sequence[str] = (),
    summed: Sequence[str] = (),
    implementation: Implementation | None = None,
    partition: Partition | None = None,
) -> Any:
    """Calls the body that fits the platform; all must return the same shapes and dtypes.

    Args:
      name: of the operation, for messages.
      *arguments: arrays.
      xla: the reference, of `arguments`.
      kernels: plans the kernels for arguments of these shapes (on a mesh, for a device's parts).
      rule, whole, summed: how the operation may be cut, see `partition.over_mesh`.
      implementation: forces a body; None = the platform's kernel, and the reference where there is
        none (one message in the log says why).
      partition: how arguments lie on the active mesh. Without it XLA cuts the reference.

    Raises:
      ValueError: an unknown implementation, a forced one that cannot handle the arguments, a
        partition that does not fit.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"{name}: implementation={implementation!r} is unknown: expected None, 'tpu', 'gpu' or "
            "'xla'."
        )
    if implementation == "xla":
        return xla(*arguments)

    def local(*parts: jax.Array) -> Any:
        planned = kernels(*parts)
        return _choose(name, parts, xla, planned, implementation)

    if not free_axes():
        return local(*arguments)
    if partition is None:
        reason = "a mesh is active, and `partition` does not say how the arguments lie on it"
        if implementation is not None:
            raise ValueError(f"{name}: no {implementation} kernel for this: {reason}.")
        for key in _PLATFORMS:
            _log_once(name, key, reason)
        return xla(*arguments)
    return over_mesh(name, local, rule, partition, whole=whole, summed=summed)(*arguments)


def _choose(name, arguments, xla, kernels: Kernels, implementation: Implementation | None) -> Any:
    bodies = {"tpu": kernels.tpu, "gpu": kernels.gpu}
    if implementation is not None:
        body = bodies[implementation]
        if isinstance(body, Unsupported):
            raise ValueError(f"{name}: no {implementation} kernel for this: {body.reason}.")
        return body(*arguments)
    branches: dict[str, Callable[..., Any]] = {}
    for key, body in bodies.items():
        if isinstance(body, Unsupported):
            _log_once(name, key, body.reason)
        else:
            branches[_PLATFORMS[key]] = body
    if not branches:
        return xla(*arguments)
    return jax.lax.platform_dependent(*arguments, default=xla, **branches)


@functools.cache
def _log_once(name: str, kernel: str, reason: str) -> None:
    # Where the platform is in use, it costs speed that somebody counts on.
    level = logging.WARNING if jax.default_backend() == kernel else logging.DEBUG
    _log.log(level, "%s: plain JAX in place of the %s kernel: %s.", name, kernel, reason)
