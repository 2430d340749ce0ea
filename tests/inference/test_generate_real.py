"""Generation with real checkpoints continues prompts exactly as the reference does."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.inference.generate import generate
from jaxllm.models.hf import load_hf


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char105", "stories260k-mixtral"])
def test_greedy_text_of_a_ragged_batch(shared_dir, name):
    config, params = load_hf(shared_dir / "data" / "models" / name)
    with np.load(shared_dir / "golden" / "models" / f"{name}.npz") as golden:
        prompts = [golden[f"ids_{i}"].tolist() for i in range(4)]
        expected = [golden[f"greedy_{i}"].tolist() for i in range(4)]
    lengths = {len(whole) - len(prompt) for prompt, whole in zip(prompts, expected, strict=True)}
    answers = generate(config, params, prompts, max_new_tokens=max(lengths), stop_tokens=())
    for prompt, answer, whole in zip(prompts, answers, expected, strict=True):
        assert (prompt + answer)[: len(whole)] == whole
