"""A short run of a tiny decoder, whatever the number of devices and processes.

As a program: python small_run.py WORKDIR STEPS FSDP TENSOR ADDRESS PAUSE PROCESS PROCESSES
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

from jaxllm.models import parameters
from jaxllm.models.config import ModelConfig
from jaxllm.training import loop, objectives, optimizers, sharding, writers

MODEL = ModelConfig(
    vocab_size=64,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=32,
    max_positions=32,
    tie_embeddings=True,
)
ROWS, LENGTH = 8, 16


class Loader:
    """Packed rows of two documents with restarted positions; each process serves its block."""

    def __init__(self, pause=0.0):
        self._pause = pause

    def iterator(self, start_step=0):
        block = ROWS // jax.process_count()
        first = jax.process_index() * block
        step = start_step
        while True:
            time.sleep(self._pause)
            rng = np.random.default_rng([7, step])
            start, stride = rng.integers(0, 64, (ROWS, 1)), rng.integers(1, 4, (ROWS, 1))
            tokens = ((start + stride * np.arange(LENGTH + 1)) % 64).astype(np.int32)
            cut = rng.integers(4, 12, (ROWS, 1))
            place = np.arange(LENGTH)
            batch = {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "weights": (place != cut - 1).astype(np.float32),
                "segment_ids": np.where(place < cut, 1, 2).astype(np.int32),
                "positions": np.where(place < cut, place, place - cut).astype(np.int32),
            }
            yield {name: value[first : first + block] for name, value in batch.items()}
            step += 1

    def fingerprint(self):
        return {"rows": ROWS, "length": LENGTH}


def run(workdir, steps=20, mesh_config=None, accumulate=1, model=MODEL, pause=0.0):
    """Trains and returns the loss of every step (on the first process)."""
    mesh = None if mesh_config is None else sharding.create_mesh(mesh_config)
    loop.train(
        loop.LoopConfig(
            steps=steps,
            log_every=1,
            checkpoint_every=10,
            accumulate=accumulate,
            progress=False,
            tensorboard=False,
        ),
        loss=objectives.language_model_loss(model, chunk=32),
        params=lambda: parameters.init_params(model, jax.random.key(0)),
        optimizer=optimizers.OptimizerConfig(
            schedule=optimizers.ScheduleConfig("constant", peak=0.01), weight_decay=0.1
        ),
        loader=Loader(pause),
        workdir=workdir,
        mesh=mesh,
        axes=parameters.logical_axes(model),
    )
    if jax.process_index() != 0:
        return None
    return [line["train/loss"] for line in writers.read_jsonl(f"{workdir}/metrics.jsonl")]


def main(workdir, steps, fsdp, tensor, address, pause, process, processes):
    """One process of several."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(process))
    mesh_config = sharding.MeshConfig(fsdp=int(fsdp), tensor=int(tensor))
    run(workdir, int(steps), mesh_config, pause=float(pause))


if __name__ == "__main__":
    main(*sys.argv[1:])
