"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.data.errors import TokenizerError

_OFFSET = 3


class ByteTokenizer:
    """UTF-8 bytes: token = byte + 3; 0 is padding, 1 the end of a text, 2 unknown.

    The mapping is that of ByT5 and of seqio's `ByteVocabulary`, without sentinel tokens: 259 ids.
    There is no token for the beginning of a text. Decoding drops the three special tokens, or
    with `skip_special=False` writes the end of a text as `</s>`, padding as `<pad>`, unknown as
    `<unk>`; bytes that are no UTF-8 become U+FFFD.
    """

    vocab_size = 256 + _OFFSET
    bos_id = None
    eos_id = 1
    pad_id = 0
    unk_id = 2
    _names = (b"<pad>", b"</s>", b"<unk>")

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; `add_special` appends the end of text (1)."""
        ids = [byte + _OFFSET for byte in _utf8(text)]
        return [*ids, self.eos_id] if add_special else ids

    def encode_batch(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        """`encode` of each text."""
        tail = [self.eos_id] if add_special else []
        return [
            (np.frombuffer(_utf8(text), np.uint8).astype(np.int32) + _OFFSET).tolist() + tail
            for text in texts
        ]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each the character that its byte belongs to."""
        sizes = [len(_utf8(character)) for character in text]
        offsets = [(i, i + 1) for i, size in enumerate(sizes) for _ in range(size)]
        return self.encode(text), offsets

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Text of token ids. Ids from 259 up, a model's spare rows, have no text.

        Raises:
          TokenizerError: a negative id.
        """
        out = bytearray()
        for token in np.asarray(ids, np.int64).tolist():
            if token < 0:
                raise TokenizerError(f"token {token} is negative")
            if token >= self.vocab_size:
                continue
            if token >= _OFFSET:
                out.append(token - _OFFSET)
            elif not skip_special:
                out += self._names[token]
        return out.decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """A constant: there is one byte tokenizer."""
        return "byte+3"


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text with a lone surrogate at character {error.start}") from error
