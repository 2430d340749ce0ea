"""Saving: what appears on disk, and what is refused."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm.models import segments
from jaxllm.models.hf import CheckpointError, load_hf, save_hf
from jaxllm.models.hf import save as save_module
from jaxllm.models.quantized import quantize_params
from jaxllm.training.sharding import MeshConfig, create_mesh
from tests.models.hf_models import CONFIGS, random_params

CONFIG = CONFIGS["qwen3"]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_sharded_index_above_the_limit(params, tmp_path):
    folder = save_hf(tmp_path / "model", CONFIG, params, max_shard_bytes=4096)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        with safe_open(folder / file, "np") as stored:
            sizes = [stored.get_tensor(name).nbytes for name in stored.keys()]
            assert all(index["weight_map"][name] == file for name in stored.keys())
        assert sum(sizes) <= 4096 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total


def test_one_file_below_the_limit(params, tmp_path):
    folder = save_hf(tmp_path / "model", CONFIG, params)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_how_layers_are_stacked_does_not_matter(params, tmp_path):
    folder = save_hf(tmp_path / "model", CONFIG, segments.unroll(params))
    assert_same(load_hf(folder)[1], params)


def test_sharded_parameters_are_gathered(params, tmp_path):
    folder = save_hf(tmp_path / "first", CONFIG, params)
    config, sharded = load_hf(folder, create_mesh(MeshConfig(fsdp=4, tensor=2)))
    again = save_hf(tmp_path / "second", config, sharded)
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_dtype(params, tmp_path):
    folder = save_hf(tmp_path / "model", CONFIG, params, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same(load_hf(folder)[1], jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    with pytest.raises(CheckpointError, match="dtype='int8' cannot be stored"):
        save_hf(tmp_path / "other", CONFIG, params, dtype="int8")


def test_quantised_weights_only_when_asked_for(params, tmp_path):
    quantized = quantize_params(params, bits=8)
    with pytest.raises(CheckpointError, match="layer 0: .* QuantizedWeight: pass dequantize=True"):
        save_hf(tmp_path / "model", CONFIG, quantized)
    assert not list(tmp_path.iterdir())
    folder = save_hf(tmp_path / "model", CONFIG, quantized, dequantize=True)
    _, dense = load_hf(folder)
    kernel = dense["layers"][0]["feedforward"]["down"]["kernel"]
    expected = quantized["layers"][0]["feedforward"]["down"]["kernel"].materialize()
    np.testing.assert_array_equal(kernel, expected)


def test_a_failure_leaves_nothing_behind(params, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(save_module, "write_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(tmp_path / "model", CONFIG, params)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_replaced_only_when_asked(params, tmp_path):
    folder = save_hf(tmp_path / "model", CONFIG, params)
    (folder / "note.txt").write_text("old")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_hf(folder, CONFIG, params)
    save_hf(folder, CONFIG, params, overwrite=True)
    assert not (folder / "note.txt").exists() and (folder / "config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_tokenizer_files_are_copied(params, tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(CheckpointError, match="holds no tokenizer files"):
        save_hf(tmp_path / "model", CONFIG, params, tokenizer_from=source)
    (source / "tokenizer.json").write_text("{}")
    (source / "custom.py").write_text("")
    folder = save_hf(tmp_path / "model", CONFIG, params, tokenizer_from=source)
    assert (folder / "tokenizer.json").exists() and not (folder / "custom.py").exists()


def test_parameters_that_do_not_fit_the_config_are_refused(params, tmp_path):
    def save(changed, config=CONFIG):
        return save_hf(tmp_path / "model", config, changed)

    with pytest.raises(CheckpointError, match="hold 3 layers, the config 2"):
        save(params, CONFIG.replace(num_layers=2))
    with pytest.raises(CheckpointError, match="lacks 'lm_head/kernel'"):
        save(params, CONFIG.replace(tie_embeddings=False))
    with pytest.raises(CheckpointError, match="has 'lm_head/kernel'.*no place"):
        save(params | {"lm_head": {"kernel": jnp.ones((16, 40))}})
    with pytest.raises(CheckpointError, match=r"layer 0: .*/kernel .* \(24, 16\).*\(20, 16\)"):
        save(params, CONFIG.replace(mlp_dim=20))
