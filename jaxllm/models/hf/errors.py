"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved; the message names the part and what to do."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint asks for something that the decoder cannot do."""
