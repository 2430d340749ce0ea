"""The decoder as a Flax Linen module: a thin shell around the pure functions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.inputs import ModelInputs, ModelOutputs
from jaxllm.models.parameters import init_params, logical_axes


class Decoder(nn.Module):
    """Config, initialisation with logical axes, and apply.

    `init` boxes every parameter with its logical axes (`nn.LogicallyPartitioned`), so that
    `nn.get_partition_spec` and `nn.logical_to_mesh_sharding` work on it; `apply` takes boxed or
    plain parameters, with `Weight`s and other nodes in any place.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, tokens: Any, inputs: ModelInputs | None = None, **options: Any
    ) -> ModelOutputs:
        """See `jaxllm.models.decoder.forward`."""
        if self.is_initializing():
            params = init_params(self.config, self.make_rng("params"))
            boxed = jax.tree.map(
                lambda value, axes: nn.LogicallyPartitioned(value, tuple(axes)),
                params,
                logical_axes(self.config),
            )
            for name, value in boxed.items():
                self.put_variable("params", name, value)
        else:
            params = nn.meta.unbox(dict(self.variables["params"]))
        return forward(self.config, params, tokens, inputs, **options)
