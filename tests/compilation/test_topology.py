"""Names of slices, the table of chips, the environment, and what fits."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

import pytest

from jaxllm.compilation import analysis, topology
from jaxllm.compilation.analysis import Memory, Step, Work
from jaxllm.compilation.chips import CHIPS
from jaxllm.compilation.hlo import Collective, Summary
from jaxllm.training.flops import PEAK_FLOPS

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v4:2x2x1", 4),
        ("v5e:16x16", 256),
        ("v5p:4x4x4", 64),
        ("V6e:4x8", 32),
        ("tpu7x:2x2x1", 8),
        ("h200:8", 8),
        ("h200", 1),
    ],
)
def test_names(name, devices):
    found = topology.parse(name)
    assert found.num_devices == devices
    assert topology.parse(found.name) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "unknown chip 'v9'.*v5p"),
        ("v5p", "expected a shape"),
        ("v5p:4x4", "expected v5p:NxNxN"),
        ("v5e:2x2x1", "expected v5e:NxN"),
        ("v5e:0x4", "expected v5e:NxN"),
        ("v5e:2xx2", "expected a shape"),
        ("h200:2x4", "expected h200:N"),
    ],
)
def test_wrong_names_are_refused(name, message):
    with pytest.raises(topology.TopologyError, match=message):
        topology.parse(name)


def test_peaks_agree_with_the_table_of_device_kinds():
    kinds = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}
    kinds |= {"tpu7x": "TPU7x", "h200": "NVIDIA H200"}
    assert set(kinds) == set(CHIPS)
    for name, kind in kinds.items():
        assert CHIPS[name].peak_flops["bfloat16"] == PEAK_FLOPS[kind]


def test_the_environment_keeps_execution_on_the_cpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    inherited = {"PATH": "/bin", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --a=1"}
    values = topology.environment(topology.parse("v5e:2x2"), inherited | {"JAX_PLATFORMS": "tpu"})
    assert values["JAX_PLATFORMS"] == "cpu" and values["PATH"] == "/bin"
    assert values["XLA_FLAGS"] == "--a=1" and values["TPU_SKIP_MDS_QUERY"] == "1"
    values = topology.environment(topology.parse("h200"), inherited)
    assert values["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1" and "TPU_SKIP_MDS_QUERY" not in values


def test_a_missing_compiler_is_told_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(topology.TopologyError, match=r"pip install 'jaxllm\[aot\]'"):
        topology.environment(topology.parse("v5e:2x2"), {})
    with pytest.raises(topology.TopologyError, match=r"--no-deps jax-cuda13-plugin==\d+\.\d+"):
        topology.environment(topology.parse("h200"), {})


def test_target_descriptions_are_packaged():
    root = pathlib.Path(__file__).resolve().parents[2]
    gpus = [chip.name for chip in CHIPS.values() if chip.platform == "cuda"]
    for name in gpus:
        text = (root / "jaxllm/compilation/targets" / f"{name}.textproto").read_text()
        assert f"memory_bandwidth: {int(CHIPS[name].hbm_bandwidth)}" in text
    assert "compilation/targets/*.textproto" in (root / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (44.50G) exceeds available HBM (15.75G). HLO module: jit_step.",
            44.5 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: Used 512.0M of 256.0M hbm. Exceeded by 256.0M.", GIB / 2),
        ("RESOURCE_EXHAUSTED: out of vector registers", None),
        ("INTERNAL: Used 20.0G of 15.7G hbm", None),
    ],
)
def test_what_a_refusal_says(message, size):
    assert analysis.exhausted_bytes(message) == size


def memory(arguments: float, temporaries: float, available: float = 16e9) -> Memory:
    held, needed = int(arguments), int(arguments + temporaries)
    return Memory(held, held, held, int(temporaries), 0, needed, int(available))


def test_no_advice_where_it_fits():
    assert memory(6e9, 10e9).fits and memory(6e9, 10e9).spare == 0
    assert not memory(6e9, 10e9 + 1).fits
    assert analysis.advice(memory(6e9, 10e9), None, 4) == []


def test_arguments_that_are_too_many_ask_for_devices():
    [text] = analysis.advice(memory(40e9, 5e9), Work(1, 1, 1.0, remat="dots"), 4)
    assert "40.00 GB of 16.00 GB" in text and "at least 3 times" in text and "(12)" in text


def test_temporaries_that_are_too_many_ask_for_remat_and_microbatches():
    """30 GB of temporaries in two microbatches beside 6 GB: 10 GB are left, so a third of it."""
    work = Work(1, 1, 1.0, microbatches=2, rows=32, remat="dots")
    texts = analysis.advice(memory(6e9, 30e9), work, 4)
    assert "model.remat=full instead of dots" in texts[0]
    assert "train.microbatches=8 instead of 2" in texts[1]
    assert "over by 20.00 GB" in texts[2]
    full = Work(1, 1, 1.0, microbatches=2, rows=32, remat="full")
    assert not any("remat" in text for text in analysis.advice(memory(6e9, 30e9), full, 4))
    refused = Memory(None, None, None, None, None, int(20e9), int(16e9))
    assert "train.microbatches=4" in " ".join(analysis.advice(refused, work, 4))


def test_utilisation_comes_from_the_slowest_bound():
    chip, work = CHIPS["v5p"], Work(1, 1000, 459e9)
    reduced = Collective("all-reduce", 3, int(600e6), 4)
    step = Step(memory(1, 1), 1.0, None, None, None, Summary((reduced,), 459e12, 3.5e9, 0), "")
    found = analysis.times(step, work, chip, devices=1)
    assert found["compute_seconds"] == pytest.approx(1.0)
    assert found["collective_seconds"] == pytest.approx(3 * 600e6 * 1.5 / 600e9)
    assert found["cycle_seconds"] == pytest.approx(2.0)
    assert found["mfu_bound"] == pytest.approx(1.0)
    assert found["mfu_estimate"] == pytest.approx(0.5)
    open_ended = dataclasses.replace(
        step, summary=dataclasses.replace(step.summary, unknown_loops=1)
    )
    assert analysis.times(open_ended, work, chip, devices=1)["mfu_bound"] is None
    nothing = analysis.times(Step(memory(1, 1), 1.0, None, None, None, None, "why"), work, chip, 1)
    assert set(nothing.values()) == {None}
