"""Pre-training through the launcher: what it leaves, refusals, and resuming after a kill."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import pytest

from experiments import config_files, launch, pretrain, report, text_data, tiny_model
from experiments.errors import UsageError
from jaxllm.data.tokenizers import load_tokenizer
from jaxllm.models import decoder, hf
from tests.experiments import micro


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One micro run over all (eight simulated) devices: (folder, workdir)."""
    folder = tmp_path_factory.mktemp("pretrain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert launch.main(micro.arguments(folder, "out", mesh__tensor=2)) == 0
    return folder, folder / "out"


def test_it_leaves_what_a_run_should(run):
    _, workdir = run
    names = {path.name for path in workdir.iterdir()}
    assert names >= {"config.json", "results.json", "report.md", "metrics.jsonl", "checkpoints"}
    assert (workdir / "figures" / "loss.png").stat().st_size > 1000
    results = json.loads((workdir / "results.json").read_text())
    assert results["train"]["steps"] == 12
    page = (workdir / "report.md").read_text()
    for entry in results["samples"]:
        assert entry["prompt"] in page
    assert [entry["prompt"] for entry in results["samples"]] == ["def ", "if "]
    metrics = report.read_metrics(workdir / "metrics.jsonl")
    np.testing.assert_array_equal(metrics["train/loss"][0], [2, 4, 6, 8, 10, 12])
    np.testing.assert_array_equal(metrics["eval/cross_entropy"][0], [4, 8, 12])
    assert metrics["train/loss"][1][-1] < metrics["train/loss"][1][0] - 0.5


def test_bits_per_byte_of_bytes_is_cross_entropy_in_bits(run):
    _, workdir = run
    valid = json.loads((workdir / "results.json").read_text())["validation"]
    text = pathlib.Path(workdir.parent / "text.txt").read_text()
    held_out = len(text) - (text.rfind("\n", 0, int(len(text) * 0.95)) + 1)
    # One token a byte, and the end of the text, which has no byte; the first byte is no target.
    assert valid["tokens"] == held_out
    expected = valid["cross_entropy"] / np.log(2) * valid["tokens"] / held_out
    assert valid["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_the_exported_model_is_the_trained_one(run):
    _, workdir = run
    config, params = hf.load_hf(workdir / "model")
    valid = json.loads((workdir / "results.json").read_text())["validation"]
    text = (workdir.parent / "text.txt").read_bytes()
    tokens = np.frombuffer(text[-64 * 32 :], np.uint8).astype(np.int32).reshape(64, 32) + 3
    logits = decoder.forward(config, params, tokens).logits[:, :-1]
    picked = np.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    # Other windows than those of the evaluation: near, and far from an untrained log(259) = 5.56.
    assert -picked.mean() == pytest.approx(valid["cross_entropy"], abs=0.3)
    assert config.eos_token_ids == (1,)


def test_a_finished_run_starts_again_without_training(run, monkeypatch, capsys):
    folder, workdir = run
    monkeypatch.chdir(folder)
    before = json.loads((workdir / "results.json").read_text())
    lines = (workdir / "metrics.jsonl").read_text()
    assert launch.main(micro.arguments(folder, "out", mesh__tensor=2)) == 0
    assert json.loads((workdir / "results.json").read_text()) == before
    assert (workdir / "metrics.jsonl").read_text() == lines
    assert launch.main(micro.arguments(folder, "out", mesh__tensor=2, train__steps=13)) == 2
    assert "train.steps (12 there, 13 here)" in capsys.readouterr().err


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    whole = micro.start(tmp_path, micro.arguments(tmp_path, "whole", train__steps=40))
    micro.finish(whole)
    arguments = micro.arguments(tmp_path, "killed", train__steps=40)
    process = micro.start(tmp_path, arguments)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 200
    while not any(checkpoints.glob("*[0-9]")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert max(int(path.name) for path in checkpoints.glob("*[0-9]")) < 40
    micro.finish(micro.start(tmp_path, arguments))
    first, second = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed")
    )
    for results in (first, second):
        del results["tokens_per_second"]
    assert first == second
    metrics = [report.read_metrics(tmp_path / n / "metrics.jsonl") for n in ("whole", "killed")]
    for name in ("train/loss", "train/gradient_norm", "eval/cross_entropy"):
        for a, b in zip(metrics[0][name], metrics[1][name], strict=True):
            np.testing.assert_array_equal(a, b)


def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    arguments = micro.arguments(tmp_path, "out", train__steps=100_000, train__checkpoint_every=0)
    process = micro.start(tmp_path, arguments)
    deadline = time.monotonic() + 200
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "the same command goes on" in micro.finish(process, expect=0)
    assert len(list((tmp_path / "out" / "checkpoints").glob("*[0-9]"))) == 1


def test_wrong_values_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def refused(**overrides) -> str:
        assert launch.main(micro.arguments(tmp_path, "out", **overrides)) == 2
        lines = capsys.readouterr().err.strip().split("\n")
        assert len(lines) == 1
        return lines[0]

    assert "nowhere.txt" in refused(data__path="nowhere.txt")
    assert "nowhere" in refused(tokenizer__path="nowhere")
    assert "unknown preset 'llama9'" in refused(model__preset="llama9")
    assert "optimizer.name='adamx'" in refused(optimizer__name="adamx")
    assert "needs a multiple of 3 devices" in refused(mesh__tensor=3)
    assert "valid_fraction=1.5" in refused(data__valid_fraction=1.5)
    assert "num_heads=5" in refused(model__num_heads=5)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "no"}\n')
    assert "bad.jsonl:2" in refused(data__path=bad)


def test_held_out_sides_share_nothing_and_miss_nothing(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {i}"}) + "\n" for i in range(45)))
    config = config_files.resolve("pretrain:text", [f"data.path={path}"]).config
    splits = text_data.text_sources(config.data)
    train = [record["text"] for record in splits["train"]]
    valid = [record["text"] for record in splits["valid"]]
    assert len(valid) == 2 and sorted(train + valid) == sorted(f"record {i}" for i in range(45))
    text = tmp_path / "one.txt"
    text.write_text("".join(f"line {i}\n" for i in range(100)))
    config = config_files.resolve("pretrain:text", [f"data.path={text}"]).config
    [train], [valid] = (
        [record["text"] for record in source]
        for source in text_data.text_sources(config.data).values()
    )
    assert train + valid == text.read_text() and valid.startswith("line 9")


def test_the_tiny_model_is_trained_once_per_recipe(run, monkeypatch):
    folder, workdir = run
    monkeypatch.chdir(folder)
    overrides = [a.removeprefix("--config.") for a in micro.arguments(folder, "out") if "=" in a]
    overrides += ["train.steps=3", "train.final_eval_batches=1"]
    config = config_files.resolve("pretrain:text", overrides).config
    model, params, tokenizer = tiny_model.get_tiny_model(config)
    assert tokenizer.fingerprint() == load_tokenizer("byte").fingerprint()
    monkeypatch.setattr(pretrain, "train", lambda *_: pytest.fail("trained again"))
    again = tiny_model.get_tiny_model(config)
    assert again[0] == model
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    (folder / "text.txt").write_text((folder / "text.txt").read_text() + "more\n")
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        tiny_model.get_tiny_model(config)


SEQIO_TASK = """
import seqio

def dataset(split, shuffle_files=False, seed=None):
    import tensorflow as tf
    texts = {"train": ["abc abd " * 20] * 30, "held_out": ["abc abd " * 10]}[split]
    return tf.data.Dataset.from_tensor_slices({"targets": texts})

vocabulary = seqio.ByteVocabulary()
seqio.TaskRegistry.add(
    "letters",
    source=seqio.FunctionDataSource(dataset, splits=("train", "held_out")),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"targets": seqio.Feature(vocabulary, add_eos=True)},
)
"""


def test_a_seqio_task_is_trained_on(tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("seqio") is None:
        pytest.skip("seqio is not installed")
    loaded_before = "tensorflow" in sys.modules
    (tmp_path / "letter_tasks.py").write_text(SEQIO_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"data__seqio_task": "letters", "data__seqio_splits": "('train', 'held_out')"}
    options |= {"train__steps": 8, "mesh__tensor": 2, "optimizer__peak": 0.01}
    arguments = micro.arguments(tmp_path, "out", **options)
    assert launch.main(arguments) == 2
    assert "data.seqio_register" in capsys.readouterr().err
    assert launch.main([*arguments, "--config.data.seqio_register=letter_tasks"]) == 0
    assert ("tensorflow" in sys.modules) == loaded_before
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    # 80 letters and the end of the text, of which the first letter is no target.
    assert results["validation"]["tokens"] == 80
    bits = results["validation"]["cross_entropy"] / np.log(2)
    assert results["validation"]["bits_per_byte"] == pytest.approx(bits)
    assert results["frequencies_bits_per_byte"] < 8 and bits < 8


@pytest.mark.parametrize("variant", ["llama3_8b", "olmoe_7b"])
def test_large_variants_describe_their_models(variant):
    config = config_files.resolve(f"pretrain:{variant}").config
    model = pretrain.model_config(config, 1000)
    assert model.max_positions >= config.data.row_length
    assert pretrain.optimizer_config(config).schedule.warmup_steps == 2000
    with pytest.raises(UsageError, match="only"):
        pretrain.model_config(config, 1_000_000)


@pytest.mark.parametrize("variant", ["llama3_8b", "llama3_70b", "mixtral_8x7b", "olmoe_7b"])
def test_large_variants_lower_onto_a_mesh_without_allocating(variant):
    axis = "tensor" if variant.startswith("llama") else "expert"
    overrides = [f"mesh.{axis}=2", "data.batch_size=8", "data.row_length=512"]
    config = config_files.resolve(f"pretrain:{variant}", overrides).config
    lowered = pretrain.lower_steps(config, pretrain.make_mesh(config))["train_step"]
    [state, batch], _ = lowered.in_avals
    assert batch["tokens"].shape == (8, 512)
    work = pretrain.step_work(config)["train_step"]
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == work.params > 6e9
    assert work.tokens == 8 * 512 and work.flops_per_token > 6e9
    assert "sdy.sharding" in lowered.as_text()


def test_recomputation_of_a_preset_can_be_chosen():
    def chosen(*overrides):
        config = config_files.resolve("pretrain:llama3_8b", overrides).config
        return pretrain.step_work(config)["train_step"].remat

    assert chosen() == "dots" and chosen("model.remat=full") == "full"
    with pytest.raises(UsageError, match="remat"):
        chosen("model.remat=some")
