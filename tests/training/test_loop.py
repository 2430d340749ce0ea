"""The loop: interrupted anywhere and started again, it ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.training import evaluate, loop, optimizers, step, writers
from jaxllm.training.checkpoints import CheckpointError
from tests.training import toy

# Reads that orbax leaves behind where one has failed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = loop.LoopConfig(
    steps=8,
    log_every=3,
    eval_every=4,
    checkpoint_every=2,
    keep=2,
    ema_decay=0.9,
    progress=False,
    tensorboard=False,
)
OPTIMIZER = optimizers.OptimizerConfig(
    schedule=optimizers.ScheduleConfig("cosine", peak=0.05, warmup_steps=2, total_steps=8)
)
SPEED = ("train/tokens_per_second", "train/mfu")


def _train(workdir, loader=None, config=CONFIG, **options):
    eval_step = step.make_eval_step(toy.loss)

    def evaluation(state):
        return evaluate.evaluate(eval_step, state.params, [toy.batch(0, seed=9)], total_bytes=50)

    return loop.train(
        config,
        loss=toy.loss,
        params=toy.init,
        optimizer=OPTIMIZER,
        loader=loader or toy.Loader(noise=0.1),
        workdir=workdir,
        evaluate=evaluation,
        **options,
    )


def _lines(workdir):
    records = writers.read_jsonl(pathlib.Path(workdir) / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in SPEED} for record in records]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """The runs here are of one program or two: they compile it together."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")

    def use(folder, seconds):
        for name, value in zip(names, (folder, seconds), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    before = [getattr(jax.config, name) for name in names]
    use(before[0] or str(tmp_path_factory.mktemp("compiled")), 0.0)
    yield
    use(*before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, _train(workdir)


def test_what_a_run_leaves_behind(uninterrupted):
    workdir, result = uninterrupted
    lines = _lines(workdir)
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 8]
    assert lines[0]["train/loss"] > lines[3]["train/loss"]
    assert {"train/accuracy", "train/learning_rate", "train/gradient_norm"} <= set(lines[0])
    assert {"eval/loss", "eval/perplexity", "eval/bits_per_byte"} <= set(lines[1])
    names = {path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()}
    assert names == {"6", "8"}
    assert not result.interrupted and int(result.state.step) == 8
    np.testing.assert_allclose(result.metrics["loss"], lines[3]["train/loss"])
    assert result.metrics["tokens_per_second"] > 0


@pytest.mark.parametrize("kill", [1, 4, 5])
def test_killed_at_any_step_and_resumed_ends_bit_for_bit(tmp_path, uninterrupted, kill):
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, toy.Loader(noise=0.1, fail_at=kill))
    loader = toy.Loader(noise=0.1)
    result = _train(tmp_path, loader)
    assert loader.served == list(range(kill - kill % 2, 8))
    whole, expected = uninterrupted
    jax.tree.map(np.testing.assert_array_equal, result.state, expected.state)
    assert _lines(tmp_path) == _lines(whole)
    assert result.evaluation == expected.evaluation


def test_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(
    tmp_path, uninterrupted, caplog
):
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, toy.Loader(noise=0.1, fail_at=5))
    for file in (tmp_path / "checkpoints" / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    loader = toy.Loader(noise=0.1)
    result = _train(tmp_path, loader)
    assert loader.served == list(range(2, 8))
    assert "set aside as damaged-4. Going on from checkpoint" in caplog.text
    assert (tmp_path / "checkpoints" / "damaged-4" / "state").is_dir()
    whole, expected = uninterrupted
    jax.tree.map(np.testing.assert_array_equal, result.state, expected.state)
    assert _lines(tmp_path) == _lines(whole)


def test_a_finished_run_is_not_run_again(uninterrupted):
    workdir, expected = uninterrupted
    before = _lines(workdir)
    loader = toy.Loader(noise=0.1)
    result = _train(workdir, loader)
    assert loader.served == [] and _lines(workdir) == before
    assert result.metrics == expected.metrics and result.evaluation == expected.evaluation


def test_other_data_are_refused_on_resume(uninterrupted):
    workdir, _ = uninterrupted
    with pytest.raises(CheckpointError, match="seed=0, this run has seed=5"):
        _train(workdir, toy.Loader(seed=5))


def test_nan_stops_naming_step_and_last_good_checkpoint(tmp_path):
    expected = r"step 6: loss nan.* on batch 5 \(toy rows 40 to 47\).*checkpoints/4\."
    with pytest.raises(loop.NonFiniteError, match=expected):
        _train(tmp_path, toy.Loader(noise=0.1, spoil_at=[5]))
    result = _train(tmp_path)  # repaired data: goes on from step 4
    assert int(result.state.step) == 8


def test_nonfinite_steps_can_be_skipped(tmp_path):
    config = dataclasses.replace(CONFIG, steps=7, skip_nonfinite=2)

    def loader(*spoilt, **options):
        return toy.Loader(noise=0.1, spoil_at=spoilt, **options)

    before = _train(tmp_path / "before", loader(), dataclasses.replace(config, steps=5)).state
    skipped = _train(tmp_path / "skipped", loader(5, 6), config)
    assert int(skipped.state.step) == 7
    jax.tree.map(np.testing.assert_array_equal, skipped.state.replace(step=before.step), before)
    lines = [line for line in _lines(tmp_path / "skipped") if "train/skipped" in line]
    assert [(line["step"], line["train/skipped"]) for line in lines] == [(3, 0), (6, 1), (7, 2)]
    # Means are over the steps that count: of step 7 there are none, of step 6 those of 4 and 5.
    assert np.isfinite(lines[1]["train/loss"]) and "train/gradient_norm" not in lines[2]

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "killed", loader(5, 6, fail_at=6), config)
    resumed = _train(tmp_path / "killed", loader(5, 6), config)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, skipped.state)
    assert _lines(tmp_path / "killed") == _lines(tmp_path / "skipped")

    # The count of those in a row goes through the checkpoint of step 6, too.
    workdir = tmp_path / "too many"
    with pytest.raises(KeyboardInterrupt):
        _train(workdir, loader(4, 5, 6, fail_at=6), config)
    message = r"step 7: .* on batch 6 .*, after 2 such steps in a row that were skipped; .*/6\."
    with pytest.raises(loop.NonFiniteError, match=message):
        _train(workdir, loader(4, 5, 6), config)


def test_loader_that_ends_early_is_named(tmp_path):
    with pytest.raises(ValueError, match="ended before the batch of step 3"):
        _train(tmp_path, toy.Loader(end=3))


def test_sigterm_saves_and_exits_cleanly(tmp_path, uninterrupted):
    script = (
        "import time, sys\n"
        "from tests.training import test_loop, toy\n"
        "class Slow(toy.Loader):\n"
        "    def iterator(self, start_step=0):\n"
        "        for batch in super().iterator(start_step):\n"
        "            time.sleep(0.4 if self.served[-1] >= 3 else 0)\n"
        "            yield batch\n"
        "result = test_loop._train(sys.argv[1], Slow(noise=0.1))\n"
        "print(result.interrupted, int(result.state.step))\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    interrupted, done = output.split()
    assert interrupted == "True" and 3 <= int(done) < 8
    assert (tmp_path / "checkpoints" / done).is_dir()
    loader = toy.Loader(noise=0.1)
    result = _train(tmp_path, loader)
    assert loader.served[0] == int(done)
    jax.tree.map(np.testing.assert_array_equal, result.state, uninterrupted[1].state)
    assert _lines(tmp_path) == _lines(uninterrupted[0])


def test_sigterm_handler_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="ended before"):
        _train(tmp_path, toy.Loader(end=0))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "loop.steps=0"),
        ({"accumulate": 0}, "loop.accumulate=0"),
        ({"log_every": -1}, "loop.log_every=-1"),
        ({"skip_nonfinite": -1}, "loop.skip_nonfinite=-1"),
        ({"ema_decay": 1.0}, "loop.ema_decay=1.0"),
    ],
)
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        loop.LoopConfig(**{"steps": 5} | change)
