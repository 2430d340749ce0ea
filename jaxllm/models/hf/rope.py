"""Rotary settings of a config.json: classic names, transformers 5's `rope_parameters`, and back."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import RopeConfig

SCALING_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# Families whose attention rotates only a part of every head when asked to.
PARTIAL_FAMILIES = ("gpt_neox", "phi3")
_ORIGINAL = "original_max_position_embeddings"


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 may nest the settings by layer type; one set for all layers is supported."""
    nested = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    if not nested:
        return dict(parameters)
    first = next(iter(nested.values()))
    if any(value != first for value in nested.values()):
        raise ValueError(
            f"rope_parameters differ between layer types ({sorted(nested)}): "
            "one setting for all layers is supported."
        )
    return dict(first)


def rope_from_hf(
    family: str, values: dict[str, Any], *, theta: float, partial: float, max_positions: int
) -> RopeConfig:
    """The rotary settings of a parsed config.json.

    Args:
      family: its model_type.
      values: the parsed file.
      theta, partial: the family's defaults.
      max_positions: `max_position_embeddings`.

    Raises:
      ValueError: an unknown type, or a setting that is missing or unsupported.
    """
    # The classic key wins over the new one, as in transformers.
    rope = _flat(values.get("rope_scaling") or values.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # early Phi-3 checkpoints name it so
    if kind not in SCALING_TYPES:
        raise ValueError(
            f"rope scaling type {kind!r} is not supported: expected one of {SCALING_TYPES}."
        )

    def setting(name: str, *aliases: str, default: Any) -> Any:
        for key in (name, *aliases):
            for source in (rope, values):
                if source.get(key) is not None:
                    return source[key]
        return default

    partial = float(setting("partial_rotary_factor", "rotary_pct", default=partial))
    if partial != 1.0 and family not in PARTIAL_FAMILIES:
        raise ValueError(
            f"partial_rotary_factor={partial} is not supported for {family!r}: "
            f"only {PARTIAL_FAMILIES} rotate a part of the head."
        )
    theta = float(setting("rope_theta", "rotary_emb_base", default=theta))
    if kind == "default":
        return RopeConfig(theta=theta, partial=partial)
    common: dict[str, Any] = {"type": kind, "theta": theta, "partial": partial}
    required = {
        "longrope": ("short_factor", "long_factor"),
        "yarn": (),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }.get(kind, ("factor",))
    missing = [name for name in required if rope.get(name) is None]
    if missing:
        raise ValueError(f"rope scaling type {kind!r} needs {missing[0]!r}: got {sorted(rope)}.")
    if kind == "linear":
        return RopeConfig(**common, factor=float(rope["factor"]))
    if kind == "dynamic":  # measured against max_position_embeddings, always
        return RopeConfig(
            **common, factor=float(rope["factor"]), original_max_positions=max_positions
        )
    # A top-level value takes precedence, as in transformers (Phi-3 keeps it there).
    original = int(values.get(_ORIGINAL) or rope.get(_ORIGINAL) or max_positions)
    common["original_max_positions"] = original
    factor = rope.get("factor")
    common["factor"] = max(float(factor if factor is not None else max_positions / original), 1.0)
    if kind == "llama3":
        return RopeConfig(
            **common,
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    if rope.get("attention_factor") is not None:
        common["attention_factor"] = float(rope["attention_factor"])
    if kind == "longrope":
        return RopeConfig(
            **common,
            short_factor=tuple(float(x) for x in rope["short_factor"]),
            long_factor=tuple(float(x) for x in rope["long_factor"]),
        )
    return RopeConfig(
        **common,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def rope_to_hf(family: str, rope: RopeConfig, max_positions: int) -> dict[str, Any]:
    """Rotary settings for config.json, in the classic names that every version reads."""
    theta, partial = "rope_theta", "partial_rotary_factor"
    if family == "gpt_neox":
        theta, partial = "rotary_emb_base", "rotary_pct"
    values: dict[str, Any] = {theta: rope.theta}
    if family in PARTIAL_FAMILIES:
        values[partial] = rope.partial
    if rope.type == "default":
        return values | {"rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type not in ("linear", "dynamic"):
        scaling[_ORIGINAL] = rope.original_max_positions
    names: tuple[str, ...] = ()
    if rope.type == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    elif rope.type == "longrope":
        names = ("short_factor", "long_factor", "attention_factor")
    elif rope.type == "yarn":
        names = (
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "attention_factor",
        )
    for name in names:
        value = getattr(rope, name)
        if value is not None:
            scaling[name] = list(value) if isinstance(value, tuple) else value
    if family == "phi3":  # its first readers accept exactly type, short_factor and long_factor
        values[_ORIGINAL] = scaling.pop(_ORIGINAL, None)
        scaling = {"type": scaling.pop("rope_type"), **scaling}
        if rope.factor == max(max_positions / (rope.original_max_positions or max_positions), 1.0):
            del scaling["factor"]
    return values | {"rope_scaling": scaling}
