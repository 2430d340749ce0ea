"""The kernel report: floors, what is compiled again, failures as rows, measuring without a GPU."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import config_files, kernel_report
from experiments.errors import UsageError
from experiments.kernels import cases, compile, measure, tables
from jaxllm.compilation.chips import CHIPS
from tests.aot.programs import needs_cuda_plugin, needs_libtpu

PACKED = "quantized_kv_attention K2V2, Llama 3 8B, 32768 tokens, 1 new"


def record(topology="v5p:1x1x1", blocks=None, **changes) -> dict:
    """A kernel of 10 steps of 1750 bundles, 10 us on one core of v5p, that needs 27.65 MB."""
    call = {
        "name": "k",
        "grid": [10],
        "blocks": [[8, 128], []],
        "shared": False,
        "block_bytes": 2_000_000,
        "steps": 10,
    }
    code = {"bundles": 1750, "slots": {"MATMUL": 0.5, "VALU": 0.1, "XLU": 0.2, "SALU": 0.3}}
    if topology == "h200":
        code = {
            "programs": 24,
            "threads": 128,
            "shared_bytes": 20736,
            "registers": 90,
            "spilled_bytes": 8,
        }
    base = {
        "operation": "op",
        "shape": "a | b",
        "topology": topology,
        "blocks": blocks,
        "operations": {"bfloat16": 4.59e9, "int8": 918.0},
        "needed_bytes": 27_650_000,
        "calls": [call],
        "code": {"k": code},
        "kernel": {"bytes": 20e6},
        "xla": {"bytes": 55.3e6, "cycles": 17500.0},
    }
    return base | changes


def test_times_are_the_larger_of_work_and_bytes():
    """At 2765 GB/s 27.65 MB take 10 us; 4.59e9 products at 459e12 as long, and a bit of int8."""
    found = tables.times(record())
    assert found["floor"] == pytest.approx(10e-6 + 1e-12, rel=1e-9)
    assert found["kernel"] == pytest.approx(10e-6)
    assert found["xla"] == pytest.approx(20e-6)  # Its bytes; its cycles take half of that.
    slow = record(code={"k": {"bundles": 7000, "slots": {}}})
    assert tables.times(slow)["kernel"] == pytest.approx(40e-6)
    slow["calls"][0]["shared"] = True
    assert tables.times(slow)["kernel"] == pytest.approx(20e-6)
    assert tables.times(record("h200"))["kernel"] is None


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compilers: {(case, topology, blocks): times called}, and what they say."""
    calls: dict = {}
    answers: dict = {}

    def compile_case(case, topology, blocks=None):
        key = (case, topology, blocks)
        calls[key] = calls.get(key, 0) + 1
        operation, _, shape = case.partition(" ")
        names = {"operation": operation, "shape": shape}
        return answers.get(key) or record(
            topology, None if blocks is None else f"Blocks({blocks})", **names
        )

    monkeypatch.setattr(compile, "compile_case", compile_case)
    return calls, answers


def config(variant="chips", **changes):
    result = config_files.resolve(f"kernel_report:{variant}").config
    result.update({"only": PACKED} | changes)
    return result


def test_a_refused_kernel_is_a_row_and_is_tried_again(tmp_path, compiled):
    calls, answers = compiled
    answers[PACKED, "v5e:1x1", None] = {"error": "RESOURCE_EXHAUSTED: vmem"}
    folder = tmp_path / "record"
    result = kernel_report.run(config(record=str(folder)), tmp_path / "run")
    assert result == {"compiled": 3, "failed": [f"{PACKED}; v5e:1x1"]}
    page = (folder / "kernels.md").read_text()
    assert "RESOURCE_EXHAUSTED: vmem" in page and "24 x 128" in page and "1750 x 10" in page
    assert "MATMUL 50 %, SALU 30 %, XLU 20 %" in page and "figures" not in page
    answers.clear()
    assert kernel_report.run(config(), tmp_path / "run")["failed"] == []
    counts = {key[1]: count for key, count in calls.items()}
    assert counts == {"v5e:1x1": 2, "v5p:1x1x1": 1, "v6e:1x1": 1, "h200": 1}
    assert (tmp_path / "run" / "figures" / "kernels.png").is_file()
    assert len(json.loads((tmp_path / "run" / "kernels.json").read_text())) == 4


def test_blocks_are_ranked_by_their_time(tmp_path, compiled):
    _, answers = compiled
    names = {"operation": "quantized_kv_attention", "shape": PACKED.partition(" ")[2]}
    for blocks, bundles in ((None, 9000), (0, 20000), (1, 5000)):
        code = {"k": {"bundles": bundles, "slots": {}}}
        text = None if blocks is None else f"Blocks({blocks})"
        answers[PACKED, "v6e:1x1", blocks] = record("v6e:1x1", text, code=code, **names)
    kernel_report.run(config("rank", topologies=("v6e:1x1",)), tmp_path)
    page = (tmp_path / "report.md").read_text()
    order = [page.index(f"{bundles} x 10") for bundles in (5000, 9000, 20000)]
    assert order == sorted(order)


def test_what_cannot_be_done_is_said(tmp_path):
    with pytest.raises(UsageError, match="only='nothing' is in no case: attention"):
        kernel_report.run(config(only="nothing"), tmp_path)
    with pytest.raises(UsageError, match="no GPU to measure on"):
        kernel_report.run(config("measure"), tmp_path)
    with pytest.raises(UsageError, match="unknown chip 'v9'"):
        kernel_report.run(config(topologies=("v9:1",)), tmp_path)


def test_cases_are_named_once_and_trace():
    """Their shapes fit the operations."""
    every = cases.cases()
    assert all(set(case.operations) <= set(CHIPS["v6e"].peak_flops) for case in every.values())
    for case in every.values():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arguments)
        assert jax.tree.leaves(jax.eval_shape(case.function, *shapes)), case.name


def test_values_to_measure_with():
    case = cases.Case(
        "op",
        "shape",
        lambda *_, implementation: None,
        (
            jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
            {"codes": jax.ShapeDtypeStruct((4096,), jnp.int8)},
            np.array([7], np.int32),
        ),
        {},
    )
    x, tree, given = measure.arguments(case, seed=0)
    assert x.dtype == jnp.bfloat16 and abs(float(x.astype(jnp.float32).std()) - 1) < 0.05
    assert set(np.unique(tree["codes"])) == set(range(-128, 128)) and given.tolist() == [7]
    again, other = measure.arguments(case, seed=0)[0], measure.arguments(case, seed=1)[0]
    assert (again == x).all() and (other != x).any()
    row = {"gpu": 1e-5, "xla": 2e-5, "needed_bytes": 4e7, "operations": {"bfloat16": 1e9}}
    assert measure.row("op", row) == ("op", "10.0", "20.0", "2.00", "4000", "100.0")
    assert "refused" in measure.row("op", row | {"gpu": None, "gpu_error": "refused"})


@needs_libtpu
@needs_cuda_plugin
@pytest.mark.aot
def test_a_packed_cache_is_read_once_and_at_the_speed_of_memory(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    found = compile.compile_case(PACKED.replace("K2V2", "K8V8"), "v5e:1x1")
    assert found["kernel"]["bytes"] < 1.02 * found["needed_bytes"]
    estimates = tables.times(found)
    assert estimates["kernel"] < 1.2 * estimates["floor"] < 0.1 * estimates["xla"]
    found = compile.compile_case(PACKED, "h200")
    [code] = found["code"].values()
    assert code["shared_bytes"] <= 232_448 and code["programs"] > 132
