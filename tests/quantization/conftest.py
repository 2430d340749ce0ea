"""Many programs that run once each."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(quick_compilation):
    pass
