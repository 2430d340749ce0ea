"""Training survives what machines do: killed at bad moments, and disks that are full."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.distributed import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORTABLE = ("none", "kill_in_step", "kill_in_write", "kill_at_commit", "too_large")
# A name space of its own, in which anybody may mount a small file system and fill it up.
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount")


def can_mount(folder) -> bool:
    try:
        mount = ["mount", "-t", "tmpfs", "none", str(folder)]
        return not subprocess.run([*PRIVATE, *mount], capture_output=True).returncode
    except OSError:
        return False


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    private = can_mount(folder)
    program = [sys.executable, "-m", "tests.faults.program", str(folder), *PORTABLE]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": processes.FLAGS,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [*PRIVATE, *program, "no_space"] if private else program,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "outcomes.json").read_text())


def same_as_undisturbed(outcomes, fault, first_step):
    """Started again, it lost only what came after the checkpoint, and ends with the same bits."""
    again, whole = outcomes[fault]["again"], outcomes["none"]["faulty"]
    assert again["status"] == 0, again["printed"]
    assert again["served"] == list(range(first_step, 8))
    assert again["state"] == whole["state"]
    assert again["checkpoints"] == ["6", "8"]  # and no leftovers
    lines, expected = (
        [
            {k: v for k, v in json.loads(line).items() if "tokens_per_second" not in k}
            for line in outcomes[name]["metrics"].splitlines()
        ]
        for name in (fault, "none")
    )
    assert lines == expected and [line["step"] for line in lines] == [3, 6, 8]


@pytest.mark.parametrize(
    ("fault", "last", "torn"),
    [("kill_in_step", 4, False), ("kill_in_write", 2, True), ("kill_at_commit", 2, True)],
)
def test_killed(outcomes, fault, last, torn):
    faulty = outcomes[fault]["faulty"]
    assert faulty["status"] == -signal.SIGKILL and "served" not in faulty
    numbers = [name for name in faulty["checkpoints"] if name.isdigit()]
    assert max(map(int, numbers)) == last
    assert any(name.startswith("4.") for name in faulty["checkpoints"]) == torn
    same_as_undisturbed(outcomes, fault, last)


@pytest.mark.parametrize(
    ("fault", "reason"), [("no_space", "No space left on device"), ("too_large", "File too large")]
)
def test_write_that_fails(outcomes, fault, reason):
    if fault not in outcomes:
        pytest.skip("this system lets nobody mount a file system of their own")
    faulty = outcomes[fault]["faulty"]
    assert faulty["status"] == 1
    (message,) = (line for line in faulty["printed"].splitlines() if "WriteError: " in line)
    assert f"cannot write a checkpoint into {faulty['folder']}: {reason} (" in message
    assert message.endswith("The last good one is 2.")
    same_as_undisturbed(outcomes, fault, 2)
