"""Where metrics go: a JSON-lines file and TensorBoard events.

The writers have the methods of `clu.metric_writers.MetricWriter` that a training run calls
(`write_scalars`, `write_texts`, `flush`, `close`), so that any writer of clu may stand beside them
in `MultiWriter`. They do not inherit from it: importing clu's package imports TensorFlow, which
takes seconds and most of a gigabyte.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax


class JsonlWriter:
    """One JSON object a line: {"step": 10, "train/loss": 3.2, ...}.

    Every line is written whole and flushed. Numbers that JSON does not know are written as strings
    ("nan", "inf", "-inf").

    Args:
      path: the file, appended to.
      resume_step: lines of later steps are dropped first (they will be written again), and so is a
        torn last line; None = start an empty file.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else _lines_until(self._path, resume_step)
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Appends one line."""
        values = {name: _jsonable(value) for name, value in scalars.items()}
        self._file.write(json.dumps({"step": int(step), **values}, allow_nan=False) + "\n")
        self._file.flush()

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Appends one line of texts."""
        self._file.write(json.dumps({"step": int(step), **texts}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """TensorBoard event files through tensorboardX, which needs no TensorFlow.

    Args:
      folder: where the event files go.
      resume_step: events of later steps, written before an interruption, are hidden.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None = None):
        from tensorboardX import SummaryWriter  # slow to import where torch is installed

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(os.fspath(folder), purge_step=purge, flush_secs=30)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, float(value), int(step))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, text, int(step))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MultiWriter:
    """Passes everything to several writers; with none, a writer that writes nothing."""

    def __init__(self, writers: Sequence[Any] = ()):
        self._writers = tuple(writers)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write_scalars(step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for writer in self._writers:
            writer.write_texts(step, texts)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def create_writer(
    workdir: str | os.PathLike[str],
    resume_step: int | None = None,
    *,
    tensorboard: bool = True,
    extra: Sequence[Any] = (),
) -> MultiWriter:
    """metrics.jsonl and TensorBoard events in `workdir`, on the first process; elsewhere nothing.

    Args:
      workdir: folder of the run.
      resume_step: step from which the run goes on; None = it starts.
      tensorboard: also write events to `workdir`/tensorboard, where tensorboardX is installed.
      extra: further writers (anything with `write_scalars` and the other methods).
    """
    if jax.process_index() != 0:
        return MultiWriter()
    folder = pathlib.Path(workdir)
    writers: list[Any] = [JsonlWriter(folder / "metrics.jsonl", resume_step)]
    if tensorboard:
        try:
            writers.append(TensorBoardWriter(folder / "tensorboard", resume_step))
        except ImportError:
            logging.getLogger(__name__).warning(
                "no TensorBoard events: install tensorboardX (metrics.jsonl is written)."
            )
    return MultiWriter([*writers, *extra])


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file, non-finite numbers back as floats; a torn last line is left
    out.
    """
    records = [json.loads(line) for line in _complete_lines(pathlib.Path(path))]
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return [
        {k: special.get(v, v) if isinstance(v, str) else v for k, v in record.items()}
        for record in records
    ]


def _jsonable(value: Any) -> int | float | str:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _lines_until(path: pathlib.Path, step: int) -> list[str]:
    return [line for line in _complete_lines(path) if json.loads(line)["step"] <= step]


def _complete_lines(path: pathlib.Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    complete = [line + "\n" for line in lines[:-1] if line]
    for number, line in enumerate(complete, start=1):
        try:
            json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}.") from error
    return complete
