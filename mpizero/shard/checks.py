"""What a rank can find out about its parameters before a forward, in bits that all ranks tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpizero.errors import ShardError

if TYPE_CHECKING:
    from mpizero.shard.flat import FlatParams

__all__ = ["FROZEN", "REPLACED", "TOGGLED", "TRAINABLE", "flags_of", "raise_for_replaced", "trained_lines"]

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


def raise_for_replaced(flats: list[FlatParams]) -> None:
    """Raise ShardError for shards that some rank has found replaced, with the names that this rank knows."""
    names = [name for flat in flats for name in flat.replaced()]
    raise ShardError(
        f"parameters of a sharded model must keep their memory and dtype (got new ones for {_list(names)}): the "
        "model would not see them; move, convert or load before mpizero.shard(...), choose the precision with "
        "mpizero.Precision, and write values in place, as with param.copy_(...)"
    )


def trained_lines(flats: list[FlatParams]) -> list[str]:
    """Return, a line for each parameter, whether the user wants it trained."""
    pairs = [(member, shard) for flat in flats for member, shard in zip(flat.members, flat.shards, strict=True)]
    return [f"requires_grad of {member.names[0]} is {shard.requires_grad}" for member, shard in pairs]


def _list(names: list[str]) -> str:
    if not names:
        return "some on another rank"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
