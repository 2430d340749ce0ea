"""Where a computation is being traced for."""

from __future__ import annotations

import jax


def on_one_device() -> bool:
    """Whether no mesh is active, so that slicing and merging axes cannot move data between devices.

    Training and evaluation steps activate theirs by `jaxllm.training.sharding.use`.
    """
    return jax.sharding.get_abstract_mesh().empty
