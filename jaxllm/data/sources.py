"""Where records come from: text files, JSON lines, parquet, Hugging Face datasets, lists.

A source is a small frozen dataclass. `records()` yields `Record`s and `BadRecord`s, so that the
reader of a large corpus can count and report the bad ones; iterating a source yields the plain
records and raises at the first bad one. `describe()` is what a recipe's hash is made of, with a
hash of the contents.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from jaxllm.data.errors import DataError, RecordError
from jaxllm.data.files import sha256_file, sha256_json

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True)
class Record:
    """A good record: where it stands and its fields."""

    where: str
    value: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A bad record: where it stands, what is wrong, and the error where one was raised."""

    where: str
    reason: str
    cause: Exception | None = None


class Source:
    """Base class: subclasses give `records` and `describe`."""

    def records(self) -> Iterator[Record | BadRecord]:
        raise NotImplementedError

    def describe(self) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in self.records():
            if isinstance(record, BadRecord):
                raise RecordError(record.where, record.reason)
            yield record.value


@dataclasses.dataclass(frozen=True)
class TextFiles(Source):
    """UTF-8 text files.

    Attributes:
      paths: a path, a glob pattern, or a list of them.
      split: "file" (one record a file), "line", or "paragraph" (blocks between blank lines).
        Lines end at a newline only; blank ones are left out.
    Records: {field: text}.
    """

    paths: Paths
    split: str = "file"
    field: str = "text"

    def __post_init__(self):
        if self.split not in ("file", "line", "paragraph"):
            raise DataError(f"split is {self.split!r}; expected 'file', 'line' or 'paragraph'")

    def records(self) -> Iterator[Record | BadRecord]:
        for path in expand(self.paths):
            if self.split == "file":
                yield self._record(str(path), path.read_bytes())
                continue
            for number, block in _blocks(path, self.split):
                yield self._record(f"{path}:{number}", block)

    def _record(self, where: str, data: bytes) -> Record | BadRecord:
        try:
            return Record(where, {self.field: data.decode("utf-8")})
        except UnicodeDecodeError as error:
            return BadRecord(where, _not_utf8(error))

    def describe(self) -> Any:
        return {"text": contents(self.paths), "split": self.split, "field": self.field}


@dataclasses.dataclass(frozen=True)
class JsonLines(Source):
    """JSON objects, one a line; `.gz` files are unpacked while reading.

    Lines are cut at newline bytes only (records may contain U+2028 and its like); blank lines are
    left out. A line is bad when it is no UTF-8, no JSON (NaN and Infinity are none), no object,
    lacks a required field, has something other than text in a text field, or holds a string
    with a lone surrogate, which no tokenizer can encode.

    Attributes:
      paths: a path, a glob pattern, or a list of them.
      text_fields: fields that must be there and hold text.
      fields: further fields that must be there.
    """

    paths: Paths
    text_fields: tuple[str, ...] = ("text",)
    fields: tuple[str, ...] = ()

    def records(self) -> Iterator[Record | BadRecord]:
        for path in expand(self.paths):
            number = 0
            try:
                with _open(path) as file:
                    for number, line in enumerate(file, start=1):
                        if number == 1:
                            line = line.removeprefix(b"\xef\xbb\xbf")
                        if line.strip():
                            yield self._record(f"{path}:{number}", line)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield BadRecord(f"{path}:{number + 1}", f"the gzip file is damaged ({error})")

    def _record(self, where: str, line: bytes) -> Record | BadRecord:
        try:
            value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            return BadRecord(where, _not_utf8(error))
        except (ValueError, RecursionError) as error:
            return BadRecord(where, f"not JSON ({error})")
        reason = check_record(value, self.text_fields, self.fields)
        return BadRecord(where, reason) if reason else Record(where, value)

    def describe(self) -> Any:
        return {
            "jsonl": contents(self.paths),
            "text_fields": list(self.text_fields),
            "fields": list(self.fields),
        }


@dataclasses.dataclass(frozen=True)
class Parquet(Source):
    """Rows of parquet files.

    Attributes:
      paths: a path, a glob pattern, or a list of them.
      text_fields, fields: columns, as for `JsonLines`; only these are read.
    """

    paths: Paths
    text_fields: tuple[str, ...] = ("text",)
    fields: tuple[str, ...] = ()

    def records(self) -> Iterator[Record | BadRecord]:
        import pyarrow
        import pyarrow.parquet as parquet

        columns = [*self.text_fields, *self.fields]
        for path in expand(self.paths):
            row = 0
            try:
                with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                    missing = [name for name in columns if name not in file.schema_arrow.names]
                    if missing:
                        have = ", ".join(file.schema_arrow.names)
                        raise DataError(f"{path}: no column {missing[0]!r}; it has {have}")
                    for batch in file.iter_batches(batch_size=1024, columns=columns):
                        for value in batch.to_pylist():
                            reason = check_record(value, self.text_fields, self.fields)
                            where = f"{path}:{row}"
                            yield BadRecord(where, reason) if reason else Record(where, value)
                            row += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(f"{path}: parquet damaged from row {row} on ({error})") from error

    def describe(self) -> Any:
        return {
            "parquet": contents(self.paths),
            "text_fields": list(self.text_fields),
            "fields": list(self.fields),
        }


@dataclasses.dataclass(frozen=True)
class HuggingFaceDataset(Source):
    """A data set of the hub or of a local folder, by the `datasets` library.

    Attributes:
      path, name, split, revision: arguments of `datasets.load_dataset`.
      text_fields, fields: as for `JsonLines`.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_fields: tuple[str, ...] = ("text",)
    fields: tuple[str, ...] = ()

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"the data set {self.path!r} needs the package datasets: pip install 'jaxllm[hub]'"
            ) from error
        try:
            return datasets.load_dataset(
                self.path, self.name, split=self.split, revision=self.revision
            )
        except Exception as error:  # the library raises many kinds
            raise DataError(
                f"the data set {self.path!r} (name {self.name!r}, split {self.split!r}) cannot be "
                f"loaded: {error}. Without a network, give local files as JsonLines or Parquet"
            ) from error

    def records(self) -> Iterator[Record | BadRecord]:
        for row, value in enumerate(self._load()):
            where = f"{self.path}[{self.split}]:{row}"
            reason = check_record(value, self.text_fields, self.fields)
            yield BadRecord(where, reason) if reason else Record(where, dict(value))

    def describe(self) -> Any:
        return {**dataclasses.asdict(self), "fingerprint": self._load()._fingerprint}


@dataclasses.dataclass(frozen=True)
class Examples(Source):
    """Records given as they are: small sets, tests."""

    values: Sequence[Mapping[str, Any]]
    name: str = "examples"

    def records(self) -> Iterator[Record | BadRecord]:
        for i, value in enumerate(self.values):
            reason = check_record(value, (), ())
            where = f"{self.name}:{i}"
            yield BadRecord(where, reason) if reason else Record(where, dict(value))

    def describe(self) -> Any:
        try:
            return {"examples": sha256_json([dict(value) for value in self.values])}
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.name}: only JSON values can be hashed ({error})") from error


def check_record(value: Any, text_fields: Sequence[str], fields: Sequence[str]) -> str | None:
    """What is wrong with a record, or None."""
    if not isinstance(value, Mapping):
        return f"a JSON object was expected, not {type(value).__name__}"
    for name in (*text_fields, *fields):
        if name not in value:
            have = ", ".join(map(repr, value)) or "nothing"
            return f"the field {name!r} is missing; it has {have}"
    for name in text_fields:
        if not isinstance(value[name], str):
            return f"the field {name!r} holds {type(value[name]).__name__}, not text"
    for name, item in value.items():
        if not _encodable(name) or not _encodable(item):
            return f"the field {name!r} holds a lone surrogate, which is no text"
    return None


def expand(paths: Paths) -> list[pathlib.Path]:
    """Files of a path, a glob pattern (sorted), or a list of these.

    Raises:
      DataError: a path or pattern without a file, or no path at all.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise DataError("no input files: the list of paths is empty")
    files = []
    for item in given:
        path = pathlib.Path(item)
        found = [path] if path.is_file() else sorted(map(pathlib.Path, glob.glob(str(item))))
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(f"no file matches {str(item)!r}")
        files += found
    return files


def contents(paths: Paths) -> list[str]:
    """Hashes of the files' contents, in reading order: names and places do not matter."""
    return [sha256_file(path) for path in expand(paths)]


def _open(path: pathlib.Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))  # type: ignore[arg-type]
    return open(path, "rb")


def _blocks(path: pathlib.Path, split: str) -> Iterator[tuple[int, bytes]]:
    block: list[bytes] = []
    first = 1
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            blank = not line.strip()
            if split == "line" and not blank:
                yield number, line.rstrip(b"\r\n")
            elif split == "paragraph" and not blank:
                first = first if block else number
                block.append(line)
            elif block:
                yield first, b"".join(block)
                block = []
    if block:
        yield first, b"".join(block)


def _encodable(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, Mapping):
        return all(_encodable(key) and _encodable(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_encodable, value))


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8 (byte 0x{byte:02x} at {error.start})"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
