"""Balances mixtures of experts by their selection bias, without a loss.

After every step the bias of each expert moves by a fixed amount: down where the expert had more
than its share of the choices, up where it had less (arXiv:2408.15664, algorithm 1). The bias acts
on the choice of experts only, so this disturbs no gradient, as a balance loss does. The mixtures
hand their load on as the gradient of the bias (`MoEConfig.bias_update_rate`).
"""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from jaxllm.models.config import ModelConfig
from jaxllm.models.parameters import path_name

_SELECTION_BIAS = re.compile(r"(^|/)feedforward/router/bias$")


def balance_routers(
    optimizer: optax.GradientTransformation, config: ModelConfig
) -> optax.GradientTransformation:
    """The optimizer, with selection biases updated by the sign of their experts' excess load.

    Clipping, decay and moments of the optimizer see the other parameters only.

    Args:
      optimizer: of everything else.
      config: the model's; the optimizer is returned as it is where
        `config.moe.bias_update_rate` is 0.
    """
    if config.moe is None or not config.moe.bias_update_rate:
        return optimizer
    by_sign = optax.chain(optax.scale_by_sign(), optax.scale(-config.moe.bias_update_rate))
    return optax.partition({"bias": by_sign, "rest": optimizer}, _labels)


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "bias" if _SELECTION_BIAS.search(path_name(path)) else "rest", params
    )
