"""A checkpoint folder as one set of named tensors."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jaxllm.models.hf.errors import CheckpointError
from jaxllm.models.hf.safetensors_io import INDEX, SINGLE, SafetensorsFile, read_json

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Source(Protocol):
    """Named tensors of which rows can be read."""

    def names(self) -> Iterable[str]:
        """All tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype(self, name: str) -> np.dtype:
        """Type of the rows that `read` returns."""

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of a tensor."""

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def close(self) -> None:
        """Closes the files."""


class SafetensorsFolder:
    """model.safetensors, or the files that model.safetensors.index.json lists.

    Raises:
      CheckpointError: no such files, an index that does not fit them, or weights that are pickled.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._files: dict[pathlib.Path, SafetensorsFile] = {}
        self._tensors: dict[str, SafetensorsFile] = {}
        if (folder / INDEX).is_file():
            self._open_index(folder)
        elif (folder / SINGLE).is_file():
            file = self._open(folder / SINGLE)
            self._tensors = dict.fromkeys(file.tensors, file)
        else:
            raise CheckpointError(_what_is_there(folder))

    def _open(self, path: pathlib.Path) -> SafetensorsFile:
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
        return self._files[path]

    def _open_index(self, folder: pathlib.Path) -> None:
        index = folder / INDEX
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{index} lacks 'weight_map': download it again.")
        for name, file_name in weights.items():
            path = folder / str(file_name)
            if path.parent != folder:
                raise CheckpointError(
                    f"{index} points outside of the folder: {file_name!r} for {name!r}."
                )
            if not path.is_file():
                raise CheckpointError(
                    f"{index} says that {name!r} is in {file_name!r}, which is missing: download "
                    "it again."
                )
            file = self._open(path)
            if name not in file.tensors:
                raise CheckpointError(
                    f"{index} says that {name!r} is in {file_name!r}, which lacks it."
                )
            self._tensors[name] = file
        for file in self._files.values():
            unlisted = sorted(set(file.tensors) - set(weights))
            if unlisted:
                raise CheckpointError(
                    f"{file.path} holds {unlisted[0]!r}, which {index} does not list."
                )

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].tensors[name][1]

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype(name)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._tensors[name].read(name, start, stop)

    def where(self, name: str) -> str:
        return str(self._tensors[name].path)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _what_is_there(folder: pathlib.Path) -> str:
    """Why a folder without safetensors files cannot be loaded."""
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
    if pickled:
        return (
            f"{folder} holds pickled weights ({pickled[0]}), which can execute code when they are "
            "read, so they are refused: convert them to safetensors (on a machine that trusts "
            "them: "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`), or take a revision "
            "of the model that has safetensors files."
        )
    gguf = sorted(p.name for p in folder.glob("*.gguf"))
    if gguf:
        return f"{folder} holds GGUF files: give the path of one, for example {folder / gguf[0]}."
    return f"{folder} holds neither {SINGLE} nor {INDEX}."
