"""Real compilations for TPUs and an H200 without either, in a process of their own."""

from __future__ import annotations

import json

import pytest

from experiments import config_files, launch, pretrain
from tests.aot.programs import MICRO, compile_for, needs_cuda_plugin, needs_libtpu

LAYERS, WIDTH = 3, 128


@needs_libtpu
def test_a_step_for_four_tpu_chips(tmp_path, capfd):
    """Memory from shapes, collectives of every layer, a table; a begun run is left alone."""
    (tmp_path / "config.json").write_text("{}")
    result = compile_for(tmp_path, "v5e:2x2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "topology.json"]
    assert (tmp_path / "config.json").read_text() == "{}"
    assert result["mesh"] == {"fsdp": 4} and result["devices"] == 4
    step = result["steps"]["train_step"]
    config = config_files.resolve("pretrain:tiny", MICRO).config
    work = pretrain.step_work(config)["train_step"]
    assert step["params"] == work.params and step["tokens"] == 8 * 64
    # Parameters and two moments in float32, a quarter each; norms are not split.
    assert step["memory"]["arguments"] == pytest.approx(3 * 4 * work.params / 4, rel=0.15)
    assert step["memory"]["fits"] and step["advice"] == []
    assert step["memory"]["aliased"] > 0.95 * step["memory"]["arguments"]
    # More than the method needs: layers are computed twice, and the whole square of scores.
    assert 1.0 < step["hlo_flops_per_token"] / step["flops_per_token"] < 2.0
    assert step["loops_counted_once"] == 0
    weights = sum((WIDTH * WIDTH * 2, WIDTH * WIDTH, 3 * WIDTH * 256)) * LAYERS
    gathered = step["collectives"]["all-gather"]["bytes"]
    assert gathered > 2 * 2 * weights, "every layer's weights are gathered in both directions"
    assert step["estimates"]["cycle_seconds"] > 0
    printed = capfd.readouterr().out
    assert "pretrain:tiny on v5e:2x2 (4 devices, fsdp 4)" in printed and "fits" in printed


@needs_libtpu
def test_a_program_too_big_for_its_chip_is_an_answer_with_advice(tmp_path, capfd):
    result = compile_for(
        tmp_path,
        "v5e:1x1",
        "model.embed_dim=8192",
        "model.mlp_dim=16384",
        "model.num_heads=32",
        "data.batch_size=8",
    )
    step = result["steps"]["train_step"]
    assert not step["memory"]["fits"] and step["memory"]["needed"] > 16.91e9
    assert step["memory"]["arguments"] is None and step["collectives"] is None
    assert any("more devices" in text for text in step["advice"])
    printed = capfd.readouterr().out
    assert "DOES NOT FIT" in printed and "refused" in printed


@needs_cuda_plugin
def test_a_step_for_one_h200(tmp_path):
    result = compile_for(tmp_path, "h200")
    step = result["steps"]["train_step"]
    assert result["mesh"] == {} and step["memory"]["available"] == 141e9
    assert step["memory"]["arguments"] >= 3 * 4 * step["params"]
    assert 1.0 < step["hlo_flops_per_token"] / step["flops_per_token"] < 2.0
    assert step["collectives"] == {} and step["xla_optimal_seconds"] is None


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_other_tpus(tmp_path, name):
    result = compile_for(tmp_path, name, "data.batch_size=16")
    assert result["steps"]["train_step"]["memory"]["fits"]


@needs_cuda_plugin
@pytest.mark.aot
def test_eight_gpus_split_what_one_holds(tmp_path):
    one, eight = (compile_for(tmp_path / name, name) for name in ("h200", "h200:8"))
    held = [r["steps"]["train_step"]["memory"]["arguments"] for r in (one, eight)]
    assert held[1] < held[0] / 6
    assert "all-gather" in eight["steps"]["train_step"]["collectives"]


@needs_libtpu
@pytest.mark.aot
def test_tensor_and_fsdp_axes_together(tmp_path):
    result = compile_for(tmp_path, "v5e:4x4", "mesh.tensor=2", "data.batch_size=16")
    assert result["mesh"] == {"fsdp": 8, "tensor": 2}
    assert json.loads((tmp_path / "topology.json").read_text()) == result


@needs_libtpu
@pytest.mark.aot
def test_prefill_and_decoding_for_four_tpu_chips(tmp_path):
    """Two programs a batch; rounded weights need less memory."""
    small = ("compiled.preset=llama_15m", "compiled.batch_size=4", "compiled.prompt_length=64")
    small += ("compiled.max_new_tokens=32", "mesh.tensor=2", "mesh.data=2")
    results = {}
    for bits in (0, 4):
        folder = tmp_path / str(bits)
        arguments = [f"--config.{o}" for o in (*small, f"quantize_bits={bits}")]
        command = ["--config", "generate:tiny", "--topology=v5e:2x2", "--workdir", str(folder)]
        assert launch.main([*command, *arguments]) == 0
        results[bits] = json.loads((folder / "topology.json").read_text())["steps"]
    for steps in results.values():
        assert set(steps) == {"prefill", "decode"}
        assert steps["prefill"]["tokens"] == 4 * 64 and steps["decode"]["tokens"] == 4
        assert all(step["memory"]["fits"] for step in steps.values())
    held = [results[bits]["decode"]["memory"]["arguments"] for bits in (0, 4)]
    assert held[1] < held[0]
