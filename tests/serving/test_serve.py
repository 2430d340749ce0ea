"""The command line of the server, and a real checkpoint behind it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from experiments import serve  # noqa: E402
from tests.experiments.micro import ROOT  # noqa: E402


def test_usage_errors_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(*arguments: str) -> str:
        assert serve.main(arguments) == 2
        (line,) = capsys.readouterr().err.strip().split("\n")
        return line

    assert "give --model" in refused()
    assert "nowhere" in refused("--model", "nowhere")
    assert "--max_length" in refused("--model", "x", "--max_lenght=5")
    assert "--port" in refused("--model", "x", "--port", "http")
    assert "--port=70000" in refused("--model", "x", "--port=70000")
    assert "--slots=0" in refused("--model", "x", "--slots=0")


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(serve.UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve.listen("127.0.0.1", port)


def test_a_real_checkpoint_is_served_until_it_is_asked_to_end(shared_dir, tmp_path):
    model = shared_dir / "data" / "models" / "stories260k"
    command = [sys.executable, "-m", "experiments.serve", f"--model={model}", "--port=0"]
    process = subprocess.Popen(
        [*command, "--slots=2", "--max_length=64"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        line = process.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url and "serving stories260k" in line, line + process.stdout.read()
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        response = httpx.post(f"{url[0]}/completions", json=body, trust_env=False, timeout=120)
        # The model's own greedy continuation, as published with it.
        assert response.json()["choices"][0]["text"].startswith(", there was a little girl")
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
