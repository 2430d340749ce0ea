"""Positions and rotary embeddings, with every context extension of HF `rope_scaling`.

Letters: B batch, T time, S sets of frequencies, R rotated pairs (rotary_dim / 2).
"""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.models.config import ModelConfig, RopeConfig


@flax.struct.dataclass
class RopeSets:
    """Alternative sets of rotary frequencies, of which every token uses one.

    Attributes:
      inv_freq: [S, R] radians per position.
      scale: [S] multiplier of cos and sin (attention temperature).
    """

    inv_freq: Float[Array, "S R"]
    scale: Float[Array, " S"]


def token_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token within its run of equal segment ids."""
    index = jnp.arange(segment_ids.shape[1])[None]
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(jnp.where(changed, index[:, 1:], 0), ((0, 0), (1, 0)))
    return index - jax.lax.cummax(starts, axis=1)


def segment_lengths(
    positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Last position + 1 of the sequence that each token belongs to."""
    if segment_ids is None:
        return jnp.broadcast_to(positions.max(axis=1, keepdims=True) + 1, positions.shape)

    def of_row(position: Array, segment: Array) -> Array:
        longest = jax.ops.segment_max(position, segment, num_segments=position.shape[0] + 1)
        return longest[segment] + 1

    return jax.vmap(of_row)(positions, segment_ids)


def _base_frequencies(theta: float, dim: int) -> np.ndarray:
    """theta^(-2i/dim), in float32 as checkpoints were trained with."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.float32(theta) ** exponent).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """YaRN (arXiv:2309.00071, 3.2): slow pairs interpolated, fast ones kept, a ramp between."""

    def correction_dim(rotations: float) -> float:
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    base = _base_frequencies(rope.theta, dim)
    return base / rope.factor * ramp + base * (1 - ramp)


def _llama3_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Llama 3.1: slow pairs divided by the factor, fast ones kept, smooth in between."""
    base = _base_frequencies(rope.theta, dim)
    turns = rope.original_max_positions * base / (2 * np.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * base / rope.factor + smooth * base


def attention_factor(rope: RopeConfig) -> float:
    """The multiplier of cos and sin: the config's, or the default of the type."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "yarn":

        def temperature(mscale: float) -> float:
            return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

        if rope.mscale and rope.mscale_all_dim:
            return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
        return temperature(1.0)
    if rope.type == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    return 1.0


def rope_sets(rope: RopeConfig, dim: int) -> RopeSets:
    """The frequency sets of a config: one, or for longrope two (0 short, 1 long).

    Args:
      rope: the rotary settings. For "dynamic" the set is the one within the original context.
      dim: number of rotated dimensions, even.
    """
    base = _base_frequencies(rope.theta, dim)
    if rope.type == "linear":
        frequencies = base[None] / rope.factor
    elif rope.type == "yarn":
        frequencies = _yarn_frequencies(rope, dim)[None]
    elif rope.type == "llama3":
        frequencies = _llama3_frequencies(rope, dim)[None]
    elif rope.type == "longrope":
        frequencies = base[None] / np.asarray([rope.short_factor, rope.long_factor], np.float32)
    else:
        frequencies = base[None]
    scale = np.full(frequencies.shape[0], attention_factor(rope), np.float32)
    return RopeSets(inv_freq=jnp.asarray(frequencies, jnp.float32), scale=jnp.asarray(scale))


def _dynamic_frequencies(
    rope: RopeConfig, dim: int, lengths: Int[Array, "B T"]
) -> Float[Array, "B T R"]:
    """Dynamic NTK: the base grows with the length of the sequence beyond the original context."""
    original = rope.original_max_positions
    stretch = rope.factor * jnp.maximum(lengths, original) / original - (rope.factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return 1.0 / theta[..., None] ** exponent


def rope_tables(
    config: ModelConfig,
    positions: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    rope_set: Int[Array, "B ..."] | None = None,
    sets: RopeSets | None = None,
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """cos and sin of every token's angles, float32, multiplied by the set's scale.

    Args:
      config: the model's.
      positions: of the tokens.
      segment_ids: tokens of one segment share one decision about the length of their sequence.
      rope_set: which set each row, or each token, uses. None: the only one; for longrope the long
        one where the sequence is longer than the original context.
      sets: frequencies in place of the config's.
    """
    rope, dim = config.rope, config.rotary_dim
    if rope.type == "dynamic" and sets is None:
        inv_freq = _dynamic_frequencies(rope, dim, segment_lengths(positions, segment_ids))
        scale = jnp.float32(attention_factor(rope))
    else:
        sets = rope_sets(rope, dim) if sets is None else sets
        if rope_set is None and sets.inv_freq.shape[0] == 1:
            inv_freq, scale = sets.inv_freq[0], sets.scale[0]
        else:
            if rope_set is None:
                if rope.original_max_positions is None:
                    raise ValueError(
                        "several rope sets without rope.original_max_positions: give rope_set."
                    )
                lengths = segment_lengths(positions, segment_ids)
                rope_set = (lengths > rope.original_max_positions).astype(jnp.int32)
            if rope_set.ndim == 1:
                rope_set = rope_set[:, None]
            inv_freq, scale = sets.inv_freq[rope_set], sets.scale[rope_set][..., None]
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T H D"]:
    """Rotates the first 2R dimensions of every head; dimension i is paired with i + R."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
