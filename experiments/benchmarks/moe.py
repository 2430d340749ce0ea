"""Speed of grouped experts against every expert on every token, side by side in one process.

A layer's experts alone, in float32: forward and backward for the training shapes, forward for
decoding steps. The sides take turns, so that a busy machine slows both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.turns import take_turns

# Name: (experts, experts a token, tokens, width, hidden width, with gradients).
SHAPES = {
    "train_8_experts": (8, 2, 2048, 256, 512, True),
    "train_64_experts": (64, 8, 1024, 256, 256, True),
    "train_few_tokens": (8, 2, 256, 256, 512, True),
    "train_half_chosen": (4, 2, 1024, 256, 512, True),
    "decode_1_token_8_experts": (8, 2, 1, 512, 1024, False),
    "decode_8_tokens_8_experts": (8, 2, 8, 512, 1024, False),
    "decode_1_token_64_experts": (64, 8, 1, 512, 512, False),
    "decode_32_tokens_8_experts": (8, 2, 32, 512, 1024, False),
}


def measure(*, rounds: int = 5, shapes: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Any]:
    """Milliseconds of both sides by shape (medians), and how many times faster grouping is.

    Args:
      rounds: times that each side has its turn.
      shapes: which of `SHAPES` are measured.

    Returns:
      By shape "every_ms", "grouped_ms", "ratio" and what "auto" chooses.
    """
    results: dict[str, Any] = {}
    for name in shapes:
        sides = functions(*SHAPES[name])
        for run in sides.values():
            run()
        seconds = take_turns(sides, rounds)
        every, grouped = (statistics.median(seconds[side]) for side in ("every", "grouped"))
        results[name] = {
            "every_ms": 1e3 * every,
            "grouped_ms": 1e3 * grouped,
            "ratio": every / grouped,
            "auto": chosen(SHAPES[name]),
        }
    return results


def chosen(shape: tuple[int, int, int, int, int, bool]) -> str:
    """Which side `MoEConfig(execution="auto")` takes for a shape."""
    from jaxllm.models import grouped_experts

    num_experts, per_token, tokens, *_ = shape
    faster = grouped_experts.is_faster(tokens, per_token, num_experts)
    return "grouped" if faster else "every"


def functions(
    num_experts: int, per_token: int, tokens: int, width: int, hidden: int, gradients: bool
) -> dict[str, Callable[[], None]]:
    """What to time, by side: runs the compiled layer once and waits for it."""
    import jax
    import jax.numpy as jnp

    from jaxllm.models import grouped_experts, moe, parameters
    from jaxllm.models.config import ModelConfig, MoEConfig
    from jaxllm.models.context import Context, Shared, Taps
    from jaxllm.models.inputs import ModelInputs
    from jaxllm.models.kv_cache import NoCache

    config = ModelConfig(
        vocab_size=8,
        embed_dim=width,
        num_layers=1,
        num_heads=1,
        mlp_dim=hidden,
        moe=MoEConfig(num_experts, per_token, hidden),
    )
    shared = Shared(positions=jnp.arange(tokens)[None], segment_ids=None, rope=None)
    context = Context(config, ModelInputs(), shared, 0, NoCache(), Taps(()))
    keys = jax.random.split(jax.random.key(0), 3)
    (segment,) = parameters.init_params(config, keys[0])["layers"]
    nodes = jax.tree.map(lambda w: w[0], segment["feedforward"].experts)
    x = jax.random.normal(keys[1], (1, tokens, width))
    logits = jax.random.normal(keys[2], (1, tokens, num_experts))
    experts, weights = moe.route(logits, config.moe)

    def timed(run: Callable[..., Any]) -> Callable[[], None]:
        def output(nodes: Any, x: Any) -> Any:
            return run(nodes, x, experts, weights, context)

        def loss(nodes: Any, x: Any) -> Any:
            return (output(nodes, x) ** 2).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1)) if gradients else output)

        def once() -> None:
            jax.block_until_ready(compiled(nodes, x))

        return once

    return {"every": timed(moe.run_every_expert), "grouped": timed(grouped_experts.run)}
