"""The token cache: tokenized documents in flat files, built once and checked when opened.

A cache is a folder:

    manifest.json            format, recipe and its hash, per split: counts, sizes, checksums,
                             bad records; a checksum over the manifest itself
    <split>.tokens           uint16 or uint32, all documents one after the other
    <split>.offsets          int64 [documents + 1], where each begins
    <split>.weights          float32, the loss weight of each token (only where a task has some)

An example of several parts (chosen and rejected) takes several documents in a row. Everything
is little-endian. `jaxllm.data.cache_builder` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.data.errors import CacheError
from jaxllm.data.files import sha256_file, sha256_json

FORMAT = "jaxllm token cache"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The documents of one split.

    Attributes:
      name: such as "train".
      tokens: uint16 or uint32 [tokens], a read-only memory map.
      offsets: int64 [documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
      weights: float32 [tokens] or None: the loss weight of predicting each token.
      parts: names of the documents of one example; ("tokens",) for plain documents.
      text_bytes: UTF-8 size of the text that the documents predict, or 0 if unknown.
      fingerprint: hash of the manifest.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None
    parts: tuple[str, ...] = ("tokens",)
    text_bytes: int = 0
    fingerprint: str = ""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        return self.num_documents // len(self.parts)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, i: int) -> np.ndarray:
        """Tokens of document i, int32 [n]."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]].astype(np.int32)

    @classmethod
    def from_documents(
        cls,
        documents: list[np.ndarray],
        weights: list[np.ndarray] | None = None,
        parts: tuple[str, ...] = ("tokens",),
        name: str = "memory",
    ) -> TokenSplit:
        """A split in memory, for small sets and tests."""
        lengths = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate([np.asarray(d, np.uint32) for d in documents])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        values = None
        if weights is not None:
            values = np.concatenate([np.asarray(w, np.float32) for w in weights])
            if len(values) != len(tokens):
                raise CacheError(f"{len(values)} weights for {len(tokens)} tokens")
        digest = sha256_json([tokens.tolist(), lengths.tolist()])
        return cls(name, tokens, offsets, values, parts, 0, digest)


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """An opened cache.

    Attributes:
      path: its folder.
      manifest: what manifest.json holds.
    """

    path: pathlib.Path
    manifest: Mapping[str, Any]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    def fingerprint(self) -> str:
        """Hash of the manifest, and through its checksums of every byte of the cache."""
        return self.manifest["checksum"]

    def bad_records(self, split: str) -> Mapping[str, Any]:
        """{"count": n, "first": [{"where", "reason"}, ...]} of the records that were skipped."""
        return self._entry(split)["bad_records"]

    def split(self, name: str) -> TokenSplit:
        """Maps the files of a split.

        Raises:
          CacheError: no such split, or offsets that do not fit the tokens.
        """
        entry = self._entry(name)
        arrays = {
            kind: _map(self.path / file["name"], file["dtype"], file["bytes"])
            for kind, file in entry["files"].items()
        }
        offsets = np.array(arrays["offsets"])
        fits = (
            len(offsets) == entry["documents"] + 1
            and offsets[0] == 0
            and offsets[-1] == len(arrays["tokens"]) == entry["tokens"]
            and bool((np.diff(offsets) > 0).all())
        )
        if not fits:
            raise CacheError(
                f"{self.path / entry['files']['offsets']['name']}: the offsets do not fit the "
                f"{entry['tokens']} tokens; {_REBUILD}"
            )
        return TokenSplit(
            name,
            arrays["tokens"],
            offsets,
            arrays.get("weights"),
            tuple(self.manifest["parts"]),
            entry["text_bytes"],
            f"{self.fingerprint()}/{name}",
        )

    def verify(self) -> None:
        """Compares every file with its checksum.

        Raises:
          CacheError: naming the first file that differs.
        """
        for entry in self.manifest["splits"].values():
            for file in entry["files"].values():
                found = sha256_file(self.path / file["name"])
                if found != file["sha256"]:
                    raise CacheError(
                        f"{self.path / file['name']}: SHA-256 is {found}, but the manifest says "
                        f"{file['sha256']}; {_REBUILD}"
                    )

    def _entry(self, split: str) -> Mapping[str, Any]:
        if split not in self.manifest["splits"]:
            have = ", ".join(self.splits)
            raise CacheError(f"{self.path}: no split {split!r}; it has {have}")
        return self.manifest["splits"][split]


_REBUILD = "delete this folder to build the cache again"


def open_cache(path: str | os.PathLike[str], verify_checksums: bool = False) -> TokenCache:
    """Opens a cache; the manifest, and presence and size of every file, are always checked.

    Args:
      path: the folder.
      verify_checksums: read every file and compare its hash too.

    Raises:
      CacheError: missing, truncated, corrupt, or of another format version; names the file.
    """
    path = pathlib.Path(path)
    manifest = _read_manifest(path / "manifest.json")
    for entry in manifest["splits"].values():
        for file in entry["files"].values():
            name = path / file["name"]
            size = name.stat().st_size if name.is_file() else None
            if size != file["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CacheError(
                    f"{name} {found}, but the manifest says {file['bytes']} bytes; {_REBUILD}"
                )
    cache = TokenCache(path, manifest)
    if verify_checksums:
        cache.verify()
    return cache


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own checksum."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return {**body, "checksum": sha256_json(body)}


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise CacheError(f"{path.parent}: no token cache (there is no manifest.json)")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CacheError(f"{path}: not JSON ({error}); {_REBUILD}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheError(f"{path}: no manifest of a token cache; {_REBUILD}")
    if manifest.get("version") != VERSION:
        raise CacheError(
            f"{path}: version {manifest.get('version')!r} of the cache format, expected {VERSION}; "
            f"{_REBUILD}"
        )
    if sealed(manifest)["checksum"] != manifest.get("checksum"):
        raise CacheError(f"{path}: the manifest does not match its own checksum; {_REBUILD}")
    return manifest


def _map(path: pathlib.Path, dtype: str, size: int) -> np.ndarray:
    kind = np.dtype(dtype)
    if size % kind.itemsize:
        raise CacheError(f"{path}: {size} bytes are no whole number of {dtype}; {_REBUILD}")
    # A plain view: indexing a memmap object is slower.
    return np.memmap(path, kind, mode="r").view(np.ndarray)
