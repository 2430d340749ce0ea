"""The engine's benchmark times both sides on the same requests."""

from __future__ import annotations

from experiments import benchmark
from experiments.benchmarks import engine
from jaxllm.models import presets
from jaxllm.models.config import ModelConfig


def test_engine_and_static_batches_answer_alike(monkeypatch, tmp_path):
    tiny = ModelConfig(
        vocab_size=16, embed_dim=8, num_layers=1, num_heads=2, mlp_dim=8, initializer_range=0.4
    )
    monkeypatch.setattr(presets, "preset", lambda name: tiny)
    monkeypatch.setattr(engine, "bind_to_cores", lambda threads: None)
    result = engine.measure(
        num_requests=5, num_slots=2, mean_tokens=4, max_tokens=9, longest_prompt=6, rounds=2
    )
    assert result["equal"] == 1 and len(result["ratio_by_round"]) == 2
    lengths = result["lengths"]
    steps = max(lengths[:2]) + max(lengths[2:4]) + lengths[4]
    assert result["ideal_ratio"] == 2 * steps / sum(lengths)
    benchmark.write(tmp_path, {"machine": {"busy": False}, "engine": result})
    assert "figures/engine.png" in (tmp_path / "report.md").read_text()
