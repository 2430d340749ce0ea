"""safetensors files, read and written tensor by tensor.

The format is eight bytes of header length, a JSON header and raw arrays. Rows are read with
ordinary file reads: through a memory map every page that was ever touched would count as resident
memory of the process until the file is closed, which makes loading cost the size of a whole shard.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.models.hf.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      CheckpointError: the file is missing, corrupt or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, also of types (bfloat16) that have no buffer."""
    return array.reshape(-1).view(np.uint8).data


class SafetensorsFile:
    """One file, opened for reading rows of its tensors.

    Attributes:
      path: of the file.
      tensors: name -> (dtype name of the format, shape, first byte in the file).
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            # Unbuffered: read-ahead of small buffers would only copy twice.
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}.") from error
        start = self._file.read(8)
        if start == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`."
            )
        length = int.from_bytes(start, "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path} is not a safetensors file, or is truncated ({size} bytes): download it "
                "again."
            )
        try:
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            self.tensors = {
                name: self._locate(name, entry, 8 + length, size) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} has a corrupt header ({error}): download it again."
            ) from error

    def _locate(
        self, name: str, entry: Mapping[str, Any], data: int, size: int
    ) -> tuple[str, tuple[int, ...], int]:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not 0 <= begin <= end:
            raise CheckpointError(f"tensor {name!r} in {self.path} has offsets {begin}, {end}.")
        if data + end > size:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is truncated: it ends at byte {data + end} of a "
                "file "
                f"of {size} bytes. Download the file again."
            )
        count = int(np.prod(shape, dtype=np.int64))
        if kind in DTYPES and end - begin != DTYPES[kind].itemsize * count:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has {end - begin} bytes, which do not fit shape "
                f"{list(shape)} of {kind}."
            )
        return kind, shape, data + begin

    def dtype(self, name: str) -> np.dtype:
        """NumPy type of a tensor.

        Raises:
          CheckpointError: a type that is no plain floating-point number.
        """
        kind = self.tensors[name][0]
        if kind not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has type {kind}: expected one of "
                f"{sorted(DTYPES)}. "
                "Quantised checkpoints are not read; load the original one and quantise it here."
            )
        return DTYPES[kind]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 (along the first axis) of a tensor, and nothing else."""
        dtype = self.dtype(name)
        _, shape, offset = self.tensors[name]
        out = np.empty((stop - start, *shape[1:]), dtype)
        row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        view, done = _bytes(out), 0
        self._file.seek(offset + start * row)
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    f"tensor {name!r} in {self.path} is truncated: download the file again."
                )
            done += count
        return out

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_file(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    produce: Callable[[str], np.ndarray],
) -> None:
    """Writes one file, asking for each tensor when its turn comes.

    Args:
      path: of the file.
      tensors: type and shape by name, in the order of writing.
      produce: gives the array of a name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, (dtype, shape) in tensors.items():
            array = np.ascontiguousarray(produce(name))
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(
                    f"{name}: got {array.dtype}{array.shape}, expected {dtype}{shape}."
                )
            file.write(_bytes(array))
        file.flush()
        os.fsync(file.fileno())


def plan_shards(sizes: Iterable[tuple[str, int]], limit: float) -> dict[str, list[str]]:
    """Groups tensors in order into files of at most `limit` bytes (a larger tensor gets its own).

    Returns:
      File name -> tensor names; one file is called model.safetensors.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes:
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, start=1)}
