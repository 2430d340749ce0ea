"""The tokenizer that a GGUF checkpoint carries in its metadata."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxllm.data.errors import TokenizerError
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer

_CONTROL, _USER_DEFINED = 3, 4
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(
    path: str | os.PathLike[str], pre: str | None = None
) -> HuggingFaceTokenizer:
    """Builds the byte-level BPE tokenizer described by a GGUF file's `tokenizer.ggml` fields.

    Args:
      path: the file.
      pre: splitting of text before BPE, in place of the file's `tokenizer.ggml.pre`: "gpt-2",
        "smollm" (single digits), "llama-bpe" or "qwen2". Old files say "default" or nothing,
        which does not tell how their model splits; name it then.

    Raises:
      TokenizerError: no GGUF file, a field is missing, or a kind that is not built here.
    """
    path = pathlib.Path(path)
    fields = _read_fields(path)
    kind = fields.get("ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"{path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is built from "
            "GGUF. Give the folder of the original checkpoint's tokenizer instead"
        )
    for name in ("ggml.tokens", "ggml.merges"):
        if name not in fields:
            raise TokenizerError(f"{path}: the field tokenizer.{name} is missing")
    pre = pre or fields.get("ggml.pre")
    splitters = _splitters()
    if pre not in splitters:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre is {pre!r}; expected one of {', '.join(splitters)}. "
            "Pass pre=... if you know how the model splits text"
        )
    tokens: list[str] = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = splitters[pre]
    backend.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields.get("ggml.token_type", ()), strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, normalized=False)])
    config = _config(path, fields, tokens)
    definition = json.dumps(json.loads(backend.to_str()))
    return HuggingFaceTokenizer(definition, config, source=str(path))


def _splitters() -> dict[str, Any]:
    def byte_level(use_regex: bool = True) -> Any:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

    def words(pattern: str) -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])

    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": byte_level(),
        "smollm": pre_tokenizers.Sequence([digits, byte_level()]),
        "llama-bpe": words(_WORDS_LLAMA3),
        "qwen2": words(_WORDS_QWEN2),
    }


def _config(path: pathlib.Path, fields: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    for gguf_name, name in names.items():
        token_id = fields.get(f"ggml.{gguf_name}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise TokenizerError(
                f"{path}: {gguf_name}_token_id is {token_id}, outside the {len(tokens)} tokens"
            )
        config[name] = tokens[token_id]
    for name in ("add_bos_token", "add_eos_token"):
        if f"ggml.{name}" in fields:
            config[name] = bool(fields[f"ggml.{name}"])
    if "chat_template" in fields:
        config["chat_template"] = fields["chat_template"]
    return config


def _read_fields(path: pathlib.Path) -> dict[str, Any]:
    """The `tokenizer.` fields, without the prefix."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever numpy raises on cut files
        raise TokenizerError(f"{path}: not a readable GGUF file ({error})") from error
    prefix = "tokenizer."
    return {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
