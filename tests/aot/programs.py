"""What the tests of ahead-of-time compilation share."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

from experiments import launch
from jaxllm.compilation import topology

# A network of two thin layers: seconds to compile.
MICRO = (
    "model.embed_dim=128",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.mlp_dim=256",
    "model.remat=full",
    "tokenizer.vocab_size=512",
    "data.row_length=64",
    "optimizer.name=adamw",
)

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `aot`)"
)
needs_cuda_plugin = pytest.mark.skipif(
    not topology.has_cuda_plugin(), reason="JAX's CUDA plugin is not installed (`make test` does)"
)


def compile_for(workdir: pathlib.Path, name: str, *overrides: str, config: str = "pretrain:tiny"):
    """Runs the launcher with --topology; returns what topology.json holds."""
    arguments = [f"--config.{override}" for override in (*MICRO, *overrides)]
    command = ["--config", config, f"--topology={name}", "--workdir", str(workdir), *arguments]
    assert launch.main(command) == 0
    return json.loads((workdir / "topology.json").read_text())
