"""Outcomes of several models on one set of questions, from CSV or parquet."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from jaxtyping import Int

QUESTION = "Question"


@dataclasses.dataclass(frozen=True)
class EvalTable:
    """One row a question, one column a model.

    Attributes:
      models: their names.
      outcomes: [Q, M] zeros and ones.
      clusters: [Q] label of the cluster of each question, or None where they are independent.
    """

    models: tuple[str, ...]
    outcomes: Int[np.ndarray, "Q M"]
    clusters: Int[np.ndarray, " Q"] | None = None

    def __post_init__(self) -> None:
        shape = self.outcomes.shape
        if len(shape) != 2 or shape[1] != len(self.models):
            raise ValueError(
                f"outcomes have shape {shape}, expected (questions, {len(self.models)} models)."
            )
        if self.clusters is not None and self.clusters.shape != shape[:1]:
            raise ValueError(f"clusters have shape {self.clusters.shape}, expected {shape[:1]}.")

    def of(self, model: str) -> Int[np.ndarray, " Q"]:
        """Outcomes of a model.

        Raises:
          KeyError: no such model; the message names those that are there.
        """
        if model not in self.models:
            raise KeyError(f"no model {model!r} in the table: it has {', '.join(self.models)}.")
        return self.outcomes[:, self.models.index(model)]


def load_table(path: str | os.PathLike[str], question_column: str | None = None) -> EvalTable:
    """Reads a CSV (with header) or parquet table of 0/1 outcomes.

    Args:
      path: the file; columns are models.
      question_column: column that numbers the questions; None = "Question" where there is one. The
        part before a point is the cluster: 7, 7.1 and 7.2 are tries of problem 7.

    Raises:
      ValueError: a cell that is neither 0 nor 1, with its column and line, or no column of a model.
    """
    path = pathlib.Path(path)
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
    else:
        try:
            table = pyarrow.csv.read_csv(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: {error}") from error
    if question_column is None and QUESTION in table.column_names:
        question_column = QUESTION
    if question_column is not None and question_column not in table.column_names:
        raise ValueError(
            f"{path} has no column {question_column!r}: it has {', '.join(table.column_names)}."
        )
    models = tuple(name for name in table.column_names if name != question_column)
    if not models or not table.num_rows:
        raise ValueError(f"{path} has no outcomes: expected a column a model and a row a question.")
    outcomes = np.stack([_outcomes(path, name, table[name]) for name in models], axis=1)
    clusters = None
    if question_column is not None:
        labels = [str(value).partition(".")[0] for value in table[question_column].to_pylist()]
        clusters = np.unique(labels, return_inverse=True)[1].astype(np.int32)
        if len(np.unique(clusters)) == len(clusters):
            clusters = None
    return EvalTable(models, outcomes, clusters)


def _outcomes(path: pathlib.Path, name: str, column: pyarrow.ChunkedArray) -> np.ndarray:
    values = np.empty(len(column), np.int8)
    for row, value in enumerate(column.to_pylist()):
        if value is None or isinstance(value, str) or value not in (0, 1):
            raise ValueError(
                f"{path}: column {name!r}, question {row + 1}: {value!r} is neither 0 nor 1."
            )
        values[row] = int(value)
    return values
