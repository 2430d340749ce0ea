"""What loading a checkpoint costs: peak resident memory beside the model itself, and time.

A random sharded Llama checkpoint of the wanted size is written tensor by tensor, then loaded in a
fresh process, whose peak resident memory is the answer. `python -m experiments.benchmarks.loading
2` prints it.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from jaxllm.models.config import ModelConfig
from jaxllm.models.hf.export import config_to_hf
from jaxllm.models.hf.names import family_of
from jaxllm.models.hf.plan import plan_leaves
from jaxllm.models.hf.safetensors_io import INDEX, plan_shards, write_file


def write_random_llama(
    folder: pathlib.Path, gigabytes: float, max_shard_bytes: float = 5e8, seed: int = 0
) -> int:
    """Writes a sharded bfloat16 Llama checkpoint of about `gigabytes` (10^9 bytes).

    Args:
      folder: where; created.
      gigabytes: the size. Below 0.2 the widths shrink too.
      max_shard_bytes: largest size of one file.
      seed: of the values.

    Returns:
      Its exact size in bytes, headers left out.
    """
    width = 2048 if gigabytes >= 0.2 else 256
    config = ModelConfig(
        vocab_size=16 * width,
        embed_dim=width,
        num_layers=1,
        num_heads=16,
        num_kv_heads=4,
        mlp_dim=11 * width // 4,
        param_dtype="bfloat16",
    )
    per_layer = 2 * (2 * width * width + 2 * width * width // 4 + 3 * width * config.mlp_dim)
    rest = 2 * 2 * config.vocab_size * width
    layers = max(1, round((gigabytes * 1e9 - rest) / per_layer))
    config = config.replace(num_layers=layers)
    dtype = np.dtype(ml_dtypes.bfloat16)
    shapes = {
        leaf.stored(position)[0]: leaf.stored_shape
        for leaf in plan_leaves(config, family_of(config))
        for position in leaf.positions()
    }
    shards = plan_shards(
        ((name, math.prod(shape) * dtype.itemsize) for name, shape in shapes.items()),
        max_shard_bytes,
    )
    rng = np.random.default_rng(seed)

    def produce(name: str) -> np.ndarray:
        values = rng.standard_normal(shapes[name], dtype=np.float32) * np.float32(0.02)
        return (1 + values if name.endswith("norm.weight") else values).astype(dtype)

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    for file, names in shards.items():
        write_file(folder / file, {name: (dtype, shapes[name]) for name in names}, produce)
    if len(shards) > 1:
        where = {name: file for file, names in shards.items() for name in names}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes.values())


def measure(gigabytes: float = 2.0, *, devices: int = 1) -> dict[str, float | int]:
    """Loads a synthetic checkpoint in a fresh process and measures it.

    Args:
      gigabytes: size of the checkpoint, 10^9 bytes.
      devices: simulated CPU devices to shard it over (fully sharded along the embedding); 1 = no
        mesh.

    Returns:
      model_bytes, largest_tensor_bytes, baseline_bytes (the process with jax started), peak_bytes,
      extra_bytes (peak - baseline - model: what loading needs beside the model), extra_in_tensors,
      seconds.

    Raises:
      RuntimeError: the process failed, or the platform does not report peak memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        model_bytes = write_random_llama(path, gigabytes)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        command = [sys.executable, "-m", "experiments.benchmarks.loading", "--load", str(path)]
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            cwd=pathlib.Path(__file__).resolve().parents[2],
        )
    if result.returncode:
        raise RuntimeError(f"loading failed: {result.stderr.strip()[-1000:]}")
    measured = json.loads(result.stdout.splitlines()[-1])
    extra = measured["peak_bytes"] - measured["baseline_bytes"] - model_bytes
    return {
        "model_bytes": model_bytes,
        **measured,
        "extra_bytes": extra,
        "extra_in_tensors": extra / measured["largest_tensor_bytes"],
    }


def _memory(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError as error:
        raise RuntimeError(
            "peak memory is read from /proc/self/status, which is missing."
        ) from error
    line = next(line for line in status.splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def _load(path: str) -> dict[str, float | int]:
    """Runs in the fresh process."""
    import jax
    import jax.numpy as jnp

    from jaxllm.models.hf import load_hf

    mesh = None
    if len(jax.devices()) > 1:
        from jaxllm.training.sharding import MeshConfig, create_mesh

        mesh = create_mesh(MeshConfig(fsdp=-1))
    jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
    baseline, start = _memory("VmRSS"), time.perf_counter()
    _, params = load_hf(path, mesh)
    jax.block_until_ready(params)
    return {
        "largest_tensor_bytes": max(
            params["embed"]["tokens"].nbytes, params["lm_head"]["kernel"].nbytes
        ),
        "baseline_bytes": baseline,
        "peak_bytes": _memory("VmHWM"),
        "resident_bytes": _memory("VmRSS"),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        print(json.dumps(_load(sys.argv[2])))
    else:
        print(
            json.dumps(
                measure(float(sys.argv[1]), devices=int((sys.argv[2:] or ["1"])[0])), indent=2
            )
        )
