"""Shared test set-up: eight simulated CPU devices, data folders, a calm hypothesis."""

from __future__ import annotations

import os
import pathlib

# Before jax is imported anywhere: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Most of the time of the tests is compilation; without most optimisations it takes less.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 tests what users run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import hypothesis
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile(
    "jaxllm",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jaxllm")


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder of shared test data: $JAXLLM_SHARED, or `shared` beside the repository."""
    folder = pathlib.Path(os.environ.get("JAXLLM_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared test data in {folder} (set JAXLLM_SHARED to its folder)")
    return folder


@pytest.fixture(scope="session")
def golden():
    """`golden(name)` reads tests/golden/<name>.npz into a dict of arrays."""

    def read(name: str) -> dict[str, np.ndarray]:
        with np.load(ROOT / "tests" / "golden" / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return read
