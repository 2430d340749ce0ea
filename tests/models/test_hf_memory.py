"""What loading needs beside the model itself does not grow with the model."""

from __future__ import annotations

import sys

import pytest

from experiments.benchmarks.loading import measure


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("devices", [1, 8])
def test_peak_memory_beside_the_model_is_a_few_tensors(devices):
    small, large = measure(0.4, devices=devices), measure(1.2, devices=devices)
    assert large["model_bytes"] > 2.5 * small["model_bytes"]
    tensor = large["largest_tensor_bytes"]
    assert large["extra_bytes"] < 5 * tensor
    assert large["extra_bytes"] - small["extra_bytes"] < tensor
