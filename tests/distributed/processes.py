"""Starts several processes of one run on this machine, one device each, over gloo."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax

# Compiling is most of the time, and without its newer emitters XLA takes a third of it. Versions
# after 0.10 have no others.
FLAGS = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__[:2] == (0, 10) else ""
ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def started(count, arguments, folder, devices=1):
    """Processes of `python arguments(address, index)`, killed at the end if they still run.

    What they print is in `output-<index>.txt` in the folder, in which they run.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}",
    }
    processes = []
    try:
        for index in range(count):
            with open(folder / f"output-{index}.txt", "w") as output:
                command = [sys.executable, *map(str, arguments(address, index))]
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes, folder, seconds=240):
    """Waits for all to end well; what they printed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.wait(max(0, deadline - time.monotonic()))
    outputs = [(folder / f"output-{i}.txt").read_text() for i in range(len(processes))]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-5000:]
    return outputs


def wait_for(condition, processes, seconds=240):
    """Until something has happened, while all processes run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.02)
