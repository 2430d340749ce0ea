"""Building token caches.

    cache = build_cache("caches", "stories", {"train": JsonLines("train.jsonl")},
                        LanguageModeling(tokenizer), tokenizer)

The folder's name carries the hash of the recipe (sources with their contents, preprocessors,
tokenizer), so another recipe gets another folder and an existing one is opened at once. A cache
is written into a temporary folder and renamed when complete: a killed build leaves nothing that
could be opened, and of several builders at once the first to finish wins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from jaxllm.data import cache as cache_lib
from jaxllm.data.describe import describe
from jaxllm.data.errors import DataError, RecordError
from jaxllm.data.files import sha256_json, write_json
from jaxllm.data.preprocessors import Example, Preprocessor, weights_name
from jaxllm.data.sources import BadRecord, Record, Source
from jaxllm.data.tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_CHUNK = 512
_LISTED = 100


def build_cache(
    root: str | os.PathLike[str],
    name: str,
    splits: Mapping[str, Source],
    preprocessors: Preprocessor | Sequence[Preprocessor] | Mapping[str, Sequence[Preprocessor]],
    tokenizer: Tokenizer,
    *,
    on_bad: str = "refuse",
    progress: bool | None = None,
) -> cache_lib.TokenCache:
    """Opens the cache of a recipe, building it first where it is not there.

    Args:
      root: folder of caches.
      name: first part of the cache's folder name.
      splits: source of each split.
      preprocessors: one, a chain, or a chain for each split; the last gives token sequences.
      tokenizer: the one that the preprocessors use; fixes the range of ids and the hash.
      on_bad: "refuse" raises at the first bad record; "skip" leaves bad records out, counts them
        and lists the first hundred with file and line in the manifest.
      progress: show a progress bar; default: on a terminal.

    Raises:
      RecordError: a bad record, with its place (on_bad="refuse").
      DataError: a split without a single document, or an unusable recipe.
      CacheError: the cache that is there is damaged, or there is no room for it.
    """
    if on_bad not in ("refuse", "skip"):
        raise DataError(f"on_bad is {on_bad!r}; expected 'refuse' or 'skip'")
    if not splits:
        raise DataError(f"{name}: a cache needs at least one split")
    chains = {split: _chain(preprocessors, split) for split in splits}
    parts = {tuple(getattr(chain[-1], "parts", ("tokens",))) for chain in chains.values()}
    if len(parts) != 1:
        raise DataError(f"{name}: the splits have different parts: {sorted(parts)}")
    recipe = {
        "splits": {
            split: {"source": describe(source), "preprocessors": describe(chains[split])}
            for split, source in splits.items()
        },
        "tokenizer": tokenizer.fingerprint(),
        "on_bad": on_bad,
    }

    (only_parts,) = parts

    def write(folder: pathlib.Path) -> None:
        writer = CacheWriter(folder, only_parts, tokenizer.vocab_size, recipe)
        for split, source in splits.items():
            shown = sys.stderr.isatty() if progress is None else progress
            bar = tqdm.tqdm(
                source.records(), f"{name} {split}", unit=" records", leave=False, disable=not shown
            )
            writer.write_split(split, _examples(bar, chains[split]), on_bad)
        writer.finish()

    return build_once(root, name, recipe, write)


def cache_path(root: str | os.PathLike[str], name: str, recipe: Any) -> pathlib.Path:
    """Folder of the cache of a recipe."""
    return pathlib.Path(root) / f"{name}-{_recipe_hash(recipe)[:16]}"


def build_once(
    root: str | os.PathLike[str], name: str, recipe: Any, write: Any
) -> cache_lib.TokenCache:
    """Opens a recipe's cache, or has `write(folder)` fill a temporary folder and renames that.

    Every file is compared with its checksum, at every opening.

    Of several processes that build the same cache at once, the first to finish keeps its folder
    and the others open it; what they wrote is thrown away.
    """
    final = cache_path(root, name, recipe)
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
        try:
            os.chmod(temporary, 0o755)
            with _room_for(final):
                write(temporary)
            try:
                os.rename(temporary, final)
            except OSError:
                if not final.exists():
                    raise
                # Another builder was first: its folder stays.
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    # The recipe has the hash of the sources: reading the tokens once more costs no more than that.
    cache = cache_lib.open_cache(final, verify_checksums=True)
    if cache.manifest["recipe_hash"] != _recipe_hash(recipe):
        raise cache_lib.CacheError(f"{final}: the manifest belongs to another recipe")
    return cache


class CacheWriter:
    """Writes the splits of one cache into a folder, then its manifest.

    Args:
      folder: an existing, empty folder.
      parts: names of the documents of one example.
      vocab_size: ids must be below it.
      recipe: what the cache is made of, JSON values only.
    """

    def __init__(self, folder: pathlib.Path, parts: tuple[str, ...], vocab_size: int, recipe: Any):
        self._folder = folder
        self._parts = parts
        self._vocab_size = vocab_size
        self._recipe = recipe
        self._dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
        self._splits: dict[str, Any] = {}

    def write_split(
        self,
        split: str,
        examples: Iterable[tuple[str, Example | None] | BadRecord],
        on_bad: str = "refuse",
    ) -> None:
        """Writes a split from (place, example) pairs; None is a record that was filtered out.

        An example with a document of fewer than two tokens has nothing to predict: it is left out
        and counted as empty.

        Raises:
          RecordError: a bad record and on_bad="refuse".
          DataError: no document at all.
        """
        if not split or "/" in split or split.startswith("."):
            raise DataError(f"split name {split!r} cannot be a file name")
        bad: dict[str, Any] = {"count": 0, "first": []}
        counts = {"documents": 0, "tokens": 0, "text_bytes": 0, "filtered": 0, "empty": 0}
        lengths: list[int] = []
        with contextlib.ExitStack() as stack:
            open_file = lambda kind: stack.enter_context(  # noqa: E731
                _HashedFile(self._folder / f"{split}.{kind}")
            )
            files = {"tokens": open_file("tokens")}
            for item in examples:
                if not isinstance(item, BadRecord) and item[1] is not None:
                    item = self._checked(*item)
                if isinstance(item, BadRecord):
                    if on_bad == "refuse":
                        raise RecordError(item.where, item.reason) from item.cause
                    bad["count"] += 1
                    if len(bad["first"]) < _LISTED:
                        bad["first"].append({"where": item.where, "reason": item.reason})
                    continue
                example = item[1]
                if example is None:
                    counts["filtered"] += 1
                    continue
                if min(len(example[part]) for part in self._parts) < 2:
                    counts["empty"] += 1
                    continue
                for part in self._parts:
                    tokens = example[part]
                    weights = example.get(weights_name(part))
                    if weights is not None and "weights" not in files:
                        files["weights"] = open_file("weights")
                        for start in range(0, counts["tokens"], 1 << 20):  # those before weigh 1
                            n = min(1 << 20, counts["tokens"] - start)
                            files["weights"].write(np.ones(n, "<f4").tobytes())
                    files["tokens"].write(tokens.astype(self._dtype).tobytes())
                    if "weights" in files:
                        values = np.ones(len(tokens)) if weights is None else weights
                        files["weights"].write(np.asarray(values, "<f4").tobytes())
                    lengths.append(len(tokens))
                    counts["tokens"] += len(tokens)
                counts["documents"] += len(self._parts)
                counts["text_bytes"] += int(example.get("bytes", 0))
            if bad["count"]:
                first = "{where}: {reason}".format(**bad["first"][0])
                _log.warning("%s: left out %d bad records, %s", split, bad["count"], first)
            if not lengths:
                raise DataError(
                    f"the split {split!r} is empty: no document of two tokens or more "
                    f"({bad['count']} bad records, {counts['filtered']} filtered, "
                    f"{counts['empty']} empty)"
                )
            files["offsets"] = open_file("offsets")
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            files["offsets"].write(offsets.astype("<i8").tobytes())
        dtypes = {"tokens": self._dtype, "offsets": "<i8", "weights": "<f4"}
        self._splits[split] = {
            **counts,
            "bad_records": bad,
            "files": {
                kind: {**file.entry(), "dtype": dtypes[kind]} for kind, file in files.items()
            },
        }

    def finish(self) -> None:
        """Writes the manifest; without it the folder is no cache."""
        manifest = {
            "format": cache_lib.FORMAT,
            "version": cache_lib.VERSION,
            "recipe": self._recipe,
            "recipe_hash": _recipe_hash(self._recipe),
            "vocab_size": self._vocab_size,
            "parts": list(self._parts),
            "splits": self._splits,
        }
        write_json(self._folder / "manifest.json", cache_lib.sealed(manifest))

    def _checked(self, where: str, example: Example) -> tuple[str, Example] | BadRecord:
        for part in self._parts:
            if part not in example:
                return BadRecord(where, f"the preprocessor gave no {part!r}")
            tokens = example[part] = np.asarray(example[part])
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                return BadRecord(
                    where, f"{part!r} is {tokens.dtype} {tokens.shape}, not a list of token ids"
                )
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                wrong = tokens.min() if tokens.min() < 0 else tokens.max()
                return BadRecord(where, f"token {wrong} is not in 0..{self._vocab_size - 1}")
            weights = example.get(weights_name(part))
            if weights is not None:
                weights = np.asarray(weights, np.float32)
                if weights.shape != tokens.shape or not np.isfinite(weights).all():
                    return BadRecord(
                        where, f"weights of {part!r} must be finite, one a token: {weights.shape}"
                    )
        return where, example


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> _HashedFile:
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, *unused: Any) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def entry(self) -> dict[str, Any]:
        digest = self._digest.hexdigest()
        return {"name": self._path.name, "bytes": self._bytes, "sha256": digest}


@contextlib.contextmanager
def _room_for(path: pathlib.Path) -> Iterator[None]:
    """Names the cache in errors of a full disk: the system no longer knows what was written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise cache_lib.CacheError(f"{path} cannot be written: {error.strerror}") from error


def _recipe_hash(recipe: Any) -> str:
    return sha256_json({"version": cache_lib.VERSION, "recipe": recipe})


def _chain(preprocessors: Any, split: str) -> list[Preprocessor]:
    if isinstance(preprocessors, Mapping):
        if split not in preprocessors:
            raise DataError(f"no preprocessors for the split {split!r}")
        preprocessors = preprocessors[split]
    chain = [preprocessors] if callable(preprocessors) else list(preprocessors)
    if not chain:
        raise DataError(f"the split {split!r} needs at least one preprocessor")
    return chain


def _examples(
    records: Iterable[Record | BadRecord], chain: Sequence[Preprocessor]
) -> Iterator[tuple[str, Example | None] | BadRecord]:
    """Runs the chain on chunks of records, in order; a failing record becomes a bad one."""
    records = iter(records)
    while chunk := list(itertools.islice(records, _CHUNK)):
        batched = [record for record in chunk if isinstance(record, Record)]
        results: Iterator[Example | None | BadRecord]
        try:
            results = iter(_run_many([record.value for record in batched], chain))
        except Exception:
            # One by one, to find the culprit.
            results = iter([_run_one(record, chain) for record in batched])
        for record in chunk:
            if isinstance(record, BadRecord):
                yield record
                continue
            result = next(results)
            yield result if isinstance(result, BadRecord) else (record.where, result)


def _run_many(values: list[Example], chain: Sequence[Preprocessor]) -> list[Example | None]:
    current: list[Example | None] = list(values)
    for step in chain:
        kept = [i for i, value in enumerate(current) if value is not None]
        inputs: list[Any] = [current[i] for i in kept]
        many = getattr(step, "many", None)
        outputs = many(inputs) if many else [step(value) for value in inputs]
        for i, output in zip(kept, outputs, strict=True):
            current[i] = output
    return current


def _run_one(record: Record, chain: Sequence[Preprocessor]) -> Example | None | BadRecord:
    try:
        return _run_many([record.value], chain)[0]
    except Exception as error:
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        return BadRecord(record.where, reason, cause=error)
