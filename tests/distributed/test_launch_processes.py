"""The launcher on several processes: one set of results, equal to one process; errors end all."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import launch, report
from jaxllm.models import hf
from tests.distributed import processes
from tests.experiments import micro


def start(folder, workdir, count=2, own=lambda index: (), **overrides):
    """A micro run on so many processes; `own(index)` are further arguments of one of them."""
    shared = micro.arguments(folder, workdir, **overrides)

    def arguments(address, index):
        place = [f"--coordinator={address}", f"--num_processes={count}", f"--process_id={index}"]
        return ["-m", "experiments.launch", *shared, *place, "--peer_timeout=10", *own(index)]

    return processes.started(count, arguments, pathlib.Path(folder))


def failed(running, folder):
    """Waits for all to fail; what they printed."""
    outputs = []
    for index, process in enumerate(running):
        assert process.wait(120) != 0
        outputs.append((folder / f"output-{index}.txt").read_text())
    return outputs


def test_two_processes_leave_what_one_does(tmp_path, monkeypatch):
    with start(tmp_path, "two") as running:
        first, second = processes.ended(running, tmp_path)
    assert "step 12/12" in first and "wrote two/results.json" in first
    own = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert all(line.startswith("process 1: ") for line in own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # no mesh: one of the simulated devices
    assert launch.main(micro.arguments(tmp_path, "one")) == 0
    one, two = (json.loads((tmp_path / n / "results.json").read_text()) for n in ("one", "two"))
    for name, value in one["validation"].items():
        assert two["validation"][name] == pytest.approx(value, rel=1e-5)
    assert two["samples"] == one["samples"] and two["train"]["steps"] == 12
    curves = [report.read_metrics(tmp_path / n / "metrics.jsonl") for n in ("one", "two")]
    for name in ("train/loss", "eval/cross_entropy"):
        np.testing.assert_array_equal(curves[0][name][0], curves[1][name][0])
        np.testing.assert_allclose(curves[0][name][1], curves[1][name][1], rtol=0, atol=1e-5)
    params = [hf.load_hf(tmp_path / name / "model")[1] for name in ("one", "two")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), *params)


def test_a_preemption_notice_to_one_process_saves_and_ends_all(tmp_path):
    """SIGTERM to the second: both save the same step and end with 0; the next start goes on."""

    def steps_logged():
        file = tmp_path / "out" / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    saved = []
    for _ in range(2):
        begun = steps_logged()
        with start(tmp_path, "out", train__steps=10**6) as running:
            processes.wait_for(lambda begun=begun: steps_logged() > begun + 2, running)
            running[1].send_signal(signal.SIGTERM)
            first, _ = processes.ended(running, tmp_path)
        assert "interrupted: " in first
        folders = (tmp_path / "out" / "checkpoints").iterdir()
        saved.append(max(int(folder.name) for folder in folders if folder.name.isdecimal()))
    assert 0 < saved[0] < saved[1]


def test_what_fails_on_the_first_ends_all(tmp_path):
    with start(tmp_path, "out", data__path="nowhere.txt") as running:
        first, second = failed(running, tmp_path)
    assert "error: " in first and "nowhere.txt" in first and "Traceback" not in first
    assert "process 1: error: process 0 failed: " in second and "Traceback" not in second
    assert [process.returncode for process in running] == [2, 2]


def test_another_config_on_one_process_ends_all(tmp_path):
    def own(index):
        return [f"--config.train.steps={12 + index}"]

    with start(tmp_path, "out", own=own) as running:
        outputs = failed(running, tmp_path)
    for output in outputs:
        assert "process 1 was started with another config than process 0" in output
        assert "train.steps (12 there, 13 here)" in output
    assert not (tmp_path / "out").exists()


def test_wrong_flags_are_refused(capsys):
    def refused(*flags):
        assert launch.main(["--config", "pretrain", *flags]) == 2
        return capsys.readouterr().err

    assert "without coordinator and num_processes: give all three" in refused("--process_id=0")
    assert "leave out --distributed" in refused("--distributed", "--process_id=0")
    assert "several processes" in refused("--peer_timeout=5")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        place = f"--coordinator=localhost:{taken.getsockname()[1]}"
        assert "already in use" in refused(place, "--num_processes=2", "--process_id=0")
    assert launch.main(["--config", "benchmark", "--distributed"]) == 2
    assert "benchmark runs on one process only" in capsys.readouterr().err


def test_detection_without_a_cluster_says_so(tmp_path):
    arguments = micro.arguments(tmp_path, "out")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", *arguments, "--distributed"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(processes.ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: no cluster was found here")
    assert not (tmp_path / "out").exists()
