"""The measured table that `auto` follows: which algorithm was the quickest, by operation, placement, dtype and size.

`mpizero tune` writes it; rank 0 of a communicator reads it and tells the others, so that all choose alike. A table is
of one machine, and is left aside on another.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from mpizero.errors import ArgumentError, must_be

__all__ = ["SCHEMA", "Choice", "Row", "Table", "layout_of"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Name the quickest algorithm at one size."""

    nbytes: int
    algorithm: str
    pieces: int = 1
    """For pipelined algorithms."""
    us: float = 0.0
    """Microseconds that it took: the median of the slowest rank."""
    others: dict[str, float]
    """The same of all algorithms that were tried."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold the choices for one kind of call, by rising size."""

    operation: str
    layout: tuple[int, ...]
    """Ranks per node; see `layout_of`."""
    dtype: str
    order: str
    """`any`, or `canonical` where algorithms of that order alone were tried."""
    choices: tuple[Choice, ...]

    def nearest(self, nbytes: int) -> Choice:
        """Return the choice of the size that is nearest by ratio."""
        return min(self.choices, key=lambda choice: abs(math.log2(max(choice.nbytes, 1) / max(nbytes, 1))))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Hold all rows, and the machine on which they were measured."""

    machine: dict[str, str]
    rows: tuple[Row, ...]

    def dumps(self) -> str:
        """Return the table as JSON."""
        return json.dumps({"schema_version": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def loads(cls, text: str) -> Table:
        """Return the table that JSON text holds.

        Raises:
            ArgumentError: for text that is none, or of another version.
        """
        try:
            data = json.loads(text)
            version = data["schema_version"]
            if version != SCHEMA:
                remedy = "run `mpizero tune` again"
                raise ArgumentError(must_be("schema_version of the tuning table", str(SCHEMA), version, remedy))
            return cls(machine=data["machine"], rows=tuple(map(_row, data["rows"])))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(must_be("the tuning table", "JSON of `mpizero tune`", str(error))) from error

    def find(self, operation: str, nodes: tuple[int, ...], dtype: str, *, strict: bool, nbytes: int) -> Choice | None:
        """Return the choice for a call, None where nothing was measured for its operation and placement.

        A row of another dtype serves where there is none of this one, and one of canonical order where any will do.
        """
        layout = layout_of(nodes)
        rows = [row for row in self.rows if (row.operation, row.layout) == (operation, layout) and row.choices]
        if strict:
            rows = [row for row in rows if row.order == "canonical"]
        rows.sort(key=lambda row: (row.dtype != dtype, row.order != ("canonical" if strict else "any")))
        return rows[0].nearest(nbytes) if rows else None


def layout_of(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of ranks of each node, in the order of the nodes' numbers."""
    return tuple(nodes.count(node) for node in sorted(set(nodes)))


def _row(data: dict[str, Any]) -> Row:
    choices = tuple(Choice(**choice) for choice in data["choices"])
    return Row(**{**data, "layout": tuple(data["layout"]), "choices": choices})
