"""Evaluation is the mean over all tokens of all batches, in three units."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.training import evaluate, sharding, step
from tests.training import toy


def test_mean_over_all_tokens_in_three_units():
    eval_step = step.make_eval_step(toy.loss)
    batches = [toy.batch(i) for i in range(3)]
    params = toy.init()
    values = evaluate.evaluate(eval_step, params, batches, total_bytes=70)
    whole = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    scalar, metrics = toy.loss(params, whole, None)
    np.testing.assert_allclose(values["loss"], scalar, rtol=1e-6)
    assert values["tokens"] == whole["weights"].sum()
    np.testing.assert_allclose(values["perplexity"], math.exp(scalar), rtol=1e-5)
    nats = float(metrics["loss"].total)
    np.testing.assert_allclose(values["bits_per_byte"], nats / math.log(2) / 70, rtol=1e-6)
    mesh = sharding.create_mesh()
    sharded = evaluate.evaluate(
        step.make_eval_step(toy.loss, mesh=mesh), params, batches, mesh=mesh
    )
    np.testing.assert_allclose(sharded["loss"], values["loss"], rtol=1e-6)


def test_nothing_to_evaluate_is_refused():
    eval_step = step.make_eval_step(toy.loss)
    with pytest.raises(ValueError, match="no batch"):
        evaluate.evaluate(eval_step, toy.init(), [])
    empty = toy.batch(0) | {"weights": np.zeros((toy.ROWS, toy.LENGTH), np.float32)}
    with pytest.raises(ValueError, match="no token"):
        evaluate.evaluate(eval_step, toy.init(), [empty])
    with pytest.raises(ValueError, match="total_bytes=0"):
        evaluate.evaluate(eval_step, toy.init(), [toy.batch(0)], total_bytes=0)
