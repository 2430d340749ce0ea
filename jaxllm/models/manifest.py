"""What a checkpoint cannot hold: the structure of a tree, its classes and their static fields.

Array checkpoints save leaves only. A manifest, a JSON-safe description written beside one, is
enough to build the restore target; a checkpoint restored into another structure is refused by path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.weights import Node


def describe(tree: Any) -> dict[str, Any]:
    """JSON-safe description of a tree of mappings, tuples, `Node`s and arrays.

    Raises:
      TypeError: a value of another kind, or a static field that JSON cannot hold.
    """
    if tree is None:
        return {"kind": "none"}
    if isinstance(tree, Mapping):
        return {"kind": "dict", "items": {str(k): describe(v) for k, v in tree.items()}}
    if isinstance(tree, tuple | list):
        return {"kind": "tuple", "items": [describe(v) for v in tree]}
    if isinstance(tree, Node):
        static = tree.field_names(static=True)
        for name in static:
            value = getattr(tree, name)
            if not isinstance(value, str | int | float | bool | None):
                raise TypeError(
                    f"static field {type(tree).__name__}.{name}={value!r} cannot be written to a "
                    "manifest: expected a string, number, boolean or None."
                )
        fields = tree.field_names(static=False)
        return {
            "kind": "node",
            "class": f"{type(tree).__module__}:{type(tree).__qualname__}",
            "static": {name: getattr(tree, name) for name in static},
            "fields": {name: describe(getattr(tree, name)) for name in fields},
        }
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {"kind": "array", "shape": list(tree.shape), "dtype": jnp.dtype(tree.dtype).name}
    raise TypeError(f"cannot describe a {type(tree).__name__} in a parameter tree.")


def abstract(description: Mapping[str, Any], modules: tuple[str, ...] = ("jaxllm.",)) -> Any:
    """The tree of a description, with `jax.ShapeDtypeStruct`s for arrays: a restore target.

    Args:
      description: from `describe`.
      modules: prefixes of modules whose `Node` classes may be named; nothing else is imported.

    Raises:
      ValueError: a class outside of `modules`, or that is not a `Node`.
    """
    kind = description["kind"]
    if kind == "none":
        return None
    if kind == "dict":
        return {k: abstract(v, modules) for k, v in description["items"].items()}
    if kind == "tuple":
        return tuple(abstract(v, modules) for v in description["items"])
    if kind == "array":
        return jax.ShapeDtypeStruct(tuple(description["shape"]), jnp.dtype(description["dtype"]))
    fields = {k: abstract(v, modules) for k, v in description["fields"].items()}
    return _node_class(description["class"], modules)(**fields, **description["static"])


def _node_class(name: str, modules: tuple[str, ...]) -> type:
    module, _, qualname = name.partition(":")
    if not module.startswith(modules):
        raise ValueError(
            f"manifest names the class {name!r}: expected one of a module in {modules}."
        )
    found = getattr(importlib.import_module(module), qualname, None)
    if not (isinstance(found, type) and issubclass(found, Node)):
        raise ValueError(f"manifest names {name!r}, which is not a class of parameter nodes.")
    return found


def check(description: Mapping[str, Any], tree: Any) -> None:
    """Refuses a tree that differs from a description in structure, classes, shapes or types.

    Raises:
      ValueError: naming the first path that differs, with both sides.
    """
    _compare(description, describe(tree), "params")


def _compare(saved: Mapping[str, Any], given: Mapping[str, Any], path: str) -> None:
    flat = {k: v for k, v in saved.items() if k not in ("items", "fields")}
    other = {k: v for k, v in given.items() if k not in ("items", "fields")}
    if flat != other:
        raise ValueError(f"{path}: the checkpoint has {flat}, the model has {other}.")
    mine, theirs = (side.get("items", side.get("fields", {})) for side in (saved, given))
    if isinstance(mine, list):
        mine, theirs = dict(enumerate(mine)), dict(enumerate(theirs))
    for key in [*mine, *(k for k in theirs if k not in mine)]:
        if key not in mine or key not in theirs:
            holder = "model" if key not in mine else "checkpoint"
            raise ValueError(f"{path}/{key}: only the {holder} has it.")
        _compare(mine[key], theirs[key], f"{path}/{key}")
