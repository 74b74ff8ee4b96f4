"""Spans of all ranks as a trace that Perfetto (https://ui.perfetto.dev) and Chrome's about:tracing show.

Source: Google, "Trace Event Format" (complete events "X", metadata events "M", times in microseconds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.shard.spans import COLLECTIVES, EXPOSED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Row", "trace_of"]

Row = tuple[str, str, int, int, int]
"""A span's kind, unit, start, stop and nbytes; times in nanoseconds of a clock that all ranks share."""

LANES_PER_RANK = 100
"""Threads count from 100 times the rank plus 1: Perfetto takes one with its process's number for the main one."""
COMPUTE_LANE, WAIT_LANE, FIRST_COLLECTIVE_LANE = range(3)


def trace_of(ranks: Sequence[tuple[str, Sequence[Row]]]) -> dict[str, Any]:
    """Return a trace in which each rank is a process with the lanes compute, wait and communication.

    Collectives that were under way together stand on lanes of their own (communication 2, ...): on one lane, the viewer
    would take one for a part of the other.

    Args:
        ranks: each rank's host and spans, in the order of the ranks.

    Returns:
        What `json.dumps` writes as a trace file; its time 0 is the first start of any span.
    """
    zero = min((row[2] for _, rows in ranks for row in rows), default=0)
    events: list[dict[str, Any]] = []
    for rank, (host, rows) in enumerate(ranks):
        placed = _placed(rows)
        num_lanes = max([FIRST_COLLECTIVE_LANE, *(lane for lane, _ in placed)]) + 1
        events += _names(rank, host, num_lanes)
        events += (_event(rank, lane, row, zero) for lane, row in placed)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _placed(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    """Return each span with its lane; a collective takes the first lane that is free at its start."""
    free: list[int] = []
    placed = []
    for row in sorted(rows, key=lambda row: (row[2], -row[3])):
        kind, _, start, stop, _ = row
        if kind not in COLLECTIVES:
            placed.append((WAIT_LANE if kind in EXPOSED else COMPUTE_LANE, row))
            continue
        lane = next((index for index, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [stop]
        placed.append((FIRST_COLLECTIVE_LANE + lane, row))
    return placed


def _names(rank: int, host: str, num_lanes: int) -> list[dict[str, Any]]:
    """Return the events that name a rank and its lanes and keep them in order."""
    more = [f"communication {number}" for number in range(2, num_lanes - FIRST_COLLECTIVE_LANE + 1)]
    events = [
        _about(rank, 0, "process_name", name=f"rank {rank} on {host}"),
        _about(rank, 0, "process_sort_index", sort_index=rank),
    ]
    for lane, name in enumerate(["compute", "wait", "communication", *more]):
        events.append(_about(rank, lane, "thread_name", name=name))
        events.append(_about(rank, lane, "thread_sort_index", sort_index=lane))
    return events


def _about(rank: int, lane: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": _thread(rank, lane), "args": args}


def _event(rank: int, lane: int, row: Row, zero: int) -> dict[str, Any]:
    kind, unit, start, stop, nbytes = row
    return {
        "name": f"{kind} {unit}".rstrip(),
        "cat": kind,
        "ph": "X",
        "ts": (start - zero) / 1000,
        "dur": (stop - start) / 1000,
        "pid": rank,
        "tid": _thread(rank, lane),
        "args": {"nbytes": nbytes} if kind in COLLECTIVES else {},
    }


def _thread(rank: int, lane: int) -> int:
    return LANES_PER_RANK * rank + lane + 1
