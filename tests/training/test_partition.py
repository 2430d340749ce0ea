"""Splitting a tree into trained and frozen leaves, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.training import partition

TREE = {
    "a": {"kernel": np.ones(2, np.float32), "codes": np.ones(2, np.uint8)},
    "b": (np.ones(3, np.float32), np.ones((), jnp.bfloat16)),
}
NAMES = ["a/codes", "a/kernel", "b/0", "b/1"]


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_partition_and_combine_are_inverse(names):
    predicate = lambda path, leaf: path in names  # noqa: E731
    if names == {"a/codes"}:
        with pytest.raises(ValueError, match="no parameter is trainable"):
            partition.partition(TREE, predicate)
        return
    chosen, rest = partition.partition(TREE, predicate)
    assert len(jax.tree.leaves(chosen)) == len(names - {"a/codes"})
    assert len(jax.tree.leaves(chosen)) + len(jax.tree.leaves(rest)) == 4
    assert chosen["a"]["codes"] is None  # integers cannot be trained
    back = partition.combine(chosen, rest)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    assert all(x is y for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True))


def test_predicates_by_path():
    def chosen(predicate):
        return {
            name
            for name, keep in zip(
                NAMES, jax.tree.leaves(partition.mask(TREE, predicate)), strict=True
            )
            if keep
        }

    assert chosen(partition.trainable) == {"a/kernel", "b/0", "b/1"}
    assert chosen(partition.matching("^b/", "nothing")) == {"b/0", "b/1"}
    assert chosen(partition.excluding("kernel$")) == {"b/0", "b/1"}
    assert chosen(partition.matching("codes")) == set()


def test_gradient_through_a_tree_with_integers():
    trained, frozen = partition.partition(TREE)

    def total(trained):
        tree = partition.combine(trained, frozen)
        return (tree["a"]["kernel"] * tree["a"]["codes"]).sum() + tree["b"][0].sum()

    grads = jax.grad(total)(trained)
    np.testing.assert_array_equal(grads["a"]["kernel"], TREE["a"]["codes"])
    assert grads["a"]["codes"] is None
