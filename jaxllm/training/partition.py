"""Splits a parameter tree into what is trained and what is not, and puts it together again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.parameters import path_name

Predicate = Callable[[str, Any], bool]


def trainable(path: str, leaf: Any) -> bool:
    """Every floating-point leaf: what can be differentiated at all."""
    del path
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def matching(*patterns: str) -> Predicate:
    """Floating-point leaves whose path is found by one of the regular expressions (`re.search`)."""
    expressions = [re.compile(pattern) for pattern in patterns]

    def predicate(path: str, leaf: Any) -> bool:
        return trainable(path, leaf) and any(e.search(path) for e in expressions)

    return predicate


def excluding(*patterns: str) -> Predicate:
    """Floating-point leaves whose path is found by none of the regular expressions."""
    hit = matching(*patterns)
    return lambda path, leaf: trainable(path, leaf) and not hit(path, leaf)


def mask(tree: Any, predicate: Predicate) -> Any:
    """The tree of `predicate(path, leaf)`, as Python booleans."""
    return jax.tree_util.tree_map_with_path(lambda p, x: bool(predicate(path_name(p), x)), tree)


def partition(tree: Any, predicate: Predicate = trainable) -> tuple[Any, Any]:
    """(chosen, rest): two trees like `tree`, each with None where the other has the leaf.

    Leaves that are not floating point (packed codes, indices) are never chosen.

    Raises:
      ValueError: the predicate chooses nothing.
    """
    chosen = jax.tree_util.tree_map_with_path(
        lambda p, x: bool(predicate(path_name(p), x)) and trainable("", x), tree
    )
    if not any(jax.tree.leaves(chosen)):
        names = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
        raise ValueError(f"no parameter is trainable: the predicate refused all of {names[:8]} ...")
    first = jax.tree.map(lambda keep, x: x if keep else None, chosen, tree)
    second = jax.tree.map(lambda keep, x: None if keep else x, chosen, tree)
    return first, second


def combine(first: Any, second: Any) -> Any:
    """Undoes `partition`: takes each leaf from the tree that has it."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None
    )
