"""Aligned text for the tables that commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["aligned", "ranges", "ranks_in_words"]

GAP = "  "


def aligned(rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Return rows as lines with their columns under each other.

    Args:
        rows: equally many cells each; the first row may be the heading.
        right: the columns, from 0, that are aligned to the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in short: `ranges([0, 1, 2, 5])` is "0-2,5"; an order that is not rising is kept."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def ranks_in_words(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks as a sentence has them: "rank 3", "ranks 0, 2, 5", and beyond `most` "ranks 0, 2 and 7 more"."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if most is not None and len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
