"""What a user waits for before the first step: imports, and the compilation of the tiny model.

Each number is from fresh processes, the median over `repeats`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

PROGRAMS = {
    "import_jax_seconds": "import jax",
    "import_jax_and_jaxllm_seconds": "import jax, jaxllm",
    "import_model_and_training_seconds": (
        "import jaxllm.models.decoder, jaxllm.training.step, jaxllm.training.optimizers"
    ),
}

COMPILE = """
import json, time
import jax, numpy as np
from experiments import config_files, pretrain
config = config_files.resolve("pretrain:tiny").config
lowered = pretrain.lower_steps(config)["train_step"]
start = time.perf_counter()
lowered.compile()
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def measure(*, repeats: int = 3) -> dict[str, Any]:
    """Median import times, and the compile time of the training step of pretrain:tiny."""
    result: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        code = (
            "import time; start = time.perf_counter()\n"
            f"{program}\n"
            "import json; print(json.dumps({'seconds': time.perf_counter() - start}))"
        )
        result[name] = statistics.median(_seconds(code) for _ in range(repeats))
    result["compile_tiny_step_seconds"] = statistics.median(
        _seconds(COMPILE) for _ in range(repeats)
    )
    return result


def _seconds(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a measured process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]
