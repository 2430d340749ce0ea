"""How many operations a token costs in training, and how many a device can do."""

from __future__ import annotations

import jax
import numpy as np

from jaxllm.models import parameters
from jaxllm.models.config import ModelConfig
from jaxllm.models.parameters import path_name

# Dense bfloat16 peak of one device, in operations a second, by `jax.Device.device_kind` (vendors'
# data sheets).
PEAK_FLOPS = {
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
}


def peak_flops(devices: list[jax.Device] | None = None) -> float | None:
    """Summed peak of the devices (default: all); None where a kind is not in the table (CPUs)."""
    devices = jax.devices() if devices is None else devices
    peaks = [PEAK_FLOPS.get(device.device_kind) for device in devices]
    return None if None in peaks else float(sum(peaks))


def active_matrix_params(config: ModelConfig) -> float:
    """Parameters that a token meets in products: kernels of layers and chosen experts, head."""
    total = float(config.embed_dim * config.vocab_size)
    leaves, _ = jax.tree_util.tree_flatten_with_path(parameters.abstract_params(config)["layers"])
    for path, leaf in leaves:
        names = path_name(path).split("/")
        if names[-1] != "kernel":
            continue
        share = 1.0
        if "experts" in names:
            share = config.moe.experts_per_token / config.moe.num_experts
        total += share * float(np.prod(leaf.shape))
    return total


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of forward and backward pass for one token: 6 N + causal attention.

    N counts `active_matrix_params`. Scores and weighted values of a row of T tokens cost 2 * 2 *
    T^2 / 2 * H * hd a layer forward (half of the square is masked), three times that with the
    backward pass; a window shortens the average span. Recomputation (remat) is not counted: the
    ratio of this to the peak is the model's utilisation (PaLM, arXiv:2204.02311, appendix B).
    """
    if config.mla is None:
        width = 2 * config.num_heads * config.head_dim
    else:
        mla = config.mla
        width = config.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    spans = [_mean_span(length, window) for window in config.windows or (None,) * config.num_layers]
    return 6.0 * active_matrix_params(config) + 6.0 * width * sum(spans)


def _mean_span(length: int, window: int | None) -> float:
    """Average number of positions that a token of a row attends to."""
    window = length if window is None else min(window, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length
