"""Values that stand in for weights, at four levels.

A method that changes how a part of the network computes puts one of these in the parameter tree, in
place of the array (or dictionary of arrays) that it replaces; the decoder never asks which method
is on.

| level | class         | replaces                               | called as                   |
|-------|---------------|----------------------------------------|-----------------------------|
| 1     | `Weight`      | one (in, out) kernel                   | `weight.matmul(x, context)` |
| 2     | `Group`       | linears that share an input (q, k, v)  | `group.project(x, context)` |
| 3     | `FeedForward` | a whole feed-forward                   | `node(x, state, context)`   |
| 4     | `Attention`   | a whole attention                      | `node(x, state, context)`   |

Subclasses are `flax.struct.dataclass`es. Numbers are leaves (they may carry a leading layer or
expert axis, so that stacked layers can be scanned); only what decides shapes or code may be a
static field, and is written to the manifest beside a checkpoint (`jaxllm.models.manifest`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from jaxllm.models.context import Context
    from jaxllm.models.kv_cache import KVCache


class Node:
    """Base of everything that may stand in a parameter tree besides arrays and dictionaries."""

    if TYPE_CHECKING:  # Every subclass has it from flax.struct.dataclass.

        def replace(self, **changes: Any) -> Self: ...

    def field_names(self, *, static: bool) -> list[str]:
        """Names of the static fields, or of those that hold arrays and further nodes."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        return [f.name for f in fields if f.metadata.get("pytree_node", True) != static]

    def axes(self, base: Any) -> Any:
        """Logical axes of this value's leaves.

        Args:
          base: the axes (a `PartitionSpec`, or a tree of them) of what this value replaces.

        Returns:
          A value of the same class with a `PartitionSpec` in place of every array.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is sharded.")


class Weight(Node):
    """Level 1: stands for one kernel of shape (in, out)."""

    def matmul(
        self, x: Float[Array, "... d_in"], context: Context | None = None
    ) -> Float[Array, "... d_out"]:
        """x @ W."""
        return x @ self.materialize().astype(x.dtype)

    def materialize(self) -> Float[Array, "... d_in d_out"]:
        """The (in, out) array that this value stands for."""
        raise NotImplementedError(f"{type(self).__name__} has no dense form.")

    def axes(self, base: PartitionSpec) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how it is sharded.")


class Group(Node):
    """Level 2: stands for a dictionary of linears that read the same input."""

    def project(
        self, x: Float[Array, "... d_in"], context: Context
    ) -> dict[str, Float[Array, "... d_out"]]:
        """Every member applied to x, by name."""
        raise NotImplementedError


class FeedForward(Node):
    """Level 3: stands for a whole feed-forward; a mixture of experts is one."""

    def __call__(
        self, x: Float[Array, "batch time dim"], state: Any, context: Context
    ) -> tuple[Float[Array, "batch time dim"], Any, dict[str, Array]]:
        """Returns (output, travelling state, auxiliary values such as router losses)."""
        raise NotImplementedError


class Attention(Node):
    """Level 4: stands for a whole attention."""

    def __call__(
        self, x: Float[Array, "batch time dim"], state: Any, context: Context
    ) -> tuple[Float[Array, "batch time dim"], Any, KVCache]:
        """Returns (output, travelling state, this layer's cache)."""
        raise NotImplementedError
