"""The fastest of several block sizes, measured on the device at hand and remembered in a file.

The heuristics of the operations know shapes, not chips. Where a kernel runs long enough to care:

    blocks = autotune(attention, q, k, v, candidates=[None, Blocks(512, 512), Blocks(1024, 512)])
    attention(q, k, v, blocks=blocks)
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_log = logging.getLogger(__name__)
_ROUNDS, _CALLS = 5, 10


def default_cache() -> pathlib.Path:
    """$JAXLLM_AUTOTUNE_CACHE, or jaxllm/autotune.json in the user's folder for caches."""
    if chosen := os.environ.get("JAXLLM_AUTOTUNE_CACHE"):
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxllm" / "autotune.json"


def autotune(
    function: Callable[..., Any],
    *arguments: Any,
    candidates: Sequence[Any],
    cache: pathlib.Path | None = None,
    measure: Callable[[Callable[..., Any], tuple[Any, ...]], float] | None = None,
    **options: Any,
) -> Any:
    """The candidate with which the function is fastest on the default device.

    A candidate that does not compile or run is left out, with a line in the log. On a CPU, where
    kernels do not run, the first candidate is returned.

    Args:
      function: an operation of `pallas_kernels`; called as function(*arguments, blocks=candidate,
        **options).
      *arguments: arrays of the shapes that matter; trees are fine.
      candidates: block sizes, None = the operation's own choice.
      cache: file that results are kept in; None = `default_cache()`. An unreadable one is replaced,
        one that cannot be written is a warning.
      measure: seconds of a compiled function of these arguments; None = the least of five rounds.
      **options: passed on; part of what a result is remembered by.

    Raises:
      ValueError: no candidates, or none that works.
    """
    if not candidates:
        raise ValueError("autotune: candidates is empty: expected block sizes to choose from.")
    if jax.default_backend() == "cpu" and measure is None:
        _log.info("autotune: kernels do not run on a CPU: %s is taken unmeasured.", candidates[0])
        return candidates[0]
    path = default_cache() if cache is None else cache
    key = _key(function, arguments, options, candidates)
    names = [repr(candidate) for candidate in candidates]
    known = _read(path).get(key)
    if known in names:
        return candidates[names.index(known)]

    seconds = {}
    for index, candidate in enumerate(candidates):
        call = functools.partial(function, blocks=candidate, **options)
        try:
            seconds[index] = (measure or _seconds)(jax.jit(call), arguments)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log.info("autotune: %s does not work: %s", names[index], reason)
    if not seconds:
        raise ValueError(f"autotune: none of {names} works: the log has the reasons.")
    best = min(seconds, key=lambda index: seconds[index])
    _remember(path, key, names[best])
    return candidates[best]


def _key(function, arguments, options, candidates) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    facts = (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}",
        [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves],
        str(tree),
        sorted((name, repr(value)) for name, value in options.items()),
        [repr(candidate) for candidate in candidates],
        jax.devices()[0].device_kind,
        jax.__version__,
    )
    # Short, for the file grows by a line for each.
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _read(path: pathlib.Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: pathlib.Path, key: str, value: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # Read again: another process may have added to it meanwhile.
        temporary.write_text(json.dumps(_read(path) | {key: value}, indent=0), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("autotune: the result is not kept: %s", error)


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    jax.block_until_ready(function(*arguments))
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        # Calls queue up on the device, so that the time to start one is hidden.
        results = [function(*arguments) for _ in range(_CALLS)]
        jax.block_until_ready(results)
        rounds.append((time.perf_counter() - start) / _CALLS)
    return min(rounds)
