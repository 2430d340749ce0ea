"""Where metrics go: a JSON-lines file and TensorBoard events.

The writers have the methods of `clu.metric_writers.MetricWriter` that a training run calls
(`write_scalars`, `write_texts`, `flush`, `close`), so that any writer of clu may stand beside them
in `MultiWriter`. They do not inherit from it: importing clu's package imports TensorFlow, which
takes seconds and most of a gigabyte.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

_FLUSH_SECONDS = 30.0


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
        with _naming(self._path):
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, self._path)
            self._file = self._path.open("a", encoding="utf-8")

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Appends one line."""
        self._write({"step": int(step), **{name: _jsonable(v) for name, v in scalars.items()}})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Appends one line of texts."""
        self._write({"step": int(step), **texts})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        with _naming(self._path):
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        with _naming(self._path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()


class TensorBoardWriter:
    """TensorBoard event files by tensorboardX, which needs no TensorFlow.

    Events are written by the caller's thread, not by that of `tensorboardX.SummaryWriter`: where
    its thread ends at a full disk, the next event is waited for without end.

    Args:
      folder: where the event files go.
      resume_step: events of later steps, written before an interruption, are hidden.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None = None):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._folder = pathlib.Path(folder)
        self._summary, self._events = summary, event_pb2
        with _naming(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = event_file_writer.EventsWriter(str(self._folder / "events"))
            self._flushed = time.monotonic()
            if resume_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(resume_step + 1, session_log=start)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            self._write(step, summary=self._summary.scalar(name, float(value)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._write(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        with _naming(self._folder):
            self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        with _naming(self._folder):
            self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        with _naming(self._folder):
            self._file.write_event(
                self._events.Event(step=int(step), wall_time=time.time(), **content)
            )
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()


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
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
            for writer in self._writers:
                stack.callback(writer.close)


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


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Gives errors of writing (a full disk) the path, which the system does not know any more."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
