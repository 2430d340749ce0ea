"""Runs of one, two and four processes: one curve, moved between them, and ended by a death."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest

from jaxllm.training import checkpoints, distributed, writers
from tests.distributed import processes, small_run

STEPS = 14
TEXTS = [
    "".join(chr(97 + (i * k + k * k) % 26) for i in range(40 + 7 * k)) for k in range(1, 16)
]  # Some 90 rows: the steps below pass through an epoch's end.


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(small_run.build_cache(tmp_path_factory.mktemp("cache"), TEXTS))


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache):
    """The uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("single")
    losses = small_run.job(str(folder), cache, STEPS)
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    return losses


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache):
    """The workdir of a whole run of two processes, with checkpoints after 10 and all steps."""
    folder = tmp_path_factory.mktemp("two")
    job = {"workdir": str(folder / "whole"), "cache": cache, "steps": STEPS, "mesh": {}}
    run_jobs(2, [job], folder)
    return folder / "whole"


@pytest.fixture
def stopped(two, tmp_path):
    """As `two`, ended after 10 steps."""
    folder = tmp_path / "moved"
    shutil.copytree(two, folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    return folder


def test_two_processes(single, two):
    np.testing.assert_allclose(small_run.curve(two), single, rtol=0, atol=1e-5)
    for process in range(2):
        read = json.loads((two / f"rows-{STEPS}-{process}.json").read_text())
        mine = np.arange(STEPS * small_run.ROWS).reshape(STEPS, 2, -1)[:, process]
        assert read == mine.reshape(-1).tolist()


def test_a_run_moves_from_two_processes_to_one_to_four(single, stopped, tmp_path, cache):
    small_run.job(str(stopped), cache, 12)
    jobs = [
        {
            "workdir": str(stopped),
            "cache": cache,
            "steps": STEPS,
            "mesh": {"fsdp": 2, "tensor": 2},
        },
        {"workdir": str(tmp_path / "whole"), "cache": cache, "steps": STEPS, "mesh": {}},
    ]
    run_jobs(4, jobs, tmp_path)
    lines = writers.read_jsonl(stopped / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for workdir in (stopped, tmp_path / "whole"):
        np.testing.assert_allclose(small_run.curve(workdir), single, rtol=0, atol=1e-5)
    # Each row once, and in turn; two processes that share rows by the mesh both read them.
    rows = np.arange(STEPS * small_run.ROWS).reshape(STEPS, small_run.ROWS)
    for process in range(4):
        read = json.loads((stopped / f"rows-{STEPS}-{process}.json").read_text())
        assert read == rows[12:].reshape(2, 2, -1)[:, process // 2].reshape(-1).tolist()
        read = json.loads((tmp_path / "whole" / f"rows-{STEPS}-{process}.json").read_text())
        assert read == rows.reshape(STEPS, 4, -1)[:, process].reshape(-1).tolist()
    assert json.loads((stopped / "rows-12-0.json").read_text()) == rows[10:12].reshape(-1).tolist()


def test_other_data_is_refused_by_name(stopped, tmp_path, cache):
    model = small_run.MODEL.replace(vocab_size=259)

    def refused(**other):
        loader = small_run.CachedLoader(**{"cache": cache} | other)
        with pytest.raises(checkpoints.CheckpointError) as caught:
            small_run.run(stopped, STEPS, model=model, loader=loader)
        return str(caught.value)

    assert "batch_size=8, this run has batch_size=4" in refused(batch_size=4)
    assert "row_length=16, this run has rows.row_length=8" in refused(row_length=8)
    other = small_run.build_cache(tmp_path / "other", [*TEXTS, "one more document"])
    assert "rows.data=" in refused(cache=other)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_death_ends_the_other_and_a_restart_goes_on(single, tmp_path, cache, victim):
    job = {"workdir": str(tmp_path), "cache": cache, "steps": STEPS, "mesh": {}}
    job |= {"pause": 0.2, "checkpoint_every": 2}
    folder = tmp_path / "checkpoints"

    def saved():
        return (
            [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
        )

    with start_jobs(2, [job], tmp_path) as running:
        processes.wait_for(saved, running)
        running[victim].send_signal(signal.SIGKILL)
        died, other = time.monotonic(), running[1 - victim]
        status = other.wait(60)
        # Ten seconds without heartbeats, or at once where the connection breaks; then its farewell.
        assert status != 0 and time.monotonic() - died < 40
    done = max(saved())
    assert done < STEPS
    with start_jobs(2, [job | {"pause": 0.4}], tmp_path) as running:
        processes.wait_for(lambda: max(saved(), default=0) > done, running)
        running[victim].send_signal(signal.SIGTERM)  # both stop, and save at the same step
        processes.ended(running, tmp_path)
    stopped = max(saved())
    lines = writers.read_jsonl(tmp_path / "metrics.jsonl")
    assert done < stopped < STEPS and lines[-1]["step"] == stopped
    small_run.job(str(tmp_path), cache, STEPS)
    np.testing.assert_allclose(small_run.curve(tmp_path), single, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("held", "blocks"),
    [
        ([{0, 1}, {2, 3}], [(0, 2), (1, 2)]),
        ([{0, 2}, {1, 3}], [(0, 2), (1, 2)]),
        ([{0}, {1}, {0}, {1}], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ([{0, 1}, {0, 1}], [(0, 1), (0, 1)]),
        # Blocks that overlap, or differ in size: each process has to read everything.
        ([{0, 1}, {1, 2}, {2, 0}], [(0, 1)] * 3),
        ([{0, 1, 2}, {3}], [(0, 1)] * 2),
    ],
)
def test_rows_follow_the_mesh(held, blocks):
    found = [distributed.block_of(i, dict(enumerate(held))) for i in range(len(held))]
    assert found == blocks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "a:1", "process_id": 0}, "without num_processes: give all three"),
        ({"process_id": 1}, "process_id=1 without coordinator and num_processes"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "expected HOST:PORT"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id=2 of"),
    ],
)
def test_what_cannot_be_joined_is_refused(given, message):
    with pytest.raises(distributed.ClusterError, match=message):
        distributed.initialize(**given)


def start_jobs(count, jobs, folder):
    def arguments(address, index):
        return small_run.__file__, address, count, index, json.dumps(jobs)

    return processes.started(count, arguments, pathlib.Path(folder))


def run_jobs(count, jobs, folder):
    with start_jobs(count, jobs, folder) as running:
        return processes.ended(running, pathlib.Path(folder))
