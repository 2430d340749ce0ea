"""Objectives on a tiny decoder: what counts, what combines, what derivatives they have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import decoder, parameters
from jaxllm.models.config import ModelConfig, MoEConfig
from jaxllm.models.weights import Weight
from jaxllm.training import flops, objectives, optimizers, state, step
from tests.distributed.small_run import MODEL, Loader

CAPPED = MODEL.replace(num_layers=1, tie_embeddings=False, logit_softcap=5.0)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def batch():
    return next(Loader().iterator(0))


def _value_and_grads(loss, params, batch):
    (value, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, KEY)
    return value, metrics, grads


@pytest.mark.parametrize("model", [MODEL.replace(num_layers=1), CAPPED], ids=["tied", "capped"])
def test_fused_and_plain_agree(model, batch):
    params = parameters.init_params(model, KEY)
    fused, plain = (
        _value_and_grads(
            objectives.language_model_loss(model, implementation=name, z_loss=0.01, chunk=24),
            params,
            batch,
        )
        for name in ("fused", "plain")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), fused, plain)
    value, metrics, _ = fused
    np.testing.assert_allclose(metrics["loss"].compute(), value, rtol=1e-6)
    assert float(metrics["loss"].weight) == batch["weights"].sum()
    np.testing.assert_allclose(
        metrics["cross_entropy"].compute() + metrics["z_loss"].compute(), value, rtol=1e-5
    )


def test_bfloat16_compute_keeps_float32_masters(batch):
    model = MODEL.replace(num_layers=1)
    half = model.replace(compute_dtype="bfloat16", remat="dots")
    params = parameters.init_params(model, KEY)
    exact, rounded = (
        _value_and_grads(objectives.language_model_loss(config, chunk=24), params, batch)
        for config in (model, half)
    )
    np.testing.assert_allclose(rounded[0], exact[0], rtol=0.01)
    for a, b in zip(jax.tree.leaves(rounded[2]), jax.tree.leaves(exact[2]), strict=True):
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def test_weightless_targets_give_no_gradient(batch):
    """Supervised fine-tuning: what stands after the weights end cannot matter."""
    model = MODEL.replace(num_layers=1)
    params = parameters.init_params(model, KEY)
    loss = objectives.language_model_loss(model, chunk=24)
    answer = batch | {"weights": batch["weights"] * (np.arange(16) < 9)}
    changed = answer | {
        name: np.where(np.arange(16) < 9, answer[name], 3) for name in ("tokens", "targets")
    }
    first, second = (_value_and_grads(loss, params, b) for b in (answer, changed))
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), first[2], second[2]
    )


def test_router_losses_are_weighed():
    model = MODEL.replace(
        num_layers=1, moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=16)
    )
    params, batch = parameters.init_params(model, KEY), next(Loader().iterator(0))
    loss = objectives.language_model_loss(model, load_balance=0.5, router_z=0.25)
    value, metrics = jax.jit(loss)(params, batch, KEY)
    parts = {name: float(mean.compute()) for name, mean in metrics.items()}
    assert parts["load_balance"] > 0.9
    expected = parts["cross_entropy"] + 0.5 * parts["load_balance"] + 0.25 * parts["router_z"]
    np.testing.assert_allclose(value, expected, rtol=1e-5)


class Doubled(Weight):
    """A head that is not an array."""

    def __init__(self, array):
        self.array = array

    def matmul(self, x, context=None):
        return 2.0 * (x @ self.array)


def test_head_container_takes_the_plain_path(batch):
    params = parameters.init_params(CAPPED, KEY)
    kernel = params["lm_head"]["kernel"]
    loss = objectives.language_model_loss(CAPPED)
    contained, _ = loss(params | {"lm_head": {"kernel": Doubled(kernel)}}, batch, KEY)
    doubled, _ = loss(params | {"lm_head": {"kernel": 2.0 * kernel}}, batch, KEY)
    np.testing.assert_allclose(contained, doubled, rtol=1e-5)


def test_pair_log_probs_are_those_of_each_row(batch):
    params = parameters.init_params(CAPPED, KEY)
    short = {name: value[:, :11] for name, value in next(Loader().iterator(1)).items()}

    def expected(part):
        inputs = objectives.ModelInputs(
            positions=part["positions"], segment_ids=part["segment_ids"]
        )
        logits = decoder.forward(CAPPED, params, part["tokens"], inputs).logits
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), part["targets"][..., None], -1)
        return (chosen[..., 0] * part["weights"]).sum(-1)

    pair = jax.jit(lambda b: objectives.pair_log_probs(CAPPED, params, b, chunk=40))(
        {"chosen": short, "rejected": batch}
    )
    for ours, part in zip(pair, (short, batch), strict=True):
        np.testing.assert_allclose(ours, expected(part), rtol=1e-4)


def test_forget_retain_adds_the_parts_and_accumulates(batch):
    model = MODEL.replace(num_layers=1)
    params = parameters.init_params(model, KEY)
    loss = objectives.language_model_loss(model)
    both = {"forget": batch, "retain": next(Loader().iterator(1))}
    combined = objectives.forget_retain(
        objectives.mapped(loss, jnp.negative), loss, forget_weight=0.5, retain_weight=2.0
    )
    value, metrics = jax.jit(combined)(params, both, KEY)
    parts = [loss(params, part, KEY)[0] for part in both.values()]
    np.testing.assert_allclose(value, -0.5 * parts[0] + 2.0 * parts[1], rtol=1e-5)
    np.testing.assert_allclose(metrics["forget/loss"].compute(), -parts[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["retain/loss"].compute(), parts[1], rtol=1e-5)
    optimizer = optimizers.create_optimizer(optimizers.OptimizerConfig("sgd"))
    carried = state.create_state(params, optimizer)
    _, made = step.make_train_step(combined, optimizer, accumulate=2)(carried, both)
    np.testing.assert_allclose(made["loss"].weight, 8.0)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='fast'"):
        objectives.language_model_loss(MODEL, implementation="fast")


def test_flops_count_matrices_and_attention():
    model = ModelConfig(
        vocab_size=100,
        embed_dim=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=16,
    )
    layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16
    assert flops.active_matrix_params(model) == 2 * layer + 8 * 100
    # Row of 4: a token attends to 1 + 2 + 3 + 4 = 10 places, 2.5 on average.
    attention = 2 * (2 * 8) * 6 * 2.5
    assert flops.flops_per_token(model, 4) == 6 * (2 * layer + 800) + attention
    windowed = model.replace(windows=(2, None))  # 1 + 2 + 2 + 2 = 7 places
    saved = flops.flops_per_token(model, 4) - flops.flops_per_token(windowed, 4)
    np.testing.assert_allclose(saved, (2 * 8) * 6 * 0.75)
    sparse = model.replace(moe=MoEConfig(num_experts=8, experts_per_token=2, expert_dim=16))
    expected = 2 * (layer - 3 * 8 * 16 + 2 * 3 * 8 * 16 + 8 * 8) + 800
    assert flops.active_matrix_params(sparse) == expected
    assert flops.peak_flops(jax.devices("cpu")) is None
