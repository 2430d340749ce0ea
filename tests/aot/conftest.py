"""Programs for other hardware compile as they do for users."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _full_optimization_in_subprocesses(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
