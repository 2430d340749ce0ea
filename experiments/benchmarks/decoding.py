"""Greedy decoding against `transformers` generate on PyTorch, in one process, taking turns.

Random Llamas in float32, the same weights on both sides: what a token costs does not depend on
them. Layers are unrolled (`segments.unroll`), because a scan over stacked layers copies the weights
of each layer before it reads them on a CPU. Each turn is one call with prompts of equal length; the
time of the prompt is in it, on both sides.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.training import bind_to_cores
from experiments.benchmarks.turns import take_turns

MODELS = ("llama_15m", "smollm2_135m")


def measure(
    *,
    models: Sequence[str] = MODELS,
    batch_sizes: Sequence[int] = (1, 8, 64),
    prompt: int = 32,
    new_tokens: int = 64,
    rounds: int = 5,
    threads: int = 2,
    compare: bool = True,
) -> dict[str, Any]:
    """Tokens a second by model and batch size (medians of the rounds), and ratios.

    Args:
      models: presets.
      batch_sizes: prompts decoded at once.
      prompt, new_tokens: lengths of prompts and answers.
      rounds: times that each side has its turn.
      threads: CPU threads of both (the process is bound to so many cores before JAX starts).
      compare: also run the PyTorch side, where torch and transformers are installed.

    Returns:
      By "MODEL_batch_SIZE": "tokens_per_second", for one row also "weight_gigabytes_per_second"
      (every step reads all weights once), and with a comparison "transformers_tokens_per_second",
      "ratio" and whether the answers were "equal". "copy_gigabytes_per_second": of a memory copy,
      read and written bytes.
    """
    bind_to_cores(threads)
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    results: dict[str, Any] = {"copy_gigabytes_per_second": copy_rate()}
    if compare and missing:
        results["comparison_left_out"] = f"{' and '.join(missing)} missing: pip install '.[bench]'"
    for name in models:
        ours, size, weight_bytes = jax_side(name, new_tokens)
        theirs = torch_side(name, new_tokens, threads) if compare and not missing else None
        for batch_size in batch_sizes:
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, size, (batch_size, prompt)).tolist()
            sides = {"jaxllm": ours} | ({"transformers": theirs} if theirs else {})
            answers = {side: run(prompts) for side, run in sides.items()}
            turns = {side: functools.partial(run, prompts) for side, run in sides.items()}
            seconds = take_turns(turns, rounds)
            rates = {
                side: batch_size * new_tokens / statistics.median(values)
                for side, values in seconds.items()
            }
            found: dict[str, Any] = {"tokens_per_second": rates["jaxllm"]}
            if batch_size == 1:
                found["weight_gigabytes_per_second"] = rates["jaxllm"] * weight_bytes / 1e9
            if theirs:
                found["transformers_tokens_per_second"] = rates["transformers"]
                found["ratio"] = rates["jaxllm"] / rates["transformers"]
                found["equal"] = float(answers["jaxllm"] == answers["transformers"])
            results[f"{name}_batch_{batch_size}"] = found
    return results


def copy_rate(size: int = 2**28, rounds: int = 5) -> float:
    """Gigabytes a second that a copy of `size` bytes reads and writes, the best of some rounds."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds) / 1e9


def jax_side(name: str, new_tokens: int) -> tuple[Callable[[Any], Any], int, int]:
    """(continues prompts, size of the vocabulary, bytes of all weights)."""
    import jax

    from jaxllm.inference.generate import generate
    from jaxllm.models import segments

    config, params = _model(name)
    params = segments.unroll(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def run(prompts: Any) -> Any:
        return generate(config, params, prompts, max_new_tokens=new_tokens, stop_tokens=())

    return run, config.vocab_size, size


def torch_side(name: str, new_tokens: int, threads: int) -> Callable[[Any], Any]:
    """The same model by `transformers`."""
    import torch
    import transformers

    from jaxllm.models import hf

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_hf(f"{folder}/model", *_model(name))
        model = transformers.LlamaForCausalLM.from_pretrained(
            f"{folder}/model", dtype=torch.float32
        ).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: Any) -> Any:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return made[:, tokens.shape[1] :].tolist()

    return run


def _model(name: str) -> tuple[Any, Any]:
    import jax

    from jaxllm.models import parameters, presets

    config = presets.preset(name).replace(param_dtype="float32", compute_dtype="float32")
    return config, parameters.init_params(config, jax.random.key(0))
