"""Training speed of a 15 M Llama in float32, against transformers on PyTorch in the same process.

Both sides do the same step (forward, backward, clipping, AdamW) on the same batch with the same
number of threads, are warmed up, and take turns, so that a busy machine slows both alike.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmarks.turns import take_turns

LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.1, 1.0


def measure(
    *,
    batch_size: int = 8,
    length: int = 256,
    rounds: int = 5,
    steps: int = 2,
    threads: int = 2,
    compare: bool = True,
) -> dict[str, Any]:
    """Tokens a second of both sides, and the ratio of the medians.

    Args:
      batch_size, length: rows of a batch and tokens of a row.
      rounds: times that each side has its turn.
      steps: steps of a turn.
      threads: CPU threads of both (the process is bound to so many cores before JAX starts).
      compare: also run the PyTorch side; without torch and transformers only ours is measured.
    """
    bind_to_cores(threads)
    sides: dict[str, Callable[[], None]] = {"jaxllm": jax_step(batch_size, length)}
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if compare and not missing:
        sides["transformers"] = torch_step(batch_size, length, threads)
    for step in sides.values():
        for _ in range(2):
            step()
    turns = {name: functools.partial(_repeat, step, steps) for name, step in sides.items()}
    times = {
        name: [seconds / steps for seconds in of_side]
        for name, of_side in take_turns(turns, rounds).items()
    }
    tokens = batch_size * length
    result: dict[str, Any] = {
        name: {
            "tokens_per_second": tokens / statistics.median(seconds),
            "seconds_per_step": seconds,
        }
        for name, seconds in times.items()
    }
    result |= {"batch_size": batch_size, "length": length, "threads": threads}
    if "transformers" in times:
        ours, theirs = (statistics.median(times[name]) for name in ("jaxllm", "transformers"))
        result["speedup"] = theirs / ours
        result["speedup_by_round"] = [
            b / a for a, b in zip(times["jaxllm"], times["transformers"], strict=True)
        ]
    else:
        need = f"{' and '.join(missing)} missing: pip install 'jaxllm[bench]'"
        result["comparison_left_out"] = need if compare else "not asked for"
    return result


def _repeat(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()


def bind_to_cores(threads: int) -> None:
    """Restricts the process to so many cores; must come before JAX makes its thread pool."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:threads])


def jax_step(batch_size: int, length: int) -> Callable[[], None]:
    """A function that trains our model for one step and waits for it."""
    import jax

    from jaxllm.models import parameters, presets
    from jaxllm.training import objectives, optimizers, state, step

    config = presets.llama_15m().replace(max_positions=length)
    optimizer = optimizers.create_optimizer(
        optimizers.OptimizerConfig(
            name="adamw",
            schedule=optimizers.ScheduleConfig(name="constant", peak=LEARNING_RATE),
            weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP,
        )
    )
    train_step = step.make_train_step(objectives.language_model_loss(config), optimizer)
    held = state.create_state(lambda: parameters.init_params(config, jax.random.key(0)), optimizer)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, length + 1))
    batch = {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "weights": np.ones((batch_size, length), np.float32),
    }

    def run() -> None:
        nonlocal held
        held, metrics = train_step(held, batch)
        jax.block_until_ready((held, metrics))

    return run


def torch_step(batch_size: int, length: int, threads: int) -> Callable[[], None]:
    """The same for `transformers.LlamaForCausalLM` with PyTorch's fused AdamW."""
    import torch
    import transformers

    from jaxllm.models import presets

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ours = presets.llama_15m()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.embed_dim,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            intermediate_size=ours.mlp_dim,
            max_position_embeddings=length,
            tie_word_embeddings=ours.tie_embeddings,
        )
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens = torch.randint(0, ours.vocab_size, (batch_size, length))

    def run() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return run
