"""What the README says can be done can be done."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from experiments import config_files
from jaxllm.models import hf
from jaxllm.models.hf.names import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_examples_import_what_exists():
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
        for name in re.findall(r'resolve_model\("([^"]+)"\)', block):
            assert name in hf.MODELS


def test_commands_name_existing_configs_keys_and_targets():
    commands = "\n".join(blocks("bash") + re.findall(r"`(python -m [^`]+)`", README))
    specs = re.findall(r"experiments\.launch --config (\S+)(.*)", commands)
    assert len(specs) >= 5
    for spec, rest in specs:
        overrides = re.findall(r'--config\.(\S+?=(?:"[^"]*"|\S+))', rest)
        config_files.resolve(spec, [override.replace('"', "") for override in overrides])
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_tables_are_complete():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for extra in project["project"]["optional-dependencies"]:
        assert f"`{extra}`" in README
    for marker in project["tool"]["pytest"]["ini_options"]["markers"]:
        assert f"`{marker.split(':')[0]}`" in README
    for family in FAMILIES:
        assert f"`{family}`" in README


@pytest.mark.slow
def test_first_python_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."
