"""Hugging Face fast tokenizers: `tokenizer.json` and the two files that refine it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxllm.data.errors import TokenizerError
from jaxllm.data.files import canonical_json, write_json, write_text

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library with a checkpoint's special tokens.

    Args:
      definition: text of a `tokenizer.json`.
      config: what `tokenizer_config.json` holds. Read are the names of the special tokens,
        `add_bos_token` and `add_eos_token` (they win over the post-processor),
        `add_prefix_space`, `added_tokens_decoder` and `chat_template`.
      source: name for error messages.

    Attributes:
      config: the mapping, with `chat_template` among others (see jaxllm.data.chat).
      backend: the `tokenizers.Tokenizer`.
    """

    def __init__(
        self, definition: str, config: Mapping[str, Any] | None = None, source: str = "tokenizer"
    ):
        self.config = dict(config or {})
        self._source = source
        try:
            self._definition = _with_prefix_space(json.loads(definition), self.config)
            self.backend = tokenizers.Tokenizer.from_str(json.dumps(self._definition))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{source}: not a tokenizer.json ({error})") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        _add_tokens(self.backend, self.config, source)
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (
            self._special_id(name) for name in _SPECIAL
        )
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{source}: the vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._around = self._special_around()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> HuggingFaceTokenizer:
        """Reads a `tokenizer.json` (or `.json.gz`) with the configuration files beside it.

        Raises:
          TokenizerError: a file is missing, no JSON, or not of the expected form.
        """
        path = pathlib.Path(path)
        try:
            data = path.read_bytes()
            definition = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read ({error})") from error
        config = read_config(path.parent)
        return cls(definition, config, source=str(path))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`; loads again with the same hash."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", json.dumps(self._definition, ensure_ascii=False))
        write_json(folder / "tokenizer_config.json", self.config)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; special tokens written in the text are recognised."""
        if self._around is None:
            return self._encode(text, add_special).ids
        ids = self._encode(text, False).ids
        return [*self._around[0], *ids, *self._around[1]] if add_special else ids

    def encode_batch(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        """`encode` of each text, on as many threads as there are cores."""
        native = add_special and self._around is None
        try:
            many = self.backend.encode_batch_fast(list(texts), add_special_tokens=native)
        except (TypeError, UnicodeEncodeError):
            return [self.encode(text, add_special) for text in texts]  # names the culprit
        if not add_special or native:
            return [encoding.ids for encoding in many]
        before, after = self._around
        return [[*before, *encoding.ids, *after] for encoding in many]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters [start, end) of each."""
        encoding = self._encode(text, False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Text of token ids. Ids from `vocab_size` up, a model's spare rows, have no text.

        Raises:
          TokenizerError: a negative id.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and ids.min() < 0:
            raise TokenizerError(f"token {ids.min()} is negative")
        return self.backend.decode(ids.tolist(), skip_special_tokens=skip_special)

    def token(self, token_id: int | None) -> str | None:
        """The text of one token as the vocabulary writes it."""
        return None if token_id is None else self.backend.id_to_token(token_id)

    def fingerprint(self) -> str:
        """Hash of the definition, the special tokens and what `add_special` adds."""
        parts = {
            "definition": {
                k: v for k, v in self._definition.items() if k not in ("truncation", "padding")
            },
            "added": {k: t.content for k, t in self.backend.get_added_tokens_decoder().items()},
            "special": [self.bos_id, self.eos_id, self.pad_id],
            "around": self._around,
        }
        return "hf:" + hashlib.sha256(canonical_json(parts).encode()).hexdigest()

    def _encode(self, text: str, add_special: bool) -> tokenizers.Encoding:
        try:
            return self.backend.encode(text, add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError) as error:
            # The library says "must be str" for a string with a lone surrogate.
            what = "with a lone surrogate" if isinstance(text, str) else f"({type(text).__name__})"
            raise TokenizerError(f"{self._source}: text that cannot be encoded {what}") from error

    def _special_id(self, name: str) -> int | None:
        content = special_token(self.config, name)
        if content is None:
            return None
        token_id = self.backend.token_to_id(content)
        if token_id is None:
            raise TokenizerError(f"{self._source}: {name} {content!r} is not in the vocabulary")
        return token_id

    def _special_around(self) -> tuple[list[int], list[int]] | None:
        """What `add_special` puts before and after; None to leave it to the post-processor."""
        probe = "a"
        plain = self.backend.encode(probe, add_special_tokens=False).ids
        full = self.backend.encode(probe, add_special_tokens=True).ids
        starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
        if not plain or len(starts) != 1:
            return None
        before, after = full[: starts[0]], full[starts[0] + len(plain) :]
        before = _forced(self.config.get("add_bos_token"), self.bos_id, before, self._source)
        after = _forced(self.config.get("add_eos_token"), self.eos_id, after, self._source)
        return before, after


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a folder, completed from `special_tokens_map.json`."""
    config = _read_object(folder / "tokenizer_config.json")
    for name, value in _read_object(folder / "special_tokens_map.json").items():
        config.setdefault(name, value)
    return config


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Content of a special token, written as a string or as {"content": ...}."""
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{name} is {value!r}; a string was expected")
    return value


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def _with_prefix_space(definition: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(definition, dict):
        raise TokenizerError("a JSON object was expected")
    wanted = config.get("add_prefix_space")
    step = definition.get("pre_tokenizer") or {}
    if wanted is not None and step.get("type") == "ByteLevel":
        definition = {**definition, "pre_tokenizer": {**step, "add_prefix_space": bool(wanted)}}
    return definition


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], source: str) -> None:
    """Adds the tokens that only the configuration knows, at the ids that it states."""
    listed = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if backend.token_to_id(content) is None:
            backend.add_tokens([_added_token(entry)])
        if backend.token_to_id(content) != int(key):
            raise TokenizerError(
                f"{source}: added token {content!r} has id {backend.token_to_id(content)}, but "
                f"tokenizer_config.json says {key}"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for name in _SPECIAL:
        content = special_token(config, name)
        if content is not None and content not in known:
            if backend.token_to_id(content) is None:
                continue  # refused by name where it is looked up
            backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False)])


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in entry}
    return tokenizers.AddedToken(entry["content"], special=entry.get("special", False), **flags)


def _forced(wanted: Any, token: int | None, ids: list[int], source: str) -> list[int]:
    if wanted is None or bool(wanted) == (token in ids):
        return ids
    if token is None and wanted:
        raise TokenizerError(f"{source}: add_bos_token or add_eos_token is on without such a token")
    return [token] if wanted else [i for i in ids if i != token]
