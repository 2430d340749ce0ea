"""Answering prompts from the command line."""

from __future__ import annotations

import io
import json

import pytest

from experiments import generate, launch


@pytest.fixture
def checkpoint(shared_dir, tmp_path, monkeypatch):
    """A small real checkpoint; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    return shared_dir / "data" / "models" / "stories260k"


def answers(folder, *arguments: str) -> list[dict]:
    assert launch.main(["--config", "generate", "--workdir", str(folder), *arguments]) == 0
    return json.loads((folder / "results.json").read_text())["answers"]


def test_a_prompt_is_continued_and_reported(checkpoint, tmp_path, capsys):
    options = [f"--config.model={checkpoint}", "--config.max_new_tokens=20"]
    first, second = "Once upon a time", "Tom and Jane"
    [entry] = answers(tmp_path / "out", *options, f"--config.prompt={first}")
    assert entry["tokens"] == 20
    # The model's own greedy continuation, as published with it.
    assert entry["answer"].startswith(", there was a little girl named Lily.")
    assert entry["answer"] in capsys.readouterr().out
    assert entry["answer"] in (tmp_path / "out" / "report.md").read_text()
    # The same workdir takes another prompt, and a batch answers as the prompts alone do.
    examples = f"--config.examples=({first!r}, {second!r})"
    both = answers(tmp_path / "out", *options, examples)
    assert both[0] == entry
    [alone] = answers(tmp_path / "out", *options, f"--config.prompt={second}")
    assert both[1] == alone


def test_quantised_answers_stay_close(checkpoint, tmp_path):
    options = [f"--config.model={checkpoint}", "--config.max_new_tokens=12"]
    options += ["--config.prompt=Once upon a time", "--config.quantize_bits=8"]
    [entry] = answers(tmp_path / "out", *options, "--config.group_size=4")
    assert entry["answer"].startswith(", there was")


def test_sampling_depends_on_the_seed_alone(checkpoint, tmp_path):
    options = [f"--config.model={checkpoint}", "--config.max_new_tokens=12"]
    options += ["--config.prompt=Once upon a time", "--config.temperature=1.0"]
    runs = [answers(tmp_path / "out", *options, f"--config.seed={seed}") for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_a_terminal_is_asked_until_an_empty_line(checkpoint, tmp_path, monkeypatch):
    terminal = io.StringIO("Once upon a time\nTom\n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    asked = answers(tmp_path / "out", f"--config.model={checkpoint}", "--config.max_new_tokens=5")
    assert [entry["prompt"] for entry in asked] == ["Once upon a time", "Tom"]


def test_chat_template_is_used_where_there_is_one(checkpoint, tmp_path):
    from experiments import config_files

    options = config_files.resolve("generate", [f"model={checkpoint}"]).config
    engine = generate.load(options)
    assert engine.template is None
    plain = engine.encode([{"role": "user", "content": "Once"}])
    template = generate.chat.ChatTemplate("{{ messages[-1].content }} upon a time")
    chatting = generate.Engine(engine.config, engine.params, engine.tokenizer, template)
    ids = chatting.encode([{"role": "user", "content": "Once"}])
    assert engine.tokenizer.decode(ids, skip_special=True) == "Once upon a time"
    assert plain[0] == engine.tokenizer.bos_id


def test_what_cannot_be_loaded_is_one_line(checkpoint, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert launch.main(["--config", "generate", "--workdir", "out", *arguments]) == 2
        lines = capsys.readouterr().err.strip().split("\n")
        assert len(lines) == 1
        return lines[0]

    assert "nowhere" in refused("--config.model=nowhere")
    model = f"--config.model={checkpoint}"
    assert "no chat template" in refused(model, "--config.chat=always")
    assert "chat='sometimes'" in refused(model, "--config.chat=sometimes")
    assert "quantize_bits=3" in refused(model, "--config.quantize_bits=3")
    assert "nothing" in refused(model, "--config.tokenizer=nothing")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--config.prompt=What is the capital of France?", "--config.max_new_tokens=16"]
    [entry] = answers(tmp_path / "out", *options)
    assert entry["answer"] == "The capital of France is Paris."
