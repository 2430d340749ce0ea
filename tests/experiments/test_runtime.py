"""The launcher's settings of the process: compilation cache, profile, their errors."""

from __future__ import annotations

import chex
import jax
import pytest

from experiments import launch, runtime
from experiments.errors import UsageError
from jaxllm.training import loop, optimizers, profiling
from tests.training import toy


def train(workdir, steps):
    return loop.train(
        loop.LoopConfig(steps=steps, progress=False, tensorboard=False),
        loss=toy.loss,
        params=toy.init,
        optimizer=optimizers.OptimizerConfig(),
        loader=toy.Loader(),
        workdir=workdir,
    ).state.params


@pytest.fixture
def no_cache_folder():
    """Whatever a test sets, the process is left as it was."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


def test_the_cache_lies_beside_the_workdir(tmp_path, no_cache_folder):
    runtime.configure(runtime.Runtime(compile_cache=False), tmp_path / "a")
    assert folder() is None
    runtime.configure(runtime.Runtime(), tmp_path / "a")
    assert folder() == str(tmp_path / runtime.CACHE)
    # Whoever named a folder keeps it.
    runtime.configure(runtime.Runtime(), tmp_path / "elsewhere" / "b")
    assert folder() == str(tmp_path / runtime.CACHE)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, no_cache_folder, capsys):
    (tmp_path / runtime.CACHE).write_text("a file where the folder should be")
    runtime.configure(runtime.Runtime(), tmp_path / "a")
    assert folder() is None
    assert "warning: no compilation cache" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5", "5:5", "7:3", "a:b", "-1:2"])
def test_bad_profile_steps_are_refused(text, capsys):
    with pytest.raises(UsageError, match="expected START:STOP"):
        runtime.parse_steps(text)
    assert launch.main(["--config", "pretrain", f"--profile_steps={text}"]) == 2
    assert "expected START:STOP" in capsys.readouterr().err


def test_chosen_steps_are_traced_and_nothing_else_changes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(("start", path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop",)))
    plain = train(tmp_path / "plain", 5)
    with profiling.steps(1, 3, tmp_path / "profile"):
        traced = train(tmp_path / "traced", 5)
    assert calls == [("start", tmp_path / "profile"), ("stop",)]
    assert (tmp_path / "profile" / "memory.prof").stat().st_size > 0
    chex.assert_trees_all_equal(plain, traced)
    with pytest.raises(ValueError, match="expected 0 <= first < stop"), profiling.steps(3, 3, "x"):
        pass


def test_a_loop_that_ends_within_the_steps_ends_the_trace(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    with profiling.steps(2, 100, tmp_path / "profile"):
        train(tmp_path / "run", 4)
    assert calls == ["start", "stop"]
