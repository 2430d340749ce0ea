"""GGUF files: metadata to a config, tensors dequantised to float32 when they are read."""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.hf.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.hf.names import GGUF_FAMILIES, Family

_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """Tensors of a GGUF file as float32 rows in torch's orientation (out, in).

    Raises:
      CheckpointError: not a GGUF file, or a truncated one.
    """

    def __init__(self, path: pathlib.Path) -> None:
        import gguf

        self.path = path
        self._dequantize = gguf.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader fails in many ways on damaged files
            raise CheckpointError(
                f"{path} is not a readable GGUF file ({error}): it is damaged or truncated; "
                "download it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; the file lists the innermost axis first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> np.dtype:
        """Everything is dequantised to float32."""
        return np.dtype(np.float32)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of a tensor. Only their blocks are dequantised."""
        tensor = self._tensors[name]
        try:
            values = self._dequantize(np.asarray(tensor.data[start:stop]), tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {name!r} in {self.path} has type {tensor.tensor_type.name}, which "
                "the gguf package cannot dequantise."
            ) from error
        # A float32 tensor comes back as a view of the mapped file.
        values = np.array(values, np.float32, copy=None if values.base is None else True)
        self._forget_pages()
        return values.reshape(stop - start, *self.shape(name)[1:])

    def _forget_pages(self) -> None:
        """Lets the system drop the mapped pages, which would count as resident memory."""
        if hasattr(mmap, "MADV_DONTNEED") and isinstance(self._reader.data.base, mmap.mmap):
            self._reader.data.base.madvise(mmap.MADV_DONTNEED)

    def where(self, name: str) -> str:
        """The file."""
        return str(self.path)

    def close(self) -> None:
        """Unmaps the file."""
        self._tensors.clear()
        del self._reader


def open_gguf(path: pathlib.Path) -> tuple[ModelConfig, Family, GGUFFile]:
    """Opens a file for `load_hf`.

    Raises:
      UnsupportedModelError: an architecture or a rotary scaling that is not supported.
      CheckpointError: metadata is missing.
    """
    file = GGUFFile(path)
    kind = file.field("general.architecture")
    if kind not in GGUF_FAMILIES:
        raise UnsupportedModelError(
            f"GGUF architecture {kind!r} in {path} is not supported: expected one of "
            f"{sorted(GGUF_FAMILIES)}."
        )
    return _config(kind, file), GGUF_FAMILIES[kind], file


def _config(kind: str, file: GGUFFile) -> ModelConfig:
    def need(name: str) -> Any:
        value = file.field(f"{kind}.{name}")
        if value is None:
            raise CheckpointError(f"{file.path} lacks the metadata {kind}.{name}.")
        return value

    if file.field(f"{kind}.expert_count"):
        raise UnsupportedModelError(
            f"{file.path} is a mixture of experts: only dense GGUF files load."
        )
    heads, width = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(file.field(f"{kind}.attention.key_length", width // heads))
    eos = file.field("tokenizer.ggml.eos_token_id")
    names = set(file.names())
    return ModelConfig(
        family=kind,
        vocab_size=file.shape("token_embd.weight")[0],
        embed_dim=width,
        num_layers=int(need("block_count")),
        num_heads=heads,
        num_kv_heads=int(file.field(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_dim=int(need("feed_forward_length")),
        max_positions=int(need("context_length")),
        norm_eps=_decimal(need("attention.layer_norm_rms_epsilon")),
        attention_bias="blk.0.attn_q.bias" in names,
        attention_out_bias="blk.0.attn_output.bias" in names,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in names else None,
        rope=_rope(kind, file, head_dim),
        tie_embeddings="output.weight" not in names,
        bos_token_id=file.field("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (int(eos),),
        pad_token_id=file.field("tokenizer.ggml.padding_token_id"),
    )


def _decimal(value: float) -> float:
    """A float32 of the metadata as the decimal that it was written from (1e-5, not 9.99e-6)."""
    return float(str(np.float32(value)))


def _rope(kind: str, file: GGUFFile, head_dim: int) -> RopeConfig:
    rotated = int(file.field(f"{kind}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions: only whole heads are "
            "supported."
        )
    context = int(file.field(f"{kind}.context_length"))
    rope = RopeConfig(theta=_decimal(file.field(f"{kind}.rope.freq_base", 10000.0)))
    if _ROPE_FACTORS in file.names():
        # Llama 3.1's scaling, written out as one divisor a pair: longrope with equal sets.
        factors = tuple(float(x) for x in file.read(_ROPE_FACTORS, 0, file.shape(_ROPE_FACTORS)[0]))
        return dataclasses.replace(
            rope,
            type="longrope",
            original_max_positions=context,
            attention_factor=1.0,
            short_factor=factors,
            long_factor=factors,
        )
    scaling = file.field(f"{kind}.rope.scaling.type", "none")
    factor = float(file.field(f"{kind}.rope.scaling.factor", 1.0))
    original = int(file.field(f"{kind}.rope.scaling.original_context_length", context))
    if scaling == "none" or factor == 1.0:
        return rope
    if scaling == "linear":
        return dataclasses.replace(rope, type="linear", factor=factor)
    if scaling == "yarn":
        return dataclasses.replace(
            rope, type="yarn", factor=factor, original_max_positions=original
        )
    raise UnsupportedModelError(f"rope scaling {scaling!r} in {file.path} is not supported.")
