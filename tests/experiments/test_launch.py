"""The launcher: what it refuses and how it says so, the table, config.json and the workdir."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import config_files, launch
from experiments.errors import UsageError

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONFIG = '''"""Adds two numbers.

More words.
"""
import ml_collections
from ml_collections import config_dict

EXPERIMENT = "adder_runner"
PAPER = "Adding, 1999"
VARIANTS = {"tiny": "one and two", "large": "big numbers"}


def get_config(variant="tiny"):
    scale = {"tiny": 1, "large": 100}[variant]
    return ml_collections.ConfigDict(
        {
            "a": scale,
            "b": {"learning_rate": 0.5, "shape": (1, 2), "verbose": False},
            "path": config_dict.placeholder(str),
            "mesh": {"data": 1},
        }
    )
'''

RUNNER = """
import jax.numpy as jnp

def run(config, workdir):
    if config.path == "wrong":
        from experiments.errors import UsageError
        raise UsageError("path=wrong: expected right")
    return {"sum": jnp.float32(config.a + config.b.learning_rate), "bad": float("nan")}
"""


@pytest.fixture
def adder(tmp_path, monkeypatch):
    """A config file and its runner in an empty current folder."""
    (tmp_path / "adder.py").write_text(CONFIG)
    (tmp_path / "adder_runner.py").write_text(RUNNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refused(capsys, *arguments: str) -> str:
    """Runs the launcher, expects status 2 and one line on stderr, and returns the line."""
    assert launch.main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_unknown_config_variant_and_key_are_named_with_a_suggestion(adder, capsys):
    assert "Did you mean pretrain?" in refused(capsys, "--config", "configs/pretrian.py")
    assert "Did you mean pretrain?" in refused(capsys, "--config=pretrian:tiny")
    line = refused(capsys, "--config", "adder.py:larg")
    assert "'larg'" in line and "Did you mean large?" in line
    line = refused(capsys, "--config", "adder.py", "--config.b.learningrate=1")
    assert "'b.learningrate'" in line and "Did you mean b.learning_rate?" in line
    assert not (adder / "runs").exists()


def test_wrong_values_and_arguments_are_refused(adder, capsys):
    assert "--config.a=one" in refused(capsys, "--config", "adder.py", "--config.a=one")
    assert "needs a value" in refused(capsys, "--config", "adder.py", "--config.a")
    line = refused(capsys, "--config", "adder.py", "--config.b=1")
    assert "is a group" in line and "b.learning_rate" in line
    assert "Did you mean --workdir?" in refused(capsys, "--config", "adder.py", "--workdri=x")
    assert "--list" in refused(capsys)
    (adder / "empty.py").write_text("x = 1\n")
    assert "needs EXPERIMENT" in refused(capsys, "--config", "empty.py")
    (adder / "broken.py").write_text("def :\n")
    assert "not valid Python" in refused(capsys, "--config", "broken.py")


def test_the_runner_s_usage_error_is_one_line_too(adder, capsys):
    assert refused(capsys, "--config", "adder.py", "--config.path=wrong").endswith("expected right")


def test_overrides_reach_the_runner_and_config_json(adder, capsys):
    arguments = ["--config", "adder.py:large", "--config.a=3", "--config.b.shape=(4,5)"]
    arguments += ["--config.b.verbose", "true", "--config.path", "here", "--workdir", "out"]
    assert launch.main(arguments) == 0
    written = json.loads((adder / "out" / "config.json").read_text())
    assert written["experiment"] == "adder" and written["variant"] == "large"
    assert written["config"] == {
        "a": 3,
        "b": {"learning_rate": 0.5, "shape": [4, 5], "verbose": True},
        "path": "here",
        "mesh": {"data": 1},
    }
    results = json.loads((adder / "out" / "results.json").read_text())
    assert results == {"sum": 3.5, "bad": "nan"}
    assert sorted(p.name for p in (adder / "out").iterdir()) == ["config.json", "results.json"]


def test_a_workdir_serves_one_config(adder, capsys):
    assert launch.main(["--config", "adder.py"]) == 0
    assert (adder / "runs" / "adder-tiny" / "results.json").exists()
    assert launch.main(["--config", "adder.py:tiny"]) == 0
    capsys.readouterr()
    line = refused(capsys, "--config", "adder.py", "--config.b.learning_rate=0.1")
    assert "b.learning_rate (0.5 there, 0.1 here)" in line
    line = refused(capsys, "--config", "adder.py:large", "--workdir", "runs/adder-tiny")
    assert "variant ('tiny' there, 'large' here)" in line
    # Other devices do not make it another run.
    assert launch.main(["--config", "adder.py", "--config.mesh.data=2"]) == 0
    written = json.loads((adder / "runs" / "adder-tiny" / "config.json").read_text())
    assert written["config"]["mesh"] == {"data": 2}
    (adder / "runs" / "adder-tiny" / "config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, "--config", "adder.py")


def test_list_shows_every_config_without_running_it(adder, capsys):
    (adder / "configs").mkdir()
    heavy = CONFIG.replace("import ml_collections\n", "raise RuntimeError\n", 1)
    (adder / "configs" / "adder.py").write_text(heavy)
    assert launch.main(["--list"]) == 0
    table = capsys.readouterr().out
    assert "Adds two numbers. (Adding, 1999)" in table
    for name in [path.stem for path in config_files.INSTALLED.glob("[!_]*.py")]:
        assert f"\n{name} " in table
    assert "big numbers" in table and "More words" not in table


def test_installed_configs_resolve_from_another_folder(adder):
    for spec in ("configs/pretrain.py", "pretrain", "pretrain:tiny"):
        assert config_files.resolve(spec).file.path == ROOT / "configs" / "pretrain.py"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_every_variant_of_every_config_resolves(path):
    file = config_files.describe(path)
    for variant in file.variants:
        resolved = config_files.resolve(f"{path}:{variant}")
        json.dumps(config_files.to_json(resolved.config), allow_nan=False)
        with pytest.raises(UsageError):
            config_files.resolve(f"{path}:{variant}", ["no_such_key=1"])


def test_command_line_exit_status_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--config", "nothing"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no config 'nothing'")
    assert "Traceback" not in done.stderr
