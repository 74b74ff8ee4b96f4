"""What a rank can find out about its parameters before a forward, in bits that all ranks tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpizero.errors import ShardError

if TYPE_CHECKING:
    from mpizero.shard.flat import FlatParams

__all__ = ["FROZEN", "REPLACED", "TOGGLED", "TRAINABLE", "flags_of", "raise_for_flags"]

TRAINABLE, FROZEN = 1, 2
"""Trainable or frozen shards changed in place since the full parameters were filled."""
REPLACED = 4
"""Shards lie in other memory, or have another dtype, than the master values."""
TOGGLED = 8
"""Parameters were frozen or unfrozen."""


def flags_of(flats: list[FlatParams]) -> int:
    """Return what holds for any of the flat buffers, as bits."""
    flags = 0
    for flat in flats:
        if flat.changed():
            flags |= TRAINABLE if flat.trainable else FROZEN
        if flat.replaced():
            flags |= REPLACED
        if flat.toggled():
            flags |= TOGGLED
    return flags


def raise_for_flags(flags: int, flats: list[FlatParams]) -> None:
    """Raise ShardError for a mistake that some rank has found, with the names that this rank knows."""
    if flags & REPLACED:
        names = [name for flat in flats for name in flat.replaced()]
        raise ShardError(
            f"parameters of a sharded model must keep their memory and dtype (got new ones for {_list(names)}): the "
            "model would not see them; convert or load before mpizero.shard(...), choose the precision with "
            "mpizero.Precision, and write values in place, as with param.copy_(...)"
        )
    names = [name for flat in flats for name in flat.toggled()]
    raise ShardError(
        f"requires_grad of a sharded model's parameters must stay as it was (got a change of {_list(names)}): freeze "
        "or unfreeze before mpizero.shard(...), or leave parameters out of the optimizer"
    )


def _list(names: list[str]) -> str:
    if not names:
        return "some on another rank"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
