"""Throughput of continuous batching against batches that run until their longest row ends.

Requests with answers of very different lengths (geometric, most short, some long), in float32, on
the same model and number of slots. The static side runs `generate.sample` on batches in order of
arrival, each until its longest answer is finished, as a model that stops at its end tokens would.
The sides take turns, so that a busy machine slows both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmarks.training import bind_to_cores
from experiments.benchmarks.turns import take_turns


def measure(
    *,
    model: str = "llama_15m",
    num_requests: int = 96,
    num_slots: int = 8,
    mean_tokens: int = 32,
    max_tokens: int = 256,
    longest_prompt: int = 48,
    rounds: int = 3,
    threads: int = 2,
) -> dict[str, Any]:
    """Asked-for tokens a second of both sides (medians), and how many times faster the engine is.

    Args:
      model: a preset.
      num_requests: in all.
      num_slots: sequences that run at once, on both sides.
      mean_tokens, max_tokens: of the geometric distribution of answers, and where it is cut.
      longest_prompt: prompts have 1 .. so many tokens.
      rounds: times that each side has its turn.
      threads: CPU threads (the process is bound to so many cores before JAX starts).

    Returns:
      "engine_tokens_per_second", "static_tokens_per_second", "ratio" (of the medians),
      "ratio_by_round", "ideal_ratio" (of the decoding steps that any static and any continuous
      batching need), "equal" (1 where both sides give the same answers), "lengths".
    """
    bind_to_cores(threads)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / mean_tokens, num_requests), max_tokens).tolist()
    sizes = rng.integers(1, longest_prompt + 1, num_requests).tolist()
    sides = functions(model, lengths, sizes, num_slots)
    answers = {side: run() for side, run in sides.items()}  # compiles
    seconds = take_turns(sides, rounds)
    engine, static = (statistics.median(seconds[side]) for side in ("engine", "static"))
    longest = [max(lengths[i : i + num_slots]) for i in range(0, num_requests, num_slots)]
    pairs = zip(seconds["static"], seconds["engine"], strict=True)
    return {
        "engine_tokens_per_second": sum(lengths) / engine,
        "static_tokens_per_second": sum(lengths) / static,
        "ratio": static / engine,
        "ratio_by_round": [other / own for other, own in pairs],
        "ideal_ratio": sum(longest) * num_slots / sum(lengths),
        "equal": float(answers["engine"] == answers["static"]),
        "lengths": lengths,
    }


def functions(
    model: str, lengths: list[int], sizes: list[int], num_slots: int
) -> dict[str, Callable[[], list[list[int]]]]:
    """What to time, by side: answers all requests and returns their tokens."""
    import jax

    from jaxllm.inference.engine import Engine, Request
    from jaxllm.inference.generate import sample
    from jaxllm.models import parameters, presets, segments

    config = presets.preset(model).replace(param_dtype="float32", compute_dtype="float32")
    # A scan over stacked layers copies the weights of each before it reads them on a CPU.
    params = segments.unroll(parameters.init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, size).tolist() for size in sizes]
    # Both sides know how long the answers get, and keep caches for no more.
    longest = max(map(sum, zip(sizes, lengths, strict=True)))
    engine = Engine(config, params, num_slots=num_slots, max_length=longest)

    def continuous() -> list[list[int]]:
        requests = [
            Request(prompt, length, stop_tokens=())
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        return [completion.tokens for completion in engine.run(requests)]

    def static() -> list[list[int]]:
        found = []
        for start in range(0, len(prompts), num_slots):
            part = slice(start, start + num_slots)
            batch = sample(
                config,
                params,
                prompts[part],
                max_new_tokens=max(lengths[part]),
                stop_tokens=(),
            )
            found += [
                completion.tokens[:length]
                for (completion,), length in zip(batch, lengths[part], strict=True)
            ]
        return found

    return {"engine": continuous, "static": static}
