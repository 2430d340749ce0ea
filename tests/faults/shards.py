"""Two processes save, the file of one is cut, both resume: ADDRESS INDEX FOLDER."""

from __future__ import annotations

import logging
import pathlib
import sys

import jax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from jaxllm.training import optimizers, sharding, state
from jaxllm.training.checkpoints import Checkpoints


def main(address: str, index: int, folder: pathlib.Path) -> None:
    jax.distributed.initialize(address, 2, index)
    carried = state.create_state(
        lambda: {"kernel": jax.random.normal(jax.random.key(0), (200, 100))},
        optimizers.create_optimizer(optimizers.OptimizerConfig("sgd")),
        mesh=sharding.create_mesh(sharding.MeshConfig(fsdp=2)),
        axes={"kernel": PartitionSpec("embed", None)},
    )
    placed = jax.tree.map(lambda x: x.sharding, carried)
    next_step = jax.jit(lambda x: x.replace(step=x.step + 1), out_shardings=placed)
    store = Checkpoints(folder)
    for _ in range(2):
        carried = next_step(carried)
        store.save(carried)
    store.close()
    multihost_utils.sync_global_devices("saved")
    if index == 0:
        files = (folder / "2" / "state" / "ocdbt.process_1" / "d").iterdir()
        largest = max(files, key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    multihost_utils.sync_global_devices("cut")
    store = Checkpoints(folder)
    restored, _ = store.resume(carried)
    print("resumed from", int(restored.step), store.steps(), flush=True)
    store.save(carried)
    store.close()


if __name__ == "__main__":
    logging.basicConfig()
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
