"""Checkpoints: of any number of ranks for any number of ranks, whole or not at all, readable without mpizero."""

from __future__ import annotations

from mpizero.checkpoint.background import SaveHandle
from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.loading import load
from mpizero.checkpoint.saving import save, save_async

__all__ = ["CheckpointError", "SaveHandle", "load", "save", "save_async"]
