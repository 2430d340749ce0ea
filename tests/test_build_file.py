"""The Bazel BUILD file lists what exists, and everything that exists."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxllm", "pallas_kernels", "experiments", "configs")


def evaluate() -> dict[str, dict]:
    """Runs BUILD (a subset of Python) with stand-ins for the rules: {target name: attributes}."""
    targets: dict[str, dict] = {}

    def rule(kind):
        def add(**attributes):
            name = attributes["name"]
            assert name not in targets, f"target {name} is defined twice"
            targets[name] = {"kind": kind, **attributes}

        return add

    def glob(include, exclude=()):
        def matches(patterns):
            found = {path for pattern in patterns for path in ROOT.glob(pattern)}
            return {str(p.relative_to(ROOT)) for p in found if p.is_file()}

        return sorted(matches(include) - matches(exclude))

    namespace = {name: rule(name) for name in ("py_library", "py_binary", "py_test")}
    namespace |= {name: lambda *a, **k: None for name in ("package", "licenses", "exports_files")}
    exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), namespace | {"glob": glob})
    return targets


@pytest.fixture(scope="module")
def targets():
    return evaluate()


def sources(target: dict) -> list[str]:
    return list(target.get("srcs", [])) + list(target.get("data", []))


def test_every_listed_file_exists(targets):
    for name, target in targets.items():
        assert target.get("srcs"), f"{name} has no sources"
        missing = [path for path in sources(target) if not (ROOT / path).is_file()]
        assert not missing, f"{name} lists {missing}"
        if "main" in target:
            assert target["main"] in target["srcs"]
        unknown = [dep for dep in target.get("deps", []) if dep.removeprefix(":") not in targets]
        assert not unknown, f"{name} depends on {unknown}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_is_listed(targets, package):
    exist = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
    assert exist and exist == set(targets[package]["srcs"])


def test_every_test_has_a_target(targets):
    exist = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    listed = {t["args"][0] for t in targets.values() if t["kind"] == "py_test"}
    assert listed == exist


def test_bazel_parses_it():
    bazel = shutil.which("bazel")
    if not bazel:
        pytest.skip("bazel is not installed (Debian: bazel-bootstrap)")
    query = subprocess.run(
        [bazel, "--batch", "query", "//..."], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if query.returncode and "rules_python" in query.stderr and "fetch" in query.stderr:
        pytest.skip("this bazel fetches rules_python, and there is no network")
    assert query.returncode == 0, query.stderr
    assert set(query.stdout.split()) == {f"//:{name}" for name in evaluate()}
