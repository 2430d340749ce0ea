"""Means that merge exactly; metric files that look as if nothing had interrupted them."""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.training import metrics, writers
from jaxllm.training.metrics import Mean

PAIRS = st.lists(st.tuples(st.floats(-9, 9), st.floats(0.1, 5)), min_size=1, max_size=6)


@given(PAIRS, PAIRS)
def test_merging_is_the_weighted_mean_of_everything(first, second):
    merged = Mean.empty()
    for value, weight in first + second:
        merged = merged.merge(Mean(np.float64(value * weight), np.float64(weight)))
    values, weights = zip(*first + second, strict=True)
    np.testing.assert_allclose(merged.compute(), np.average(values, weights=weights), atol=1e-9)


def test_nothing_counted_is_zero():
    assert Mean.empty().compute() == 0.0
    assert float(jax.jit(lambda: Mean.of(3.0, 0.0).compute())()) == 0.0


def test_merge_keeps_names_of_either_side():
    merged = metrics.merge({"a": Mean(1.0, 1.0)}, {"a": Mean(3.0, 1.0), "b": Mean(5.0, 2.0)})
    assert metrics.compute(merged) == {"a": 2.0, "b": 2.5}


def test_jsonl_round_trip(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = writers.JsonlWriter(path)
    writer.write_scalars(1, {"loss": np.float32(0.5), "bad": float("nan"), "huge": float("inf")})
    writer.write_texts(2, {"sample": "a\u2028b\nc"})
    writer.close()
    first, second = writers.read_jsonl(path)
    assert first["loss"] == 0.5 and math.isnan(first["bad"]) and first["huge"] == math.inf
    assert second == {"step": 2, "sample": "a\u2028b\nc"}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=pytest.fail)  # plain JSON: no NaN literals


@pytest.mark.parametrize("resume", [0, 2, 3, 9])
def test_resuming_drops_later_and_torn_lines(tmp_path, resume):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "loss": 1.0 / i}) + "\n" for i in (1, 2, 3, 3, 4)]
    path.write_text("".join(lines) + '{"step": 5, "lo')
    writer = writers.JsonlWriter(path, resume_step=resume)
    writer.write_scalars(99, {"loss": 0.0})
    writer.close()
    steps = [record["step"] for record in writers.read_jsonl(path)]
    assert steps == [i for i in (1, 2, 3, 3, 4) if i <= resume] + [99]
    assert not list(tmp_path.glob("*.tmp"))


def test_starting_anew_empties_the_file_and_damage_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n')
    with pytest.raises(ValueError, match="line 2"):
        writers.JsonlWriter(path, resume_step=5)
    writers.JsonlWriter(path).close()
    assert path.read_text() == ""


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = writers.create_writer(tmp_path)
    writer.write_scalars(3, {"loss": 1.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()
    assert writers.read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 3, "loss": 1.5}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    pytest.importorskip("tensorboardX")
    lines = writers.JsonlWriter(tmp_path / "metrics.jsonl")
    events = writers.TensorBoardWriter(tmp_path / "tensorboard")
    with open("/dev/full", "wb", buffering=0) as full:
        events._file._py_recordio_writer._writer = full
        lines._file = io.TextIOWrapper(full, write_through=True)
        with pytest.raises(OSError, match="No space left on device: .*metrics.jsonl"):
            lines.write_scalars(1, {"loss": 1.0})
        with pytest.raises(OSError, match="No space left on device: .*tensorboard"):
            events.write_scalars(1, {"loss": 1.0})


def test_all_writers_are_closed_even_if_one_cannot_be():
    closed = []

    def fails():
        closed.append("bad")
        raise OSError("full")

    kept = types.SimpleNamespace(close=lambda: closed.append("good"))
    with pytest.raises(OSError, match="full"):
        writers.MultiWriter([kept, types.SimpleNamespace(close=fails), kept]).close()
    assert sorted(closed) == ["bad", "good", "good"]


def test_training_imports_no_tensorflow_and_starts_no_device():
    code = (
        "import sys, jaxllm.training.loop, jaxllm.training.objectives, jaxllm.training.evaluate\n"
        "from jax._src import xla_bridge\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules\n"
        "assert not xla_bridge._backends, xla_bridge._backends"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
