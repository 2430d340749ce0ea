"""`--topology`: what it refuses, without compiling anything; the record of large programs."""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments import config_files, launch, scale, topology
from experiments.errors import UsageError
from tests.aot.programs import needs_libtpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "experiments" / "records" / "scale.json"


def refused(capsys, *arguments: str) -> str:
    assert launch.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_wrong_names_are_usage_errors(capsys, tmp_path):
    start = ("--workdir", str(tmp_path / "w"), "--config")
    assert "unknown chip 'v9'" in refused(capsys, *start, "pretrain", "--topology=v9:2x2")
    line = refused(capsys, *start, "small_sample_stats", "--topology=v5e:2x2")
    assert "no lower_steps" in line and "have: generate, pretrain" in line
    assert "no config key" in refused(
        capsys, *start, "pretrain", "--topology=v5e:2x2", "--config.model.wide=1"
    )
    assert not (tmp_path / "w").exists()


@needs_libtpu
@pytest.mark.parametrize(
    ("slice_name", "override", "message"),
    [
        ("v5e:2x2", "data.batch_size=6", "a batch of 6 rows does not divide over the 4 devices"),
        ("v5e:2x2", "mesh.tensor=3", "needs a multiple of 3 devices, there are 4"),
        ("v5e:2x2", "model.num_heads=5", "num_heads"),
    ],
)
def test_a_config_that_does_not_fit_the_slice_is_refused(
    capsys, tmp_path, slice_name, override, message
):
    arguments = ("--config", "pretrain", f"--topology={slice_name}", f"--config.{override}")
    assert message in refused(capsys, *arguments, "--workdir", str(tmp_path / "w"))


def test_a_workdir_with_only_a_topology_file_is_not_a_run(tmp_path):
    (tmp_path / topology.FILE).write_text("{}")
    for variant in ("tiny", "text"):
        launch.prepare_workdir(tmp_path, config_files.resolve(f"pretrain:{variant}"))
    assert json.loads((tmp_path / "config.json").read_text())["variant"] == "text"


def record(**changes) -> dict:
    """A record as `topology.run` returns it."""
    memory = {"arguments": 1.51e9, "temporaries": 9.02e9, "needed": 10.53e9, "available": 95e9}
    step = {
        "tokens": 64 * 4096,
        "memory": memory | {"fits": True},
        "advice": [],
        "flops_per_token": 6.0,
        "hlo_flops_per_token": 8.0,
        "xla_optimal_seconds": 0.029,
        "collectives": None,
        "loops_counted_once": 0,
        "estimates": dict.fromkeys(("compute_seconds", "mfu_bound", "mfu_estimate")),
        "compile_seconds": 1.0,
    }
    base = {
        "series": "8B",
        "config": "pretrain:llama3_8b",
        "overrides": ["model.remat=full"],
        "topology": "v5p:4x4x4",
        "devices": 64,
        "mesh": {"fsdp": 64},
        "steps": {"train_step": step},
    }
    return base | changes


def test_the_comparison_takes_only_the_same_mesh_batch_and_recomputation():
    [ratios] = scale.compare({"a": record()}).values()
    assert ratios == pytest.approx({"arguments": 1, "temporaries": 2, "optimal_seconds": 0.5})
    open_ended = record()
    open_ended["steps"]["train_step"]["loops_counted_once"] = 2
    assert scale.compare({"a": open_ended})["pretrain:llama3_8b"]["optimal_seconds"] is None
    others = [record(mesh={"fsdp": 16, "tensor": 4}), record(topology="v5e:8x8")]
    others += [record(overrides=[]), record(config="pretrain:olmoe_7b")]
    assert scale.compare(dict(enumerate(others))) == {}


def test_a_scale_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    config = config_files.resolve("scale").config
    calls = []

    def compile_one(spec, overrides, name):
        calls.append(name)
        if name == "h200:8" and len(calls) == 2:
            raise UsageError("stopped")
        return record(config=spec, topology=name)

    monkeypatch.setattr(topology, "run", compile_one)
    monkeypatch.setattr(topology, "table", lambda result: "")
    with pytest.raises(UsageError, match="pretrain:tiny h200:8: stopped"):
        scale.run(config, tmp_path)
    results = scale.run(config, tmp_path)
    assert calls == ["v5e:2x2", "h200:8", "h200:8"] and results["programs"] == 2
    report = (tmp_path / "report.md").read_text()
    assert "v5e:2x2" in report and (tmp_path / "figures" / "memory.png").is_file()


def recorded() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def test_memory_of_a_device_falls_as_devices_are_added():
    """Of the recorded programs: one model and batch on ever more chips of a kind."""
    held: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for entry in recorded().values():
        kind = (entry["config"], entry["topology"].partition(":")[0], *entry["overrides"])
        needed = entry["steps"]["train_step"]["memory"]["needed"]
        held.setdefault(kind, []).append((entry["devices"], needed))
    falling = [sorted(points) for points in held.values() if len(points) > 1]
    assert falling, "the record holds no model on slices of several sizes"
    for points in falling:
        sizes = [size for _, size in points]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.7 * sizes[0]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(recorded()))
def test_recorded_programs_still_compile_to_the_same_size(key):
    entry = recorded()[key]
    result = topology.run(entry["config"], entry["overrides"], entry["topology"])
    for name, step in result["steps"].items():
        before = entry["steps"][name]
        assert step["memory"]["fits"] == before["memory"]["fits"]
        assert step["memory"]["needed"] <= 1.1 * before["memory"]["needed"]
        if before["hlo_flops_per_token"]:
            assert step["hlo_flops_per_token"] <= 1.1 * before["hlo_flops_per_token"]
