"""Errors of the data package; each message names the thing, the value and what was expected."""

from __future__ import annotations


class DataError(ValueError):
    """Data or a description of data that cannot be used."""


class RecordError(DataError):
    """One bad record.

    Attributes:
      where: the place, `file:line` for JSON lines, `file:row` for parquet.
      reason: what is wrong with it.
    """

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class CacheError(DataError):
    """A token cache that is missing, truncated, corrupt or of another format."""


class TokenizerError(DataError):
    """A tokenizer that cannot be loaded or used."""
