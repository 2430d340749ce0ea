"""A pre-training run that takes seconds, and helpers to start it as a user does."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]

OVERRIDES = {
    "data.row_length": 32,
    "data.batch_size": 8,
    "tokenizer.path": "byte",
    "model.embed_dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.mlp_dim": 64,
    "train.steps": 12,
    "train.log_every": 2,
    "train.eval_every": 4,
    "train.eval_batches": 2,
    "train.checkpoint_every": 3,
    "train.final_eval_batches": 0,
    "sample.prompts": "('def ', 'if ')",
    "sample.max_new_tokens": 8,
}


def text_file(folder: pathlib.Path) -> pathlib.Path:
    """A source file of the standard library: some English, some code."""
    path = folder / "text.txt"
    path.write_text(pathlib.Path(textwrap.__file__).read_text(encoding="utf-8"))
    return path


def arguments(folder: pathlib.Path, workdir: str, **overrides: object) -> list[str]:
    """The launcher's arguments for a micro run in `folder`."""
    values = OVERRIDES | {"data.path": text_file(folder)}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return ["--config", "pretrain:text", "--workdir", workdir, *flags]


def start(folder: pathlib.Path, launcher_arguments: list[str]) -> subprocess.Popen:
    """Starts the launcher in a process of its own with one device."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.launch", *launcher_arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, expect: int = 0) -> str:
    """Waits for the launcher; returns what it printed."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == expect, output
    return output
