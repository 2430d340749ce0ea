"""Importing the package is quick and touches neither TensorFlow nor a device."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxllm

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxllm", "pallas_kernels", "experiments", "configs")


def python(code: str) -> str:
    """Runs code in a fresh interpreter from another folder, and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_version_is_the_one_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jaxllm.__version__ == project["version"]


def names(requirements: list[str]) -> set[str]:
    """Names of distributions, as `packages_distributions` writes them."""
    return {re.match(r"[\w.-]+", r).group().lower().replace("_", "-") for r in requirements}


# Packages that are of no use without their extra.
ONLY_WITH_EXTRA = (ROOT / "jaxllm" / "serving",)


def imported_modules(package: str, top_level_only: bool) -> set[str]:
    """Roots of the modules that a package's files import."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        if top_level_only and path.parent in ONLY_WITH_EXTRA:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if top_level_only else ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = names(project["dependencies"])
    extras = names(sum(project["optional-dependencies"].values(), []))
    distributions = importlib.metadata.packages_distributions()
    for top_level_only, declared in ((True, base), (False, base | extras)):
        for module in imported_modules(package, top_level_only):
            owners = {d.lower().replace("_", "-") for d in distributions.get(module, [module])}
            # jax and jaxlib come together; TensorFlow comes with seqio.
            owners |= {"jax": {"jax"}, "tensorflow": {"seqio"}}.get(module, set())
            assert owners & declared, f"{package} imports {module}, which is not declared"


def test_import_is_light():
    # Processor time, because the machine may be busy.
    code = """
import sys, time
start = time.process_time()
import jaxllm
print(time.process_time() - start)
print([m for m in ("jax", "tensorflow", "seqio", "torch") if m in sys.modules])
"""
    seconds, heavy = python(code).split("\n")
    assert heavy == "[]"
    assert float(seconds) < 0.5


def test_whole_library_imports_without_tensorflow_or_device():
    code = """
import importlib, pkgutil, sys
import jaxllm, pallas_kernels, experiments, configs
names = []
for package in (jaxllm, pallas_kernels, experiments, configs):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        names.append(module.name)
from jax._src import xla_bridge
print(len(names), xla_bridge.backends_are_initialized())
print([m for m in ("tensorflow", "seqio", "torch", "transformers") if m in sys.modules])
"""
    counts, heavy = python(code).split("\n")
    count, initialised = counts.split()
    assert int(count) > 5
    assert initialised == "False", "an import initialised a device"
    assert heavy == "[]"
