"""Descriptions of functions and values that a recipe's hash is made of."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import pathlib
import types
from collections.abc import Mapping
from typing import Any

from jaxllm.data.errors import DataError


def describe(value: Any) -> Any:
    """A JSON-safe description that changes when what `value` does changes.

    Plain values stand for themselves; anything with a `fingerprint()` or `describe()` method is
    described by it; dataclasses by their fields; functions by their source text with their
    defaults and closure; partials by their parts.

    Raises:
      DataError: a value that none of these fits, so that a stale cache could go unnoticed.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return f"bytes:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, type | types.ModuleType):
        return _name(value)
    for method in ("describe", "fingerprint"):
        if callable(getattr(value, method, None)):
            return {"class": _name(type(value)), method: describe(getattr(value, method)())}
    if dataclasses.is_dataclass(value):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": _name(type(value)), "fields": fields}
    if isinstance(value, functools.partial):
        parts = [describe(value.func), describe(value.args), describe(value.keywords)]
        return {"partial": parts}
    if isinstance(value, types.BuiltinFunctionType):
        return _name(value)
    if isinstance(value, types.FunctionType):
        return _describe_function(value)
    raise DataError(
        f"{value!r} cannot be described for a recipe: make it a function, a frozen dataclass, or "
        "give it a method describe() that returns what its result depends on"
    )


def _describe_function(function: types.FunctionType) -> dict[str, Any]:
    try:
        source = inspect.getsource(function)
    except OSError as error:
        raise DataError(
            f"{_name(function)}: no source text to hash; define it in a file"
        ) from error
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return {
        "function": _name(function),
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "defaults": describe([*(function.__defaults__ or ())]),
        "keyword_defaults": describe(function.__kwdefaults__ or {}),
        "closure": describe(cells),
    }


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
