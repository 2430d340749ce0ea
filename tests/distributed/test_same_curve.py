"""One device, eight devices and two processes train the same model alike."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxllm.models.config import MoEConfig
from jaxllm.training import sharding, writers
from tests.distributed import small_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


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


def test_two_processes(single, tmp_path):
    with _two_processes(tmp_path, steps=20, pause=0.2) as processes:
        _wait_for(tmp_path / "metrics.jsonl", processes)
        processes[1].send_signal(signal.SIGTERM)  # both stop, and save at the same step
    (checkpoint,) = (p for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    done = int(checkpoint.name)
    lines = writers.read_jsonl(tmp_path / "metrics.jsonl")
    assert 1 <= done < 20 and lines[-1]["step"] == done
    with _two_processes(tmp_path, steps=20):
        pass  # goes on from there
    lines = writers.read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 21))
    np.testing.assert_allclose([x["train/loss"] for x in lines], single, rtol=0, atol=1e-5)


@contextlib.contextmanager
def _two_processes(workdir, steps, pause=0.0):
    """Two processes of two devices each, over gloo; waits for both and checks their exit."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of the time
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [
        sys.executable,
        small_run.__file__,
        str(workdir),
        str(steps),
        "2",
        "2",
        address,
        str(pause),
    ]
    processes = [
        subprocess.Popen(
            [*command, str(index), "2"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]
    try:
        yield processes
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]


def _wait_for(path, processes, seconds=240):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.05)
