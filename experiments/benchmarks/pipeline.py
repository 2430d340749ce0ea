"""Tokens a second of the input pipeline: reading, building the cache, and serving batches.

The text is Python's standard library. The tokenizer is bytes, so that the numbers are those of the
pipeline; a BPE tokenizer bounds the building of a cache (once), not the serving.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from jaxllm.data import cache_builder, preprocessors, stdlib
from jaxllm.data.byte_tokenizer import ByteTokenizer
from jaxllm.data.loader import Loader
from jaxllm.data.rows import PackedRows


def measure(*, batch_size: int = 8, length: int = 256, seconds: float = 3.0) -> dict[str, Any]:
    """Rates of the steps of the pipeline.

    Args:
      batch_size, length: of the served batches.
      seconds: how long each way of serving is measured.
    """
    tokenizer = ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cache = cache_builder.build_cache(
            folder,
            "benchmark",
            {"train": stdlib.StandardLibrary("train")},
            preprocessors.LanguageModeling(tokenizer),
            tokenizer,
            progress=False,
        )
        building = time.perf_counter() - start
        split = cache.split("train")
        result: dict[str, Any] = {
            "cache_bytes_of_text_per_second": split.text_bytes / building,
            "tokens": split.num_tokens,
        }
        for packing in ("concat", "first_fit"):
            loader = Loader(PackedRows(split, length, packing=packing), batch_size)
            loader.batch(0)  # plans the epoch
            with loader.iterator() as batches:
                result[f"{packing}_tokens_per_second"] = _rate(batches, seconds)
    return result


def _rate(batches: Any, seconds: float) -> float:
    for _ in range(20):
        next(batches)
    tokens, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        tokens += next(batches)["tokens"].size
    return tokens / passed
