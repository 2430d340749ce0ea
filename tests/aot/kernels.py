"""Compiles a kernel for hardware that is not there; run as a program, in an environment for it.

python -m tests.aot.kernels TOPOLOGY MODULE FUNCTION    prints what the function returns as JSON
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

from jaxllm.compilation import topology as topologies

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compiled(topology: str, module: str, function: str):
    """What `function(devices)` of a module of tests returns, in a process for the topology."""
    environment = topologies.environment(topologies.parse(topology), os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.kernels", topology, module, function],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    name, module_name, function_name = sys.argv[1:]
    run = getattr(importlib.import_module(module_name), function_name)
    print(json.dumps(run(topologies.devices(topologies.parse(name)))))
