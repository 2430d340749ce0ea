"""Loading: layouts, shards, types, and everything that can be wrong with a checkpoint."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.models.hf import CheckpointError, load_hf, save_hf, stream
from jaxllm.models.hf.safetensors_io import SafetensorsFile
from jaxllm.models.parameters import logical_axes
from jaxllm.training.sharding import MeshConfig, create_mesh, named_shardings
from tests.models.hf_models import CONFIGS, random_params

LLAMA = CONFIGS["llama"].replace(attention_bias=False, attention_out_bias=False, mlp_bias=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)` -> (folder, config, params), written once a module."""
    made = {}

    def get(name: str):
        if name not in made:
            config = LLAMA if name == "plain" else CONFIGS[name]
            params = random_params(config)
            folder = tmp_path_factory.mktemp("saved") / name
            made[name] = (save_hf(folder, config, params, max_shard_bytes=4000), config, params)
        return made[name]

    return get


@pytest.fixture
def broken(saved, tmp_path):
    """A one-file copy of a plain Llama, to be damaged: (folder, its tensors)."""
    _, config, params = saved("plain")
    folder = save_hf(tmp_path / "broken", config, params)
    return folder, load_file(folder / "model.safetensors")


def rewrite(folder: pathlib.Path, tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_comes_back_exactly(name, saved, monkeypatch):
    """Through both ways of assembling a parameter."""
    folder, config, params = saved(name)
    loaded_config, loaded = load_hf(folder)
    assert loaded_config == config
    assert_same(loaded, params)
    if name in ("llama", "phi3", "gpt_neox", "gpt2", "qwen2_moe", "deepseek_v2"):
        monkeypatch.setattr(stream, "SMALL_BYTES", 0)
        assert_same(load_hf(folder)[1], params)


@pytest.mark.parametrize("small", [0, 1 << 25])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"fsdp": 4, "tensor": 2}),
        ("gpt_neox", {"fsdp": 2, "tensor": 2, "data": 2}),
        ("deepseek_v2", {"expert": 2, "tensor": 2, "fsdp": 2}),
    ],
)
def test_parameters_arrive_in_their_shards(name, mesh, small, saved, monkeypatch):
    folder, config, params = saved(name)
    monkeypatch.setattr(stream, "SMALL_BYTES", small)
    mesh = create_mesh(MeshConfig(**{"fsdp": 1, **mesh}))
    _, loaded = load_hf(folder, mesh)
    wanted = named_shardings(params, logical_axes(config), mesh)
    assert_same(loaded, params)
    for array, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    split = [x for x in jax.tree.leaves(loaded) if not x.sharding.is_fully_replicated]
    assert len(split) > 8


def test_no_read_is_larger_than_a_tensor_and_nothing_is_read_twice(saved, monkeypatch):
    folder, _, _ = saved("plain")
    monkeypatch.setattr(stream, "SMALL_BYTES", 0)
    reads, original = [], SafetensorsFile.read

    def spy(self, name, start, stop):
        array = original(self, name, start, stop)
        reads.append(array.nbytes)
        return array

    monkeypatch.setattr(SafetensorsFile, "read", spy)
    load_hf(folder, create_mesh(MeshConfig(fsdp=4, tensor=2)))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sum(reads) == index["metadata"]["total_size"]
    assert max(reads) <= 40 * 16 * 4


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_types_are_kept_or_cast(stored, saved, tmp_path):
    _, config, params = saved("plain")
    folder = save_hf(tmp_path / stored, config, params, dtype=stored)
    kept, as_stored = load_hf(folder)
    assert (kept.param_dtype, kept.compute_dtype) == (stored, stored)
    assert_same(as_stored, jax.tree.map(lambda x: x.astype(stored), params))
    cast, wide = load_hf(folder, dtype="float32", config_overrides={"compute_dtype": "bfloat16"})
    assert (cast.param_dtype, cast.compute_dtype) == ("float32", "bfloat16")
    assert_same(wide, jax.tree.map(lambda x: x.astype(stored).astype("float32"), params))


def test_a_checkpoint_of_the_bare_model_loads(saved, tmp_path):
    """GPT-2's own files lack the prefix, and hold buffers that are no parameters."""
    _, config, params = saved("gpt2")
    folder = save_hf(tmp_path / "bare", config, params)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    rewrite(folder, bare)
    assert_same(load_hf(folder)[1], params)


def test_known_buffers_are_ignored(broken):
    folder, tensors = broken
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, tensors | {buffer: np.ones(3, np.float32)})
    load_hf(folder)


def test_tied_and_untied_heads(broken):
    folder, tensors = broken
    values = json.loads((folder / "config.json").read_text())
    without = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    rewrite(folder, without)
    with pytest.raises(CheckpointError, match="'lm_head.weight' is missing.*tie_embeddings"):
        load_hf(folder)
    config, params = load_hf(folder, config_overrides={"tie_embeddings": True})
    assert config.tie_embeddings and "lm_head" not in params

    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    rewrite(folder, without | {"lm_head.weight": without["model.embed_tokens.weight"]})
    assert "lm_head" not in load_hf(folder)[1]
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match="'lm_head.weight' differs.*tie_embeddings"):
        load_hf(folder)
    assert "lm_head" in load_hf(folder, config_overrides={"tie_embeddings": False})[1]


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_extra_and_misshaped_tensors_are_refused(broken):
    folder, tensors = broken
    rewrite(folder, {name: value for name, value in tensors.items() if name != Q})
    with pytest.raises(CheckpointError, match=f"1 tensors .* are missing: '{Q}'"):
        load_hf(folder)
    rewrite(folder, tensors | {"model.layers.1.self_attn.q_proj.bias": np.ones(24, np.float32)})
    with pytest.raises(CheckpointError, match="no place in a llama model.*q_proj.bias"):
        load_hf(folder)
    rewrite(folder, tensors | {Q: np.ascontiguousarray(tensors[Q].T)})
    with pytest.raises(CheckpointError, match=rf"'{Q}'.* \[16, 24\], expected \[24, 16\]"):
        load_hf(folder)


@pytest.mark.parametrize("small", [0, 1 << 25])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad, small, broken, monkeypatch):
    folder, tensors = broken
    monkeypatch.setattr(stream, "SMALL_BYTES", small)
    spoilt = tensors[Q].copy()
    spoilt[3, 5] = bad
    rewrite(folder, tensors | {Q: spoilt})
    with pytest.raises(CheckpointError, match=f"'{Q}' .* holds NaN or infinite values"):
        load_hf(folder)


def test_a_type_that_is_too_narrow_is_refused(broken):
    folder, tensors = broken
    rewrite(folder, tensors | {Q: tensors[Q] * np.float32(1e30)})
    with pytest.raises(CheckpointError, match="as float16.*too narrow"):
        load_hf(folder, dtype="float16")


def test_quantised_storage_types_are_refused(broken):
    folder, tensors = broken
    rewrite(folder, tensors | {Q: tensors[Q].astype(ml_dtypes.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=f"'{Q}' .* has type F8_E4M3: expected one of"):
        load_hf(folder)


def test_truncated_files_are_refused(broken):
    folder, _ = broken
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="tensor '.*' in .* is truncated.*[Dd]ownload"):
        load_hf(folder)
    for size in (0, 5, 200):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not a safetensors file, or is truncated"):
            load_hf(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        load_hf(folder)
    file.write_bytes(whole[:20] + b"\xff\xff" + whole[22:])
    with pytest.raises(CheckpointError, match="corrupt header"):
        load_hf(folder)


def test_corrupt_or_missing_config_is_refused(broken):
    folder, _ = broken
    (folder / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(CheckpointError, match="config.json is not valid JSON.*download it again"):
        load_hf(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        load_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        load_hf(folder)


def test_generation_stops_where_generation_config_says(broken):
    folder, _ = broken
    config, _ = load_hf(folder)
    path = folder / "generation_config.json"
    for given, expected in (
        ({}, config.eos_token_ids),
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [1, 2]}, (1, 2)),
    ):
        path.write_text(json.dumps(given))
        assert load_hf(folder)[0].eos_token_ids == expected
    path.write_text(json.dumps({"eos_token_id": [config.vocab_size]}))
    with pytest.raises(CheckpointError, match=r"generation_config.json has eos_token_id"):
        load_hf(folder)


def test_an_index_that_does_not_fit_is_refused(saved, tmp_path):
    folder = tmp_path / "indexed"
    shutil.copytree(saved("plain")[0], folder)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file = index["weight_map"][Q]

    def with_map(changes):
        index_path.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))

    with_map({Q: "nowhere.safetensors"})
    with pytest.raises(CheckpointError, match="'nowhere.safetensors', which is missing"):
        load_hf(folder)
    with_map({"other.weight": file})
    with pytest.raises(CheckpointError, match="'other.weight' is in .*, which lacks it"):
        load_hf(folder)
    with_map({Q: "../model.safetensors"})
    with pytest.raises(CheckpointError, match="points outside of the folder"):
        load_hf(folder)
    index_path.write_text(
        json.dumps({"weight_map": {n: f for n, f in index["weight_map"].items() if n != Q}})
    )
    with pytest.raises(CheckpointError, match=f"holds '{Q}', which .* does not list"):
        load_hf(folder)
    index_path.write_text("{}")
    with pytest.raises(CheckpointError, match="lacks 'weight_map'"):
        load_hf(folder)


class _Bomb:
    """Would leave a trace if it were unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (pathlib.Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(name, broken, tmp_path):
    import pickle

    folder, _ = broken
    (folder / "model.safetensors").unlink()
    trace = tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(_Bomb(trace)))
    with pytest.raises(CheckpointError, match=f"{name}.*can execute code.*to safetensors"):
        load_hf(folder)
    assert not trace.exists()


def test_code_in_the_folder_is_never_run(broken, tmp_path):
    folder, _ = broken
    trace = tmp_path / "executed"
    (folder / "modeling_custom.py").write_text(f"open({str(trace)!r}, 'w')\n")
    values = json.loads((folder / "config.json").read_text())
    custom = {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}}
    (folder / "config.json").write_text(json.dumps(values | custom))
    load_hf(folder)
    assert not trace.exists()


def test_a_folder_without_weights_says_what_is_missing(broken):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        load_hf(folder)


def test_unknown_overrides_are_refused(broken):
    with pytest.raises(CheckpointError, match="config_overrides.*'num_layer'"):
        load_hf(broken[0], config_overrides={"num_layer": 3})


def test_random_bytes_in_the_header_never_crash(broken):
    """Damage anywhere in the first bytes gives a clear error or the same numbers."""
    folder, tensors = broken
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, 400))] = int(rng.integers(0, 256))
        file.write_bytes(bytes(damaged))
        try:
            _, params = load_hf(folder)
        except CheckpointError:
            continue
        assert jnp.isfinite(params["embed"]["tokens"]).all()
