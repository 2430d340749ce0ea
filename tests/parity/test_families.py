"""Every family against transformers, in numbers and in files."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch", reason="live comparison needs the extra `parity` (torch)")
transformers = pytest.importorskip(
    "transformers", reason="live comparison needs the extra `parity` (transformers)"
)

from jaxllm.models import decoder, segments  # noqa: E402
from jaxllm.models.hf import config_from_hf, config_to_hf, load_hf, save_hf  # noqa: E402
from jaxllm.models.hf.defaults import DEFAULTS  # noqa: E402
from jaxllm.models.inputs import ModelInputs  # noqa: E402
from tests.parity.family_models import CASES, LENGTH_DEPENDENT, TIME, build  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request, tmp_path_factory):
    name = request.param
    folder = tmp_path_factory.mktemp("models") / name
    model = build(name)
    model.save_pretrained(folder)
    config, params = load_hf(folder)
    return name, folder, model, config, params


def reference(model, ids, **kwargs) -> np.ndarray:
    with torch.no_grad():
        if "dynamic" in getattr(getattr(model, "model", None), "rotary_emb", model).__dict__.get(
            "rope_type", ""
        ):
            model(torch.as_tensor(ids[:1, :2]))  # forgets the longest sequence that it ever saw
        return model(torch.as_tensor(ids), use_cache=False, **kwargs).logits.numpy()


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, ids, segment_ids=None):
    inputs = ModelInputs(segment_ids=segment_ids)
    return decoder.forward(config, params, ids, inputs).logits


def tokens(rows: int, time: int = TIME) -> np.ndarray:
    return np.random.default_rng(7).integers(3, 53, (rows, time))


def test_logits_scanned_and_unrolled(case, record_property):
    name, _, model, config, params = case
    ids = tokens(2)
    expected = reference(model, ids)
    scanned = np.asarray(logits(config, params, ids))
    unrolled = np.asarray(logits(config, segments.unroll(params), ids))
    record_property("max_error", float(np.abs(scanned - expected).max()))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(scanned, expected, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(unrolled, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_padded_and_packed_rows_equal_the_sequences_alone(case):
    """Left padding, right padding, and two documents in a row."""
    name, _, model, config, params = case
    ids = tokens(3)
    segment_ids = np.ones_like(ids)
    segment_ids[0, :5] = 0
    segment_ids[1, -6:] = 0
    segment_ids[2, 18:] = 2
    got = np.asarray(logits(config, params, ids, segment_ids))
    parts = ((0, slice(5, None)), (1, slice(0, -6)), (2, slice(0, 18)), (2, slice(18, None)))
    for row, part in parts:
        alone = reference(model, ids[row : row + 1, part])[0]
        np.testing.assert_allclose(got[row, part], alone, rtol=TOLERANCE, atol=TOLERANCE)
    if name in LENGTH_DEPENDENT:
        return
    mask = torch.as_tensor(segment_ids[:2] > 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batched = reference(model, ids[:2], attention_mask=mask, position_ids=positions)
    real = segment_ids[:2] > 0
    np.testing.assert_allclose(got[:2][real], batched[real], rtol=TOLERANCE, atol=TOLERANCE)


def test_saved_model_is_the_same_in_transformers(case, tmp_path):
    _, folder, model, config, params = case
    target = save_hf(tmp_path / "saved", config, params, max_shard_bytes=20_000)
    assert len(list(target.glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(
        target, attn_implementation="eager", dtype=torch.float32
    ).eval()
    old, new = model.state_dict(), again.state_dict()
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        assert torch.equal(tensor, new[key]), key
    ids = tokens(2)
    assert np.array_equal(reference(model, ids), reference(again, ids))
    assert load_hf(target)[0] == config


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_what_config_json_leaves_out_is_the_default_of_transformers(family):
    needed = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    spelt_out = transformers.AutoConfig.for_model(family, **needed).to_dict()
    assert config_from_hf({"model_type": family, **needed}) == config_from_hf(spelt_out)


@pytest.mark.parametrize("name", sorted(CASES))
def test_written_config_reads_the_same_in_transformers(name, tmp_path):
    family, settings = CASES[name]
    original = transformers.AutoConfig.for_model(family, **settings)
    ours = config_from_hf(original.to_dict())
    written = transformers.AutoConfig.for_model(**config_to_hf(ours))
    assert config_from_hf(written.to_dict()) == ours


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_stored_as_one_tensor_load_too(name, tmp_path):
    """The layout that transformers holds in memory, as some tools write it."""
    from safetensors.torch import save_file

    model = build(name)
    model.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    assert any("experts.gate_up_proj" in key for key in state)
    save_file(state, pathlib.Path(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    _, fused = load_hf(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, fused, params)


def test_one_optimizer_step_equals_torch(tmp_path):
    """Loss, gradients and one AdamW step of a Llama."""
    model = build("llama").train()
    model.save_pretrained(tmp_path / "before")
    ids = tokens(4)
    # A smaller eps would blow the rounding of gradients near zero up to whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4)
    loss = model(torch.as_tensor(ids), labels=torch.as_tensor(ids), use_cache=False).loss
    loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "after")

    config, params = load_hf(tmp_path / "before")

    def objective(params):
        logits = decoder.forward(config, params, jnp.asarray(ids)).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    adamw = optax.adamw(1e-3, b1=0.9, b2=0.999, eps=1e-4, weight_decay=0.1)

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(objective)(params)
        updates, _ = adamw.update(gradients, adamw.init(params), params)
        return value, optax.apply_updates(params, updates)

    value, stepped = step(params)
    assert abs(float(value) - loss.item()) < 1e-5
    _, expected = load_hf(tmp_path / "after")
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, params)
    assert min(jax.tree.leaves(moved)) > 5e-4
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(close, stepped, expected)
