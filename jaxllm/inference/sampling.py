"""From logits to a token: penalties, filters, sampling. All act on [..., V] and compose.

Their order is that of `transformers`: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen.

    Attributes:
      temperature: 0 = the most likely token; otherwise logits / temperature are sampled.
      top_k: keep the k most likely tokens; None = all.
      top_p: keep the most likely tokens that together reach this probability (nucleus sampling,
        arXiv:1904.09751); None = all.
      min_p: keep tokens with at least this share of the largest probability (arXiv:2407.01082);
        None = all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that the row
        already has, prompt included (CTRL, arXiv:1909.05858); 1 = none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be zero or positive.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1], or be None.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1], or be None.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive.")

    def active(self) -> tuple[str, ...]:
        """Names of the steps that do something: what a compiled program depends on."""
        names = () if self.repetition_penalty == 1 else ("repetition_penalty",)
        if self.temperature == 0:
            return names
        filters = (name for name in _FILTERS if getattr(self, name) is not None)
        return (*names, "temperature", *filters)

    def values(self) -> dict[str, Array]:
        """The numbers of the active steps, which a compiled program takes as arguments."""
        return {name: jnp.asarray(getattr(self, name)) for name in self.active()}


def penalize_repetition(
    logits: Float[Array, "... V"], seen: Bool[Array, "... V"], penalty: float | Float[Array, ""]
) -> Float[Array, "... V"]:
    """Makes tokens that were seen less likely (penalty above 1) or more likely (below)."""
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, penalized, logits)


def keep_top_k(logits: Float[Array, "... V"], k: int | Int[Array, ""]) -> Float[Array, "... V"]:
    """-inf for all but the k largest; ties with the k-th stay."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    index = jnp.minimum(k, logits.shape[-1]) - 1
    return _keep(logits, jax.lax.dynamic_index_in_dim(ordered, index, axis=-1))


def keep_top_p(logits: Float[Array, "... V"], p: float | Float[Array, ""]) -> Float[Array, "... V"]:
    """-inf for tokens outside of the smallest set of most likely ones with probability >= p."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The most likely token always stays.
    kept = (before < p).at[..., 0].set(True)
    return _keep(logits, jnp.where(kept, ordered, jnp.inf).min(-1, keepdims=True))


def keep_min_p(logits: Float[Array, "... V"], p: float | Float[Array, ""]) -> Float[Array, "... V"]:
    """-inf for tokens less likely than p times the most likely one."""
    return _keep(logits, logits.max(-1, keepdims=True) + jnp.log(p))


def _keep(logits, threshold):
    return jnp.where(logits >= threshold, logits, -jnp.inf)


_FILTERS = {"top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p}


def process_logits(
    logits: Float[Array, "... V"],
    values: dict[str, Array],
    seen: Bool[Array, "... V"] | None = None,
) -> Float[Array, "... V"]:
    """Applies the steps of `SamplingConfig.values()`, in order.

    Args:
      logits: of the model.
      values: numbers of the active steps.
      seen: tokens that each row already has; read by the repetition penalty only.
    """
    if "repetition_penalty" in values:
        if seen is None:
            raise ValueError("the repetition penalty needs the tokens seen so far.")
        logits = penalize_repetition(logits, seen, values["repetition_penalty"])
    if "temperature" in values:
        logits = logits / values["temperature"]
    for name, keep in _FILTERS.items():
        if name in values:
            logits = keep(logits, values[name])
    return logits


def seen_in_prompts(
    tokens: Int[Array, "R P"], lengths: Int[Array, " R"], vocab_size: int
) -> Bool[Array, "R V"]:
    """Which tokens each right-padded prompt holds: what the repetition penalty begins with."""
    rows, width = tokens.shape
    # Padding is written beyond the vocabulary, and dropped.
    ids = jnp.where(jnp.arange(width) < lengths[:, None], tokens, vocab_size)
    seen = jnp.zeros((rows, vocab_size), bool)
    return seen.at[jnp.arange(rows)[:, None], ids].set(True, mode="drop")


def check_key(sampling: SamplingConfig, key: PRNGKeyArray | None) -> None:
    """Refuses sampling without randomness.

    Raises:
      ValueError: the temperature is above 0, and there is no key.
    """
    if sampling.temperature > 0 and key is None:
        raise ValueError("sampling with temperature > 0 needs a key (jax.random.key(seed)).")


def choose(
    keys: PRNGKeyArray, logits: Float[Array, "R V"], values: dict[str, Array]
) -> Int[Array, " R"]:
    """The next token of every row from its processed logits, with a key a row."""
    if "temperature" not in values:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
