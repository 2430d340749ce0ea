"""One small protocol for every tokenizer, and the front door `load_tokenizer`.

    tokenizer = load_tokenizer("path/to/checkpoint")      # folder with a tokenizer.json
    tokenizer = load_tokenizer("path/to/tokenizer.model")  # sentencepiece
    tokenizer = load_tokenizer("path/to/model.gguf")       # tokenizer inside a GGUF file
    tokenizer = load_tokenizer("byte")                     # bytes

Nothing in a tokenizer folder is executed: only JSON, sentencepiece and GGUF files are read.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxllm.data.byte_tokenizer import ByteTokenizer
from jaxllm.data.errors import TokenizerError
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer, read_config
from jaxllm.data.sentencepiece_tokenizer import SentencePieceTokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline, generation and evaluation ask of a tokenizer.

    Ids are below `vocab_size`, the number of embedding rows that a model needs. A special token
    that the tokenizer lacks is None. Padding is found by segment ids, never by `pad_id`: many
    tokenizers use a real token for it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; with `add_special` also the tokens that the checkpoint puts around a text."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        """`encode` of many texts, in parallel where the library can."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without special tokens, and the characters [start, end) that each stands for."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Text of token ids; with `skip_special`, without special tokens."""
        ...

    def fingerprint(self) -> str:
        """Hash that is equal for tokenizers that encode alike, for recipes and checkpoints."""
        ...


def load_tokenizer(path_or_spec: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
    """Loads a tokenizer from a folder, a file or a name.

    Args:
      path_or_spec: a folder with `tokenizer.json` (preferred), `tokenizer.json.gz` or
        `tokenizer.model`; one of these files; a sentencepiece model (`.model`, `.model.v3`); a
        `.gguf` file; the name "byte"; or a tokenizer, which is returned as it is.

    Raises:
      TokenizerError: nothing of the kind is there, or it cannot be read.
    """
    if not isinstance(path_or_spec, str | os.PathLike):
        if isinstance(path_or_spec, Tokenizer):
            return path_or_spec
        raise TokenizerError(
            f"a tokenizer, a path or a name was expected, not {type(path_or_spec).__name__}"
        )
    if path_or_spec == "byte":
        return ByteTokenizer()
    path = pathlib.Path(path_or_spec)
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise TokenizerError(
            f"no tokenizer at {str(path_or_spec)!r}: expected a folder with tokenizer.json or "
            "tokenizer.model, one of these files, a .gguf file, or 'byte'"
        )
    if path.suffix == ".gguf":
        from jaxllm.data.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(path)
    if path.name.endswith((".json", ".json.gz")):
        return HuggingFaceTokenizer.from_file(path)
    if ".model" in path.name:
        return SentencePieceTokenizer(path)
    raise TokenizerError(
        f"{path}: unknown kind of tokenizer file; expected .json, .json.gz, .model or .gguf"
    )


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer.json.gz"):
        if (folder / name).exists():
            return HuggingFaceTokenizer.from_file(folder / name)
    if (folder / "tokenizer.model").exists():
        config = read_config(folder)
        return SentencePieceTokenizer(
            folder / "tokenizer.model",
            add_bos=config.get("add_bos_token"),
            add_eos=bool(config.get("add_eos_token", False)),
        )
    found = sorted(p.name for p in folder.glob("*token*")) + sorted(
        p.name for p in folder.glob("vocab*")
    )
    hint = f"; found {', '.join(found)}" if found else ""
    raise TokenizerError(
        f"{folder}: neither tokenizer.json nor tokenizer.model is in this folder{hint}. Save the "
        "fast tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
    )
