"""The Colab notebook runs from top to bottom, on a small checkpoint from disk."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "experiments" / "colab.ipynb"


def read():
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook, folder: pathlib.Path) -> str:
    """Runs all cells in a fresh kernel; returns everything printed."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def set_parameters(notebook, source: str) -> None:
    [cell] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source = source


def test_notebook_is_stored_without_outputs():
    for cell in read().cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_notebook_runs(shared_dir, tmp_path):
    notebook = read()
    checkpoint = shared_dir / "data" / "models" / "babyllama-char105"
    set_parameters(notebook, f"CHECKPOINT = {str(checkpoint)!r}")
    printed = execute(notebook, tmp_path)
    assert "llama: 0.9 M parameters, 5 layers" in printed
    before, after = re.search(r"(\d+) MB -> (\d+) MB", printed).groups()
    assert int(after) < int(before)
    losses = [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.slow
def test_notebook_runs_as_it_is(tmp_path):
    printed = execute(read(), tmp_path)
    assert "The capital of France is Paris." in printed
