"""Training runs that do something terrible to themselves, each then started again.

python -m tests.faults.program FOLDER FAULT... runs each fault in a process of its own, in
FOLDER/FAULT, starts the same run again in another one, and writes FOLDER/outcomes.json. The
processes are forked, so that the imports are paid for once.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorboardX  # noqa: F401  (slow where torch is installed)

from jaxllm.training import loop, optimizers
from tests.training import toy

CONFIG = loop.LoopConfig(
    steps=8, log_every=3, checkpoint_every=2, keep=2, ema_decay=0.9, progress=False
)
OPTIMIZER = optimizers.OptimizerConfig(
    schedule=optimizers.ScheduleConfig("cosine", peak=0.05, total_steps=8)
)


def init():
    """The toy's parameters, and one that makes checkpoints large enough to be cut short."""
    return toy.init() | {"ballast": {"kernel": jax.random.normal(jax.random.key(0), (200, 300))}}


def train(workdir, loader, in_step=None):
    """Trains 8 steps with a checkpoint every 2; the compiled step calls `in_step`, if given."""

    def loss(params, batch, rng):
        if in_step:
            jax.debug.callback(in_step, batch["mark"][0, 0])
        scalar, metrics = toy.loss(params, {k: v for k, v in batch.items() if k != "mark"}, rng)
        return scalar + 0.01 * jnp.mean(params["ballast"]["kernel"] ** 2), metrics

    return loop.train(
        CONFIG,
        loss=loss,
        params=init,
        optimizer=OPTIMIZER,
        loader=loader,
        workdir=workdir,
    )


class Loader(toy.Loader):
    """The toy's batches, each marked with its step; `before(step)` is called before each."""

    def __init__(self, before=lambda step: None):
        super().__init__(noise=0.1)
        self._before = before

    def iterator(self, start_step=0):
        for step, batch in enumerate(super().iterator(start_step), start_step):
            self._before(step)
            yield batch | {"mark": 0 * batch["tokens"] + step}


class Faults:
    """What a run may do to itself, called `before` each batch is given out and `in_step`."""

    def __init__(self, workdir: pathlib.Path, name: str):
        self._workdir, self._name = workdir, name
        self._checkpoints = workdir / "checkpoints"

    def before(self, step: int) -> None:
        if step == 3 and self._name in ("kill_in_write", "kill_at_commit", "no_space", "too_large"):
            self._wait_for("2")
            getattr(self, self._name)()
        if step == 5 and self._name == "kill_in_step":
            self._wait_for("4")

    @property
    def in_step(self):
        return (lambda step: die() if step == 5 else None) if self._name == "kill_in_step" else None

    def kill_in_write(self) -> None:
        """As soon as the first arrays of step 4 are being written."""

        def watch():
            while not any(self._checkpoints.glob("4.*/state*/ocdbt*/d/*")):
                time.sleep(0.0005)
            die()

        threading.Thread(target=watch, daemon=True).start()

    def kill_at_commit(self) -> None:
        """When all arrays of step 4 are written, before its folder gets its name."""
        finalize = ocp.StandardCheckpointHandler.finalize

        def last(handler, directory):
            finalize(handler, directory)
            if any(part.startswith("4.") for part in pathlib.Path(directory).parts):
                die()

        ocp.StandardCheckpointHandler.finalize = last

    def too_large(self) -> None:
        """Writes fail in the middle of a file, as on a full disk or over a quota."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def no_space(self) -> None:
        """Fills the file system up; only the metrics still find room."""
        stat = os.statvfs(self._workdir)
        with (self._workdir / "filler").open("wb") as file:
            file.write(bytes(stat.f_bavail * stat.f_bsize - 200_000))

    def _wait_for(self, step: str) -> None:
        while not (self._checkpoints / step).exists():
            time.sleep(0.005)


def die() -> None:
    """As by the kernel's hand: nothing is flushed, closed or cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(workdir: pathlib.Path, fault: str) -> dict:
    """Trains in a forked process: exit status, what it printed, served steps and final state."""
    printed, report = workdir / "printed", workdir / "report.json"
    report.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faults = Faults(workdir, fault)
        loader = Loader(faults.before)
        result = train(workdir, loader, faults.in_step)
        leaves = jax.tree.leaves(jax.device_get(result.state))
        digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        report.write_text(json.dumps({"served": loader.served, "state": digest.hexdigest()}))
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "printed": printed.read_text(),
        "folder": str(workdir / "checkpoints"),
        "checkpoints": sorted(path.name for path in (workdir / "checkpoints").iterdir()),
        **(json.loads(report.read_text()) if report.exists() else {}),
    }


def main(folder: pathlib.Path, faults: list[str]) -> None:
    """Runs every fault, and the same again without it."""
    outcomes = {}
    for fault in faults:
        workdir = folder / fault
        workdir.mkdir()
        if fault == "no_space":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", workdir], check=True)
        outcomes[fault] = {"faulty": run(workdir, fault)}
        (workdir / "filler").unlink(missing_ok=True)
        if fault != "none":
            outcomes[fault]["again"] = run(workdir, "none")
        outcomes[fault]["metrics"] = (workdir / "metrics.jsonl").read_text()
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
