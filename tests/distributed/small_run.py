"""A short run of a tiny decoder, whatever the number of devices and processes.

As a program: python small_run.py ADDRESS PROCESSES PROCESS JOBS, where JOBS is a JSON list of the
arguments of `job`, which are done one after the other.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import jax
import numpy as np

from jaxllm import data
from jaxllm.models import host, parameters
from jaxllm.models.config import ModelConfig
from jaxllm.training import distributed, loop, objectives, optimizers, sharding, writers

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
    """Packed rows of two documents with restarted positions, on one process."""

    def iterator(self, start_step=0):
        step = start_step
        while True:
            rng = np.random.default_rng([7, step])
            start, stride = rng.integers(0, 64, (ROWS, 1)), rng.integers(1, 4, (ROWS, 1))
            tokens = ((start + stride * np.arange(LENGTH + 1)) % 64).astype(np.int32)
            cut = rng.integers(4, 12, (ROWS, 1))
            place = np.arange(LENGTH)
            yield {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "weights": (place != cut - 1).astype(np.float32),
                "segment_ids": np.where(place < cut, 1, 2).astype(np.int32),
                "positions": np.where(place < cut, place, place - cut).astype(np.int32),
            }
            step += 1

    def fingerprint(self):
        return {"rows": ROWS, "length": LENGTH}


def build_cache(folder, texts):
    """A token cache of bytes; returns its folder."""
    tokenizer = data.ByteTokenizer()
    source = data.Examples([{"text": text} for text in texts], "texts")
    chain = data.LanguageModeling(tokenizer)
    return data.build_cache(folder, "letters", {"train": source}, chain, tokenizer).path


class CachedLoader(data.Loader):
    """The rows of a token cache that this process is to read, with a record of those it did read.

    Args:
      cache: folder of the cache.
      mesh: of the run.
      pause: seconds before every batch.
    """

    def __init__(self, cache, mesh=None, batch_size=ROWS, row_length=LENGTH, pause=0.0):
        index, count = distributed.row_block(mesh)
        rows = _Recorded(data.open_cache(cache).split("train"), row_length)
        super().__init__(
            rows, batch_size, seed=3, process_index=index, process_count=count, prefetch=0
        )
        self._pause = pause

    def batch(self, step):
        time.sleep(self._pause)
        return super().batch(step)


class _Recorded(data.PackedRows):
    def __init__(self, split, row_length):
        super().__init__(split, row_length)
        self.taken = []

    def take(self, seed, index):
        self.taken += index.tolist()
        return super().take(seed, index)


def run(
    workdir,
    steps=20,
    mesh_config=None,
    accumulate=1,
    model=MODEL,
    loader=None,
    checkpoint_every=10,
):
    """Trains and returns the loss of every step (on the first process)."""
    mesh = None if mesh_config is None else sharding.create_mesh(mesh_config)
    loop.train(
        loop.LoopConfig(
            steps=steps,
            log_every=1,
            checkpoint_every=checkpoint_every,
            accumulate=accumulate,
            progress=False,
            tensorboard=False,
        ),
        loss=objectives.language_model_loss(model, chunk=32),
        params=lambda: parameters.init_params(model, jax.random.key(0)),
        optimizer=optimizers.OptimizerConfig(
            schedule=optimizers.ScheduleConfig("constant", peak=0.01), weight_decay=0.1
        ),
        loader=loader or Loader(),
        workdir=workdir,
        mesh=mesh,
        axes=parameters.logical_axes(model),
    )
    if jax.process_index() != 0:
        return None
    return curve(workdir)


def curve(workdir):
    """The loss of every step so far."""
    return [line["train/loss"] for line in writers.read_jsonl(f"{workdir}/metrics.jsonl")]


def job(workdir, cache, steps, mesh=None, pause=0.0, checkpoint_every=10):
    """A run on the rows of a token cache; each process writes which ones it has read."""
    mesh_config = None if mesh is None else sharding.MeshConfig(**mesh)
    created = None if mesh is None else sharding.create_mesh(mesh_config)
    loader = CachedLoader(cache, created, pause=pause)
    model = MODEL.replace(vocab_size=data.ByteTokenizer.vocab_size)
    losses = run(workdir, steps, mesh_config, 1, model, loader, checkpoint_every)
    rows = pathlib.Path(workdir) / f"rows-{steps}-{jax.process_index()}.json"
    rows.write_text(json.dumps(loader.rows.taken))
    return losses


def main(address, processes, process, jobs):
    """One process of several."""
    # Soon, so that tests need not wait long for the death of the others to be noticed.
    distributed.initialize(address, int(processes), int(process), peer_timeout=10)
    for arguments in json.loads(jobs):
        job(**arguments)
    check_to_host()


def check_to_host():
    """What lies on several processes comes whole to each."""
    mesh = sharding.create_mesh()
    wanted = np.arange(4.0 * jax.device_count()).reshape(-1, 2)
    spread = jax.jit(lambda: wanted, out_shardings=sharding.batch_sharding(wanted.shape, mesh))()
    assert not spread.is_fully_addressable
    np.testing.assert_array_equal(host.to_host(spread), wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
