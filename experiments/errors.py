"""The error that a user can repair: reported in one line, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Wrong input from the command line or a config; the launcher prints it and exits with 2."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" for near misses, else " Known: ..."."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" Known: {', '.join(known)}." if known else ""


class Interrupted(Exception):
    """The run was asked to end, has saved its state, and goes on with the same command."""
