"""Beam search: against all sequences there are, and against stored reference beams."""

from __future__ import annotations

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference.beam import BeamConfig, beam_search
from jaxllm.inference.generate import generate
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.hf import load_hf
from jaxllm.models.parameters import init_params

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "beams.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=5, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, initializer_range=0.5
    )
    return config, init_params(config, jax.random.key(2))


def test_many_beams_find_the_best_of_all_sequences(model):
    config, params = model
    prompt, stop = [1, 3, 2], 0
    answers = [
        answer
        for length in (1, 2, 3)
        for answer in itertools.product(range(5), repeat=length)
        if stop not in answer[:-1] and (answer[-1] == stop or length == 3)
    ]
    rows = jnp.asarray([prompt + [*answer, 0, 0, 0][:3] for answer in answers])
    logs = jax.nn.log_softmax(forward(config, params, rows).logits)
    scores = []
    for row, answer in enumerate(answers):
        steps = [float(logs[row, 2 + i, token]) for i, token in enumerate(answer)]
        scores.append(sum(steps))
    best = sorted(zip(scores, answers, strict=True), reverse=True)
    # 5 beams hold every unfinished sequence of one step, 25 candidates every one of two.
    (found,) = beam_search(
        config,
        params,
        [prompt],
        max_new_tokens=3,
        beams=BeamConfig(5, length_penalty=0.0, early_stopping="never"),
        stop_tokens=[stop],
    )
    assert found[0].score == pytest.approx(best[0][0], abs=1e-4)
    assert found[0].tokens == [token for token in best[0][1] if token != stop]
    assert [beam.score for beam in found] == sorted((b.score for b in found), reverse=True)


def test_one_beam_is_greedy_and_rows_are_independent(model):
    prompts = [[1, 2], [4, 4, 4, 3], [2]]
    options = {"max_new_tokens": 6, "stop_tokens": ()}
    greedy = generate(*model, prompts, **options)
    single = beam_search(*model, prompts, **options, beams=BeamConfig(1))
    assert [beams[0].tokens for beams in single] == greedy
    together = beam_search(*model, prompts, **options)
    alone = beam_search(*model, prompts[1:2], **options)
    assert [b.tokens for b in together[1]] == [b.tokens for b in alone[0]]
    np.testing.assert_allclose(
        [b.score for b in together[1]], [b.score for b in alone[0]], atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_real_checkpoints_give_the_reference_beams(shared_dir, name):
    stored = GOLDEN[name]
    config, params = load_hf(shared_dir / "data" / "models" / name)
    for new, rows in itertools.groupby(stored["rows"], key=lambda row: row["new"]):
        rows = list(rows)
        found = beam_search(
            config,
            params,
            [row["prompt"] for row in rows],
            max_new_tokens=new,
            beams=BeamConfig(stored["beams"]),
            stop_tokens=stored["eos"],
        )
        for row, beams in zip(rows, found, strict=True):
            assert [beam.tokens for beam in beams] == row["beams"]
            np.testing.assert_allclose([b.score for b in beams], row["scores"], atol=1e-4)


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="num_beams=0"):
        BeamConfig(0)
    with pytest.raises(ValueError, match="early_stopping='soon'"):
        BeamConfig(early_stopping="soon")
    with pytest.raises(ValueError, match="num_beams=6 exceeds the vocabulary of 5"):
        beam_search(*model, [[1]], max_new_tokens=2, beams=BeamConfig(6))
    assert beam_search(*model, [], max_new_tokens=2) == []
