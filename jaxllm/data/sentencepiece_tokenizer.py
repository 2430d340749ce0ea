"""Sentencepiece models (`tokenizer.model`): Llama 2, Mistral, Gemma, T5."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.data.errors import TokenizerError


class SentencePieceTokenizer:
    """A sentencepiece model file.

    Args:
      path: the file.
      add_bos: whether `add_special` puts the begin token in front; default: where there is one,
        the convention of Llama-style checkpoints.
      add_eos: whether `add_special` appends the end token; default no.

    Raises:
      TokenizerError: missing, empty or no sentencepiece model.
    """

    def __init__(
        self, path: str | os.PathLike[str], add_bos: bool | None = None, add_eos: bool = False
    ):
        import sentencepiece

        self.path = pathlib.Path(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=self.path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{path}: not a readable sentencepiece model ({error})") from error
        self.vocab_size: int = self._model.vocab_size()
        if self.vocab_size == 0:
            raise TokenizerError(f"{path}: a sentencepiece model without pieces")
        self.bos_id = _or_none(self._model.bos_id())
        self.eos_id = _or_none(self._model.eos_id())
        self.pad_id = _or_none(self._model.pad_id())
        self.unk_id = _or_none(self._model.unk_id())
        add_bos = self.bos_id is not None if add_bos is None else add_bos
        for wanted, token, name in ((add_bos, self.bos_id, "begin"), (add_eos, self.eos_id, "end")):
            if wanted and token is None:
                raise TokenizerError(f"{path}: the model has no {name} token to add")
        self._prefix = [self.bos_id] if add_bos else []
        self._suffix = [self.eos_id] if add_eos else []

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids. Characters outside the model become its unknown token or bytes."""
        ids = self._model.encode(_checked(text))
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_batch(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        """`encode` of each text, on as many threads as there are cores."""
        many = self._model.encode([_checked(text) for text in texts])
        return [[*self._prefix, *ids, *self._suffix] for ids in many] if add_special else many

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters [start, end) of each."""
        if hasattr(self._model, "encode_as_offset_mapping"):
            found = self._model.encode(_checked(text), out_type="offset_mapping")
            return list(found["ids"]), [(int(a), int(b)) for a, b in found["offsets"]]
        # Versions before the offset mapping; the name is unknown to the newer type stubs.
        proto: Any = "immutable_proto"
        pieces = self._model.encode(_checked(text), out_type=proto).pieces
        return [p.id for p in pieces], [(p.begin, p.end) for p in pieces]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Text of token ids. Control tokens have no text, whatever `skip_special` says.

        Ids from `vocab_size` up, a model's spare rows, have no text either.

        Raises:
          TokenizerError: a negative id.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and ids.min() < 0:
            raise TokenizerError(f"token {ids.min()} is negative")
        return self._model.decode(ids[ids < self.vocab_size].tolist())

    def fingerprint(self) -> str:
        """Hash of the model and of the special tokens added."""
        digest = hashlib.sha256(self._model.serialized_model_proto())
        digest.update(repr((self._prefix, self._suffix)).encode())
        return f"sentencepiece:{digest.hexdigest()}"


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None


def _checked(text: str) -> str:
    # The C++ side replaces lone surrogates quietly; refuse them instead.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text with a lone surrogate at character {error.start}") from error
    return text
