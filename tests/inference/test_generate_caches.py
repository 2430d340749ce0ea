"""Generation with caches that are not dense: the same answers, or near ones, in less memory."""

from __future__ import annotations

import jax
import pytest

from jaxllm.inference.beam import BeamConfig, beam_search
from jaxllm.inference.generate import generate, sample
from jaxllm.inference.sampling import SamplingConfig
from jaxllm.kv_compression.streaming_llm import StreamingLLMPolicy
from jaxllm.models.config import ModelConfig
from jaxllm.models.hf import load_hf
from jaxllm.models.parameters import init_params
from jaxllm.models.window_cache import SlidingWindowPolicy
from jaxllm.quantization.kivi import KIVIPolicy

PROMPTS = [[1, 2, 3], [7] * 21, [5, 4, 3, 2, 1, 9, 8]]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=40,
        embed_dim=16,
        num_layers=3,
        num_heads=2,
        mlp_dim=24,
        max_positions=16,
        windows=(6, 6, None),
        initializer_range=0.4,
    )
    return config, init_params(config, jax.random.key(0))


def test_samples_and_beams_over_rings_are_those_over_dense_caches(model):
    options = {"max_new_tokens": 9, "stop_tokens": ()}
    rings = {"cache_policy": SlidingWindowPolicy(), "prefill_chunk": 10}
    hot = {"sampling": SamplingConfig(temperature=0.8), "key": jax.random.key(1), "num_samples": 2}
    tokens = lambda found: [[answer.tokens for answer in row] for row in found]  # noqa: E731
    expected = tokens(sample(*model, PROMPTS, **options, **hot))
    assert tokens(sample(*model, PROMPTS, **options, **hot, **rings)) == expected
    beams = BeamConfig(2)
    expected = tokens(beam_search(*model, PROMPTS, **options, beams=beams))
    assert tokens(beam_search(*model, PROMPTS, **options, beams=beams, **rings)) == expected


def test_streaming_goes_on_at_constant_size(model):
    """Answers are those of a dense cache until the window is full, and never end for memory."""
    config, params = model
    config = config.replace(windows=None)
    policy = StreamingLLMPolicy(num_sinks=2, window=24)
    options = {"max_new_tokens": 90, "stop_tokens": ()}
    dense = generate(config, params, PROMPTS[:1], **options)[0]
    found = generate(config, params, PROMPTS[:1], **options, cache_policy=policy)[0]
    assert len(found) == 90
    assert found[:23] == dense[:23]
    assert found != dense
    sizes = {
        sum(leaf.size for leaf in jax.tree.leaves(policy.init(config, params, 1, slots)))
        for slots in (26, 100_000)
    }
    assert len(sizes) == 1


def test_a_real_model_tells_the_same_story_from_fewer_bits(shared_dir):
    config, params = load_hf(shared_dir / "data" / "models" / "stories260k")
    prompts = [[1, 403, 407, 261, 378], [1, 403, 407], [1, 410, 259, 436, 333, 350, 412, 286, 261]]
    options = {"max_new_tokens": 40, "stop_tokens": ()}
    dense = generate(config, params, prompts, **options)

    def agreement(key_bits, value_bits):
        policy = KIVIPolicy(key_bits, value_bits, key_group=8, value_group=None, residual=8)
        found = generate(config, params, prompts, **options, cache_policy=policy)
        return [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 40)
            for x, y in zip(found, dense, strict=True)
        ]

    assert agreement(8, 8) == [40, 40, 40]
    assert min(agreement(2, 2)) < 40
