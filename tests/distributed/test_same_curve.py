"""One device and eight devices train the same model alike."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.models.config import MoEConfig
from jaxllm.training import sharding
from tests.distributed import small_run


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return small_run.run(tmp_path_factory.mktemp("single"))


def test_the_curve_goes_down(single):
    assert len(single) == 20
    assert np.mean(single[-3:]) < 0.8 * single[0]


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [
        (sharding.MeshConfig(fsdp=8), 1),
        (sharding.MeshConfig(fsdp=4, tensor=2), 1),
        (sharding.MeshConfig(fsdp=2, tensor=2, context=2), 1),
        (sharding.MeshConfig(data=2, fsdp=2, context=2), 2),
    ],
    ids=["fsdp", "tensor", "context", "accumulated"],
)
def test_eight_devices(single, tmp_path, mesh, accumulate):
    curve = small_run.run(tmp_path, mesh_config=mesh, accumulate=accumulate)
    np.testing.assert_allclose(curve, single, rtol=0, atol=1e-5)


def mixture(execution):
    moe = MoEConfig(num_experts=4, experts_per_token=2, expert_dim=16, execution=execution)
    return small_run.MODEL.replace(num_layers=1, moe=moe)


@pytest.fixture(scope="module")
def single_mixture(tmp_path_factory):
    """Every expert on every token, on one device."""
    folder = tmp_path_factory.mktemp("mixture")
    return small_run.run(folder, steps=10, model=mixture("every"))


@pytest.mark.parametrize(
    "mesh",
    [
        sharding.MeshConfig(fsdp=8),
        sharding.MeshConfig(fsdp=4, tensor=2),
        sharding.MeshConfig(fsdp=2, tensor=2, expert=2),
        sharding.MeshConfig(fsdp=2, expert=2, context=2),
    ],
    ids=["fsdp", "tensor", "expert", "context"],
)
def test_mixtures_on_eight_devices(single_mixture, tmp_path, mesh):
    curve = small_run.run(tmp_path, steps=10, mesh_config=mesh, model=mixture("grouped"))
    np.testing.assert_allclose(curve, single_mixture, rtol=0, atol=1e-5)
