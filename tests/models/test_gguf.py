"""GGUF files, written here with the gguf package."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest

from jaxllm.models.config import RopeConfig
from jaxllm.models.hf import CheckpointError, UnsupportedModelError, load_hf
from jaxllm.models.hf.names import GGUF_FAMILIES
from jaxllm.models.hf.plan import plan_leaves
from jaxllm.models.parameters import abstract_params
from jaxllm.training.sharding import MeshConfig, create_mesh
from tests.models.hf_models import CONFIGS, random_params

LLAMA = CONFIGS["llama"].replace(
    embed_dim=64,
    head_dim=16,
    mlp_dim=96,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    rope=RopeConfig(theta=5e4),
    eos_token_ids=(2,),
    tie_embeddings=True,
)
QWEN2 = CONFIGS["qwen2"].replace(windows=None, rope=RopeConfig(theta=1e6))


def interleaved(kernel: np.ndarray, head_dim: int) -> np.ndarray:
    """(in, out) with half-split heads to (out, in) with neighbouring rotary partners."""
    heads = kernel.T.reshape(-1, 2, head_dim // 2, kernel.shape[0])
    return heads.swapaxes(1, 2).reshape(kernel.T.shape)


def write(path, config, params, kind=gguf.GGMLQuantizationType.F32, metadata=()):
    """What llama.cpp's converter writes for such a model."""
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_key_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for method, value in metadata:
        getattr(writer, method)(value)
    leaves = plan_leaves(config, GGUF_FAMILIES[config.family])
    for leaf, array in zip(leaves, jax.tree.leaves(params), strict=True):
        for position in leaf.positions():
            value = np.asarray(array[position], np.float32)
            name, _ = leaf.stored(position)
            if config.family == "llama" and (".attn_q." in name or ".attn_k." in name):
                value = interleaved(value, config.head_dim)
            elif value.ndim == 2 and name != "token_embd.weight":
                value = value.T
            raw = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
            data = gguf.quantize(np.ascontiguousarray(value), raw)
            writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=lambda config: config.family)
def test_config_and_tensors(config, tmp_path):
    params = random_params(config)
    loaded_config, loaded = load_hf(write(tmp_path / "m.gguf", config, params))
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_against_the_same_model_in_a_folder(shared_dir, tmp_path):
    config, params = load_hf(shared_dir / "data" / "models" / "stories260k")
    from_gguf, loaded = load_hf(write(tmp_path / "m.gguf", config, params))
    assert from_gguf.rope == config.rope and from_gguf.norm_eps == config.norm_eps
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_blocks_straight_into_shards(kind, tmp_path):
    params = random_params(LLAMA)
    kind = gguf.GGMLQuantizationType[kind]
    path = write(tmp_path / "m.gguf", LLAMA, params, kind)
    _, whole = load_hf(path)
    _, sharded = load_hf(path, create_mesh(MeshConfig(fsdp=4, tensor=2)))
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)
    up = np.asarray(params["layers"][0]["feedforward"]["in"]["up"]["kernel"])[1]
    expected = gguf.dequantize(gguf.quantize(np.ascontiguousarray(up.T), kind), kind).T
    got = np.asarray(whole["layers"][0]["feedforward"]["in"]["up"]["kernel"])[1]
    np.testing.assert_array_equal(got, expected)
    assert np.abs(got - up).max() > 0


def test_dtype_of_the_parameters(tmp_path):
    path = write(tmp_path / "m.gguf", LLAMA, random_params(LLAMA))
    config, params = load_hf(path, dtype="bfloat16")
    assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(
        lambda x: x.dtype, abstract_params(config)
    )


def test_rotary_factors_of_llama_3(tmp_path):
    """The converter writes the scaling out as one divisor a pair."""
    path = tmp_path / "m.gguf"
    params = random_params(LLAMA)
    original = gguf.GGUFWriter.write_header_to_file
    factors = np.linspace(1, 8, 8, dtype=np.float32)

    def with_factors(self, *args, **kwargs):
        self.add_tensor("rope_freqs.weight", factors)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write(path, LLAMA, params)
    rope = load_hf(path)[0].rope
    assert rope.type == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == tuple(factors.tolist())


def test_what_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    params = random_params(LLAMA)
    write(path, LLAMA, params, metadata=[("add_expert_count", 4)])
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        load_hf(path)
    write(path, LLAMA, params, metadata=[("add_rope_dimension_count", 8)])
    with pytest.raises(UnsupportedModelError, match="rotates 8 of 16 dimensions"):
        load_hf(path)
    write(path, LLAMA, params)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a readable GGUF file.*download it again"):
        load_hf(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load_hf(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' .* is not supported: expected one of"):
        load_hf(path)
