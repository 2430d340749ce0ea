"""From a config's `data` and `tokenizer` to a tokenizer and two splits of tokens."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import ml_collections

from experiments import runtime
from experiments.errors import UsageError
from jaxllm.data import bpe, cache, preprocessors, seqio_build, sources, stdlib, tasks
from jaxllm.data.errors import DataError
from jaxllm.data.files import sha256_json
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer
from jaxllm.data.tokenizers import Tokenizer, load_tokenizer

CACHE = pathlib.Path("runs/cache")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Tokenizer and tokens of a config.

    Attributes:
      train, valid: the two splits.
      vocab_size: of the tokens, at least that of the tokenizer.
      valid_bytes: size in UTF-8 of the text that the validation split predicts.
    """

    tokenizer: Tokenizer
    train: cache.TokenSplit
    valid: cache.TokenSplit
    vocab_size: int
    valid_bytes: int

    @property
    def valid_targets(self) -> float:
        """Validation tokens that count: by weight, without the first of each document."""
        valid = self.valid
        if valid.weights is None:
            return valid.num_tokens - valid.num_documents
        return float(valid.weights.sum() - valid.weights[valid.offsets[:-1]].sum())


def prepare(config: ml_collections.ConfigDict) -> Prepared:
    """Trains or loads the tokenizer, and builds or opens the token cache.

    With several processes the first trains and builds, and the others open what it has made (where
    they do not share `runs/cache`, they make the same again).

    Raises:
      UsageError: the files, the task or the tokenizer named by the config cannot be used, or the
        processes were given different ones.
    """
    found = runtime.first_then_all(lambda: _prepare(config))
    here = {
        "tokenizer": found.tokenizer.fingerprint(),
        "training tokens": found.train.fingerprint,
        "validation tokens": found.valid.fingerprint,
    }
    for process, there in enumerate(every := runtime.gather(here)):
        if differ := [name for name, value in every[0].items() if there[name] != value]:
            raise UsageError(
                f"process {process} has another {' and other '.join(differ)} than process 0: the "
                "files that it reads differ."
            )
    return found


def _prepare(config: ml_collections.ConfigDict) -> Prepared:
    try:
        if config.data.seqio_task:
            return _from_seqio(config)
        splits = text_sources(config.data)
        if config.tokenizer.path:
            tokenizer = load_tokenizer(config.tokenizer.path)
        else:
            field = config.data.field
            tokenizer = trained_bpe(splits["train"], field, config.tokenizer.vocab_size)
        chain = [preprocessors.LanguageModeling(tokenizer, field=config.data.field)]
        tokens = tasks.Task("text", splits, chain, tokenizer).build(CACHE / "tokens")
    except DataError as error:
        raise UsageError(str(error)) from error
    valid = tokens.split("valid")
    size = tokenizer.vocab_size
    return Prepared(tokenizer, tokens.split("train"), valid, size, valid.text_bytes)


def _from_seqio(config: ml_collections.ConfigDict) -> Prepared:
    data = config.data
    if not config.tokenizer.path:
        raise UsageError(
            f"data.seqio_task={data.seqio_task} brings its own vocabulary: name the tokenizer that "
            "decodes it by --config.tokenizer.path."
        )
    if not data.seqio_register or len(data.seqio_splits) != 2:
        raise UsageError(
            "data.seqio_task needs data.seqio_register (the module that registers it) and two "
            "data.seqio_splits, for training and validation."
        )
    tokenizer = load_tokenizer(config.tokenizer.path)
    tokens = seqio_build.build_seqio_cache(
        CACHE / "tokens", data.seqio_task, data.seqio_register, splits=tuple(data.seqio_splits)
    )
    train, valid = (tokens.split(name) for name in data.seqio_splits)
    counted = valid.tokens if valid.weights is None else valid.tokens[valid.weights > 0]
    text = tokenizer.decode(counted, skip_special=True)
    size = max(tokens.vocab_size, tokenizer.vocab_size)
    return Prepared(tokenizer, train, valid, size, len(text.encode("utf-8")))


def describe(data: ml_collections.ConfigDict) -> Any:
    """What the texts of a config are, for recipes; files by their contents."""
    if data.seqio_task:
        return {"seqio": data.seqio_task, "register": data.seqio_register}
    return {name: source.describe() for name, source in text_sources(data).items()}


def text_sources(data: ml_collections.ConfigDict) -> dict[str, sources.Source]:
    """The two sources of a config: the standard library, or files by path."""
    if not data.path:
        if data.valid_path:
            raise UsageError("data.valid_path is given without data.path.")
        return {
            "train": stdlib.StandardLibrary("train"),
            "valid": stdlib.StandardLibrary("validation"),
        }
    whole = by_suffix(data.path, data.field)
    if data.valid_path:
        return {"train": whole, "valid": by_suffix(data.valid_path, data.field)}
    if not 0 < data.valid_fraction < 1:
        raise UsageError(f"data.valid_fraction={data.valid_fraction} must lie between 0 and 1.")
    return {
        "train": HeldOut(whole, data.valid_fraction, False, data.field),
        "valid": HeldOut(whole, data.valid_fraction, True, data.field),
    }


def by_suffix(path: str, field: str) -> sources.Source:
    """JSON lines (.jsonl, .json, also .gz), parquet, or text with one document a file."""
    name = str(path).removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return sources.JsonLines(path, text_fields=(field,))
    if name.endswith(".parquet"):
        return sources.Parquet(path, text_fields=(field,))
    return sources.TextFiles(path, field=field)


@dataclasses.dataclass(frozen=True)
class HeldOut(sources.Source):
    """One side of a source without a validation split of its own.

    Of a text file the end is held out, from a line's beginning; of records every k-th.

    Attributes:
      source: the whole.
      fraction: how much is held out.
      held_out: the held-out side, or the rest.
    """

    source: sources.Source
    fraction: float
    held_out: bool
    field: str = "text"

    def records(self) -> Iterator[sources.Record | sources.BadRecord]:
        every = max(2, round(1 / self.fraction))
        for number, record in enumerate(self.source.records()):
            if isinstance(self.source, sources.TextFiles) and isinstance(record, sources.Record):
                part = self._part(record.value[self.field])
                if part:
                    yield dataclasses.replace(record, value={self.field: part})
            elif (number % every == every - 1) == self.held_out:
                yield record

    def _part(self, text: str) -> str:
        start = text.rfind("\n", 0, int(len(text) * (1 - self.fraction))) + 1
        return text[start:] if self.held_out else text[:start]

    def describe(self) -> Any:
        return {
            "source": self.source.describe(),
            "fraction": self.fraction,
            "held_out": self.held_out,
        }


def trained_bpe(source: sources.Source, field: str, vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of the source's texts, trained once and kept in runs/cache/tokenizers."""
    recipe = {"version": 1, "source": source.describe(), "vocab_size": vocab_size}
    folder = CACHE / "tokenizers" / f"bpe{vocab_size}-{sha256_json(recipe)[:16]}"
    if not folder.is_dir():
        print(f"training a tokenizer of {vocab_size} tokens", flush=True)
        tokenizer = bpe.train_bpe((record[field] for record in source), vocab_size)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".bpe"))
        tokenizer.save(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, HuggingFaceTokenizer)
    return loaded
