"""Operations of `pallas_kernels` at the shapes of real models.

Letters: B rows, T tokens, H query heads, K key heads, D width of heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attention
from pallas_kernels.hybrid_kv_attention import hybrid_kv_attention
from pallas_kernels.quantized_kv_attention import empty_keys, empty_values, quantized_kv_attention
from pallas_kernels.quantized_kv_attention import tpu as quantized_kv_tpu


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
      operation: its name.
      shape: for readers.
      function: takes the arguments, `implementation` and, where there are any, `blocks`.
      arguments: trees of shapes, and of arrays where the values matter (lengths, positions).
      operations: {type of operands: multiplications and additions that the task needs}.
      blocks: sizes of blocks to rank beside the heuristic's, of the TPU kernel.
      needed_bytes: that must be read and written; None = all arguments and results once.
    """

    operation: str
    shape: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    operations: dict[str, float]
    blocks: tuple[Any, ...] = ()
    needed_bytes: int | None = None

    @property
    def name(self) -> str:
        """Names the case in configs and records."""
        return f"{self.operation} {self.shape}"


def cases() -> dict[str, Case]:
    """All cases by name."""
    groups = (_attention(), _quantized_kv_attention(), _hybrid_kv_attention())
    return {case.name: case for group in groups for case in group}


def _shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention() -> Iterator[Case]:
    time = 2048
    for heads, kv_heads, model in ((32, 8, "Llama 3 8B"), (64, 8, "Llama 3 70B")):
        q, k = _shape(1, time, heads, 128), _shape(1, time, kv_heads, 128)
        yield Case(
            "attention",
            f"{model}, {time} tokens",
            attention,
            (q, k, k),
            # Half of the scores are hidden.
            {"bfloat16": 2 * heads * time * time * 128},
        )


def _quantized_kv_attention() -> Iterator[Case]:
    slots, kv_heads, width, group = 32768, 8, 128, 128
    whole = (1, kv_heads, slots, width)
    kinds = [(bits, bits, time) for bits in (8, 4, 2) for time in (1, 16)]
    for key_bits, value_bits, time in [*kinds, (8, 4, 1), (4, 2, 1)]:
        recent = group + time
        exact = _shape(1, kv_heads, recent, width)
        packed = jax.eval_shape(
            lambda key_bits=key_bits, value_bits=value_bits: (
                empty_keys(*whole, bits=key_bits, group=group),
                empty_values(*whole, bits=value_bits, group=width),
            )
        )
        yield Case(
            "quantized_kv_attention",
            f"K{key_bits}V{value_bits}, Llama 3 8B, {slots} tokens, {time} new",
            quantized_kv_attention,
            (
                _shape(1, time, 4 * kv_heads, width),
                *packed,
                exact,
                exact,
                np.array([slots], np.int32),
                slots + np.arange(recent, dtype=np.int32)[None],
                slots + group + np.arange(time, dtype=np.int32)[None],
            ),
            {"bfloat16": 4 * time * 4 * kv_heads * slots * width},
            blocks=(
                quantized_kv_tpu.Blocks(tokens=2048, heads=1, rows=8 if time == 1 else 64),
                quantized_kv_tpu.Blocks(tokens=8192, heads=1, rows=8),
            ),
        )


def _hybrid_kv_attention() -> Iterator[Case]:
    # Llama-3-8B-1M at 131,072 tokens: 3 of 8 key heads adaptive, 2,048 tokens kept in the others.
    counts, slots, width = (3, 5), (131072, 2304), 128
    kinds = list(zip(counts, slots, strict=True))
    yield Case(
        "hybrid_kv_attention",
        "Llama 3 8B, 3 heads of 131072 tokens, 5 of 2304",
        hybrid_kv_attention,
        (
            _shape(1, 1, 32, width),
            *(_shape(1, n, s, width) for n, s in kinds for _ in range(2)),
            *(np.full((1, n), s, np.int32) for n, s in kinds),
        ),
        {"bfloat16": 4 * 4 * sum(n * s for n, s in kinds) * width},
    )
