"""The arithmetic of sharding: layouts and estimates. Knows no torch, no processes and no files."""

from mpizero.plan.accounts import ACCOUNTS, account_bytes
from mpizero.plan.advice import Limits, advice, enough_ranks, smallest_stage
from mpizero.plan.layout import ALIGNMENT, Layout, Piece, Slot, layout_of
from mpizero.plan.memory import STAGES, StateBytes, check_stage, model_state_bytes, sent_per_step
from mpizero.plan.model import ModelShape, UnitShape, equal_units, transformer
from mpizero.plan.moved import DISK, HOST, Carried, Carriers, Moved
from mpizero.plan.setup import DTYPES, Setup, Widths, widths
from mpizero.plan.step import Step, step_of

__all__ = [
    "ACCOUNTS",
    "ALIGNMENT",
    "DISK",
    "DTYPES",
    "HOST",
    "STAGES",
    "Carried",
    "Carriers",
    "Layout",
    "Limits",
    "ModelShape",
    "Moved",
    "Piece",
    "Setup",
    "Slot",
    "StateBytes",
    "Step",
    "UnitShape",
    "Widths",
    "account_bytes",
    "advice",
    "check_stage",
    "enough_ranks",
    "equal_units",
    "layout_of",
    "model_state_bytes",
    "sent_per_step",
    "smallest_stage",
    "step_of",
    "transformer",
    "widths",
]
