"""The arithmetic of sharding: layouts and estimates. Knows no torch, no processes and no files."""

from mpizero.plan.layout import ALIGNMENT, Layout, Piece, Slot, layout_of
from mpizero.plan.memory import STAGES, StateBytes, check_stage, model_state_bytes, sent_per_step
from mpizero.plan.model import ModelShape, UnitShape, transformer

__all__ = [
    "ALIGNMENT",
    "STAGES",
    "Layout",
    "ModelShape",
    "Piece",
    "Slot",
    "StateBytes",
    "UnitShape",
    "check_stage",
    "layout_of",
    "model_state_bytes",
    "sent_per_step",
    "transformer",
]
