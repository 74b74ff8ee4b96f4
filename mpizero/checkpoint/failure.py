"""What goes wrong with checkpoints, told alike on all ranks."""

from __future__ import annotations

from typing import Any

from mpizero.errors import MpiZeroError
from mpizero.shard.agree import gather_texts

__all__ = ["CheckpointError", "listed", "raise_together", "said_by"]

SHOWN = 12
"""Names in an error, and ranks with words of their own."""


class CheckpointError(MpiZeroError, RuntimeError):
    """Say that a checkpoint cannot be written, or that what lies in a folder cannot be loaded into a model."""


def raise_together(comm: Any, found: MpiZeroError | str) -> None:
    """Raise an error with one and the same text on all ranks if any of them has something to say.

    Args:
        comm: the ranks.
        found: what is wrong on this rank; "" for nothing. Where all ranks say the same, an error is raised as it is,
            else it is a CheckpointError.

    Collective: two all-gathers, one of 8 bytes per rank where nothing is wrong anywhere, none on one rank.
    """
    text = str(found)
    texts = gather_texts(comm, text) if comm.size > 1 else [text]
    if not any(texts):
        return
    if isinstance(found, MpiZeroError) and len(set(texts)) == 1:
        raise found
    raise CheckpointError(said_by(texts))


def said_by(texts: list[str]) -> str:
    """Return in one text what the ranks say; a rank's number stands before its words unless all say the same."""
    if len(set(texts)) == 1:
        return texts[0]
    who: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            who.setdefault(text, []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {text}" for text, ranks in who.items()]
    return listed(lines, "; ")


def listed(items: Any, between: str = ", ") -> str:
    """Return things in a row, a dozen at most, and how many there are beyond."""
    items = list(items)
    more = f"{between}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return between.join(str(item) for item in items[:SHOWN]) + more
