"""What goes wrong with checkpoints, told alike on all ranks."""

from __future__ import annotations

from typing import Any

from mpizero.errors import MpiZeroError
from mpizero.shard.agree import listed
from mpizero.shard.agree import raise_together as _raise_together

__all__ = ["CheckpointError", "listed", "raise_together"]


class CheckpointError(MpiZeroError, RuntimeError):
    """Say that a checkpoint cannot be written, or that what lies in a folder cannot be loaded into a model."""


def raise_together(comm: Any, found: MpiZeroError | str) -> None:
    """Raise a CheckpointError on all ranks if any of them has something to say; see `shard.agree`. Collective."""
    _raise_together(comm, found, CheckpointError)
