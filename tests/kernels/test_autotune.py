"""Block sizes by measurement: the fastest, remembered, whatever the file's state."""

from __future__ import annotations

import json
import logging

import jax.numpy as jnp
import pytest

from pallas_kernels.autotune import autotune, default_cache

X = jnp.ones((4, 4))


def operation(x, *, blocks, scale=1.0):
    if blocks == 64:
        raise ValueError("64 does not fit")
    return x * scale * (blocks or 1)


@pytest.fixture
def tune(tmp_path):
    """Times by the value that comes out: 3 of the operation's own choice, |blocks - 20| else."""
    calls = []

    def measure(function, arguments):
        value = float(function(*arguments)[0, 0])
        calls.append(value)
        return 3.0 if value == 1 else abs(value - 20)

    def run(*arguments, candidates=(None, 8, 16, 64), **options):
        options = {"cache": tmp_path / "deep" / "tune.json", "measure": measure} | options
        return autotune(operation, *arguments, candidates=candidates, **options)

    return run, calls


def test_the_fastest_is_remembered_for_the_same_question_only(tune, caplog):
    run, calls = tune
    with caplog.at_level(logging.INFO):
        assert run(X) is None
    assert "64 does not work: 64 does not fit" in caplog.text
    assert run(X) is None and calls == [1, 8, 16]
    assert run(X, candidates=(8, 16)) == 16
    assert run(jnp.ones((2, 2))) is None and len(calls) == 8
    assert run(X, scale=20.0, candidates=(None, 8)) is None and len(calls) == 10


def test_the_file_may_be_damaged_or_out_of_reach(tune, tmp_path, caplog):
    run, calls = tune
    damaged = tmp_path / "tune.json"
    damaged.write_text("{")
    assert run(X, candidates=(8, 16), cache=damaged) == 16
    assert list(json.loads(damaged.read_text()).values()) == ["16"]
    assert run(X, candidates=(8, 16), cache=damaged / "below" / "a file") == 16
    assert "is not kept" in caplog.text and len(calls) == 4


def test_without_a_device_the_first_is_taken(tmp_path):
    assert autotune(operation, X, candidates=(8, 16), cache=tmp_path / "none.json") == 8
    assert not (tmp_path / "none.json").exists()


def test_what_cannot_be_chosen_is_said(tune):
    run, _ = tune
    with pytest.raises(ValueError, match="candidates is empty"):
        run(X, candidates=())
    with pytest.raises(ValueError, match=r"none of \['64'\] works"):
        run(X, candidates=(64,))


def test_where_results_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXLLM_AUTOTUNE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "jaxllm" / "autotune.json"
    monkeypatch.setenv("JAXLLM_AUTOTUNE_CACHE", str(tmp_path / "mine.json"))
    assert default_cache() == tmp_path / "mine.json"
