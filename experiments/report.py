"""What a run leaves behind: results.json, report.md and figures, each written whole or not."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

STYLE: dict[Any, Any] = {
    "figure.figsize": (6.4, 3.8),
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "font.size": 10,
}


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file under a temporary name and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes JSON atomically; arrays become lists, and NaN and infinities strings (not JSON)."""
    write_text(path, json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")


def write_results(workdir: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Writes `results.json` into the workdir."""
    write_json(pathlib.Path(workdir) / "results.json", results)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, pathlib.Path):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    raise TypeError(f"cannot store {type(value).__name__} {value!r} in JSON.")


def read_metrics(path: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads metrics.jsonl into {name: (steps, values)}; of a step written twice the last counts."""
    from jaxllm.training import writers

    series: dict[str, dict[int, float]] = {}
    for record in writers.read_jsonl(path):
        step = int(record.pop("step"))
        for name, value in record.items():
            if isinstance(value, int | float):
                series.setdefault(name, {})[step] = float(value)
    return {
        name: (np.array(sorted(points)), np.array([points[step] for step in sorted(points)]))
        for name, points in series.items()
    }


def mean_interval(
    values: Any, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and Student-t interval over the first axis (runs).

    Args:
      values: [runs, ...]; with one run the interval is the value itself.
      confidence: coverage of the interval.

    Returns:
      mean, low, high, each [...].
    """
    values = np.asarray(values, dtype=float)
    mean = values.mean(axis=0)
    runs = values.shape[0]
    if runs < 2:
        return mean, mean, mean
    from scipy import stats

    half = stats.t.ppf((1 + confidence) / 2, runs - 1) * values.std(axis=0, ddof=1) / runs**0.5
    return mean, mean - half, mean + half


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 3.8):
    """A figure and its axes in the common style, drawn without a display.

    `width` and `height` are inches of one panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        return plt.subplots(rows, columns, figsize=(width * columns, height * rows))


def plot_curve(axes: Any, x: Any, runs: Any, label: str, **style: Any) -> None:
    """Draws a curve; several runs [runs, points] as their mean with a 95 % interval."""
    runs = np.atleast_2d(np.asarray(runs, dtype=float))
    mean, low, high = mean_interval(runs)
    (line,) = axes.plot(x, mean, label=label, **style)
    if len(runs) > 1:
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


class Report:
    """Collects Markdown and figures; `write()` puts report.md and figures/ into the workdir."""

    def __init__(self, workdir: pathlib.Path | str, title: str):
        self.workdir = pathlib.Path(workdir)
        self._parts = [f"# {title}"]

    def heading(self, text: str) -> None:
        """A section heading."""
        self._parts.append(f"## {text}")

    def text(self, text: str) -> None:
        """A paragraph of Markdown."""
        self._parts.append(text)

    def code(self, text: str) -> None:
        """Text shown as it is; the fence is longer than any run of backticks in it."""
        longest = run = 0
        for character in text:
            run = run + 1 if character == "`" else 0
            longest = max(longest, run)
        fence = "`" * max(3, longest + 1)
        self._parts.append(f"{fence}text\n{text}\n{fence}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A Markdown table; floats are shown with four significant digits."""

        def cell(value: Any) -> str:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            return text.replace("|", "\\|").replace("\n", " ")

        lines = [columns, ["---"] * len(columns), *rows]
        self._parts.append("\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines))

    def figure(self, figure: Any, name: str, caption: str) -> pathlib.Path:
        """Saves a matplotlib figure as figures/<name>.png, closes it and shows it here."""
        import matplotlib.pyplot as plt

        path = self.workdir / "figures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{name}.{os.getpid()}.png")
        figure.savefig(temporary)
        os.replace(temporary, path)
        plt.close(figure)
        self._parts.append(f"![{caption}](figures/{name}.png)\n\n*{caption}*")
        return path

    def write(self) -> pathlib.Path:
        """Writes report.md and returns its path."""
        path = self.workdir / "report.md"
        write_text(path, "\n\n".join(self._parts) + "\n")
        return path
