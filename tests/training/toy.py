"""A toy next-token model, small enough that compiling it takes no time, and batches for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm.training import losses
from jaxllm.training.metrics import Mean

VOCAB, DIM, LENGTH, ROWS = 13, 4, 6, 8

AXES = {
    "embed": {"tokens": PartitionSpec("vocab", "embed")},
    "layers": (
        {
            "attention_norm": {"scale": PartitionSpec("layers", "norm")},
            "o": {"kernel": PartitionSpec("layers", "heads", "embed")},
        },
    ),
    "lm_head": {"kernel": PartitionSpec("embed", "vocab")},
}


def init():
    """Parameters named like a decoder's: an embedding, two residual matrices, a head."""
    rng = np.random.default_rng(3)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    return {
        "embed": {"tokens": normal(VOCAB, DIM)},
        "layers": (
            {
                "attention_norm": {"scale": jnp.ones((2, DIM))},
                "o": {"kernel": normal(2, DIM, DIM, scale=0.3)},
            },
        ),
        "lm_head": {"kernel": normal(DIM, VOCAB)},
    }


def loss(params, batch, rng):
    """Cross-entropy of the toy; multiplicative noise shows that randomness is folded by step."""
    x = params["embed"]["tokens"][batch["tokens"]]
    layer = params["layers"][0]
    for i in range(2):
        x = x + jnp.tanh((x * layer["attention_norm"]["scale"][i]) @ layer["o"]["kernel"][i])
    if "noise" in batch:
        x = x * (1.0 + batch["noise"].mean() * jax.random.normal(rng, x.shape))
    sums = losses.cross_entropy(x @ params["lm_head"]["kernel"], batch["targets"], batch["weights"])
    weight = jax.lax.stop_gradient(sums.weight)
    scalar = sums.total / jnp.where(weight == 0, 1.0, weight)
    return scalar, {"loss": Mean(sums.total, weight), "accuracy": Mean(sums.correct, weight)}


def batch(step, rows=ROWS, seed=0, noise=0.0):
    """Batch `step` of a stream: a pure function of (seed, step). Rows have unequal token counts."""
    rng = np.random.default_rng([seed, step])
    start = rng.integers(0, VOCAB, (rows, 1))
    stride = rng.integers(1, 3, (rows, 1))
    tokens = ((start + stride * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
    lengths = rng.integers(1, LENGTH + 1, (rows, 1))
    weights = (np.arange(LENGTH) < lengths).astype(np.float32)
    result = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return result | {"noise": np.full((rows, LENGTH), noise, np.float32)} if noise else result


class Loader:
    """Serves `batch`, and notes which steps were asked for.

    It ends before a step, fails at one, and spoils those in `spoil_at` by a weight that is NaN.
    """

    def __init__(self, seed=0, noise=0.0, end=None, fail_at=None, spoil_at=()):
        self.seed, self.noise, self.end = seed, noise, end
        self.fail_at, self.spoil_at = fail_at, spoil_at
        self.served = []

    def iterator(self, start_step=0):
        step = start_step
        while self.end is None or step < self.end:
            if step == self.fail_at:
                raise KeyboardInterrupt
            self.served.append(step)
            made = batch(step, seed=self.seed, noise=self.noise)
            if step in self.spoil_at:
                made["weights"][0, 0] = np.nan
            yield made
            step += 1

    def describe(self, step):
        return f"toy rows {step * ROWS} to {(step + 1) * ROWS - 1}"

    def fingerprint(self):
        return {"manifest": "toy", "seed": self.seed, "batch_size": ROWS, "row_length": LENGTH}
