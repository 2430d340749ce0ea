"""The benchmark suites run, and their report says what was measured."""

from __future__ import annotations

import json

import jax
import pytest

from experiments import benchmark, config_files, launch
from experiments.benchmarks import decoding, moe, pipeline, startup, training, turns
from jaxllm.models import parameters
from jaxllm.models.config import ModelConfig


@pytest.fixture(autouse=True)
def keep_cores(monkeypatch):
    """The training suite binds its process to some cores; not the one of the tests."""
    monkeypatch.setattr(training, "bind_to_cores", lambda threads: None)


def test_training_suite_reports_the_ratio_of_medians(monkeypatch):
    clock = iter(range(1000))
    speeds = {"jaxllm": [1, 1, 4], "transformers": [2, 3, 9]}

    def fake(name):
        # Each turn reads the clock before and after: let a turn of a side last as told.
        def run() -> None:
            if warm[name]:
                for _ in range(speeds[name][len(done[name])] - 1):
                    next(clock)
                done[name].append(1)
            calls[name] += 1
            warm[name] = calls[name] >= 2

        return run

    warm, calls = dict.fromkeys(speeds, False), dict.fromkeys(speeds, 0)
    done: dict[str, list[int]] = {name: [] for name in speeds}
    monkeypatch.setattr(training, "jax_step", lambda *a: fake("jaxllm"))
    monkeypatch.setattr(training, "torch_step", lambda *a: fake("transformers"))
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    result = training.measure(batch_size=2, length=5, rounds=3, steps=1)
    assert result["jaxllm"]["seconds_per_step"] == [1, 1, 4]
    assert result["speedup"] == 3 / 1
    assert result["speedup_by_round"] == [2, 3, 9 / 4]
    assert result["jaxllm"]["tokens_per_second"] == 10


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(training, "jax_step", lambda *a: lambda: None)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    result = training.measure(rounds=1, steps=1)
    assert "jaxllm[bench]" in result["comparison_left_out"] and "speedup" not in result


def test_training_step_really_trains():
    step = training.jax_step(batch_size=1, length=8)
    step()


def test_decoding_is_measured_and_reported(monkeypatch, tmp_path):
    tiny = ModelConfig(vocab_size=16, embed_dim=8, num_layers=2, num_heads=2, mlp_dim=8)
    monkeypatch.setattr(decoding, "bind_to_cores", lambda threads: None)
    monkeypatch.setattr(decoding, "copy_rate", lambda: 10.0)
    monkeypatch.setattr(
        decoding, "_model", lambda name: (tiny, parameters.init_params(tiny, jax.random.key(0)))
    )
    asked = []

    def same(name, new_tokens, threads):
        ours, _, _ = decoding.jax_side(name, new_tokens)

        def run(prompts):
            asked.append((len(prompts), len(prompts[0])))
            return ours(prompts)

        return run

    monkeypatch.setattr(decoding, "torch_side", same)
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: object())
    options = {"batch_sizes": (1, 2), "prompt": 4, "new_tokens": 3, "rounds": 2}
    result = decoding.measure(models=("some",), **options)
    assert set(asked) == {(1, 4), (2, 4)}
    one, two = result["some_batch_1"], result["some_batch_2"]
    assert one["equal"] == two["equal"] == 1 and "weight_gigabytes_per_second" not in two
    size = 4 * parameters.count_params(parameters.abstract_params(tiny))
    assert one["weight_gigabytes_per_second"] == pytest.approx(
        one["tokens_per_second"] * size / 1e9
    )
    machine = {"machine": {"busy": False}}
    benchmark.write(tmp_path, machine | {"decoding": result})
    assert "figures/decoding.png" in (tmp_path / "report.md").read_text()


def test_mixtures_are_measured_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setitem(moe.SHAPES, "micro", (4, 2, 16, 8, 8, True))
    result = moe.measure(rounds=1, shapes=("micro",))
    assert result["micro"]["ratio"] == result["micro"]["every_ms"] / result["micro"]["grouped_ms"]
    assert result["micro"]["auto"] in ("every", "grouped")
    benchmark.write(tmp_path, {"machine": {"cores": 2, "busy": False}, "moe": result})
    assert "figures/moe.png" in (tmp_path / "report.md").read_text()


def test_pipeline_is_measured_from_text_to_batches():
    result = pipeline.measure(seconds=0.2)
    assert result["tokens"] > 1_000_000
    assert result["concat_tokens_per_second"] > 20 * 1000
    assert result["first_fit_tokens_per_second"] > 20 * 1000


def test_startup_measures_fresh_processes(monkeypatch):
    monkeypatch.setattr(startup, "PROGRAMS", {"nothing": "pass"})
    monkeypatch.setattr(startup, "COMPILE", "print('{\"seconds\": 1.5}')")
    result = startup.measure(repeats=1)
    assert 0 <= result["nothing"] < 1 and result["compile_tiny_step_seconds"] == 1.5
    with pytest.raises(RuntimeError, match="no_such_module"):
        startup._seconds("import no_such_module")


def test_results_and_report(tmp_path, monkeypatch, capsys):
    def measure_training(**options):
        side = {"tokens_per_second": 100.0, "seconds_per_step": [20.0, 21.0]}
        return {"jaxllm": side, "transformers": side, "speedup": 1.0} | options

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "measure", measure_training)
    monkeypatch.setattr(pipeline, "measure", lambda **_: {"concat_tokens_per_second": 3000.0})
    arguments = ["--config", "benchmark", "--config.suites=('training','pipeline')"]
    assert launch.main([*arguments, "--workdir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["pipeline"]["times_model"] == 30 and results["pipeline"]["fast_enough"]
    page = (tmp_path / "report.md").read_text()
    assert "speedup" in page and "figures/training.png" in page
    monkeypatch.setattr(benchmark.os, "getloadavg", lambda: (50.0, 0.0, 0.0))
    assert launch.main([*arguments, "--workdir", str(tmp_path)]) == 0
    assert "**Warning**" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(benchmark.os, "getloadavg", lambda: (0.0, 9.0, 9.0))
    assert launch.main([*arguments, "--workdir", str(tmp_path)]) == 0
    assert "**Warning**" not in (tmp_path / "report.md").read_text()
    assert launch.main(["--config", "benchmark", "--config.suites=('speed',)"]) == 2
    assert ", ".join(benchmark.SUITES) in capsys.readouterr().err


def test_every_suite_has_options_that_it_takes():
    import importlib
    import inspect

    config = config_files.resolve("benchmark").config
    assert set(config.suites) == set(benchmark.SUITES)
    for name, module in benchmark.SUITES.items():
        inspect.signature(importlib.import_module(module).measure).bind(**config[name].to_dict())
