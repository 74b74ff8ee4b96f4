"""The calls of a run as a trace that Perfetto (https://ui.perfetto.dev) and Chrome's about:tracing show.

Source: Google, "Trace Event Format" (complete events "X", instant events "i", flow events "s" and "f", metadata events
"M", times in microseconds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.cli.arrivals import meetings
from mpizero.cli.verdict import ending
from mpizero.comm.record import DONE, FAILED, UNDER_WAY
from mpizero.tables import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.cli.dumps import Dump
    from mpizero.cli.runs import Run
    from mpizero.comm.recorded import Call

__all__ = ["trace_of"]

LANES_PER_RANK = 1000
"""Threads count from 1000 times the rank plus 1: Perfetto takes one with its process's number for the main one."""
WORTH_AN_ARROW = 1e-3
"""Seconds that a rank waits for the last one before an arrow shows it: an arrow for each call hides the calls."""
STATES = {UNDER_WAY: "under way", DONE: "done", FAILED: "failed"}

Placed = list[tuple[int, "Call"]]


def trace_of(run: Run) -> dict[str, Any]:
    """Return a trace in which each rank is a process and each communicator a lane, or several where calls overlap.

    A call that is under way ends with the records. Arrows go from the rank that came last to a call to the
    calls of those that it kept waiting. How each rank ended is a mark.

    Returns:
        What `json.dumps` writes as a trace file; its time 0 is the start of the first rank.
    """
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[int, int, int], int] = {}
    for dump in run.ranks:
        placed = _placed(run, dump)
        lanes |= {(dump.rank, call.uid, call.sequence): lane for lane, call in placed}
        events += _names(run, dump, placed)
        events += (_slice(run, dump.rank, lane, call) for lane, call in placed)
        if not dump.alive:
            events.append(_end(run, dump))
    events += _arrows(run, lanes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"command": run.command, "began": run.began}}


def _placed(run: Run, dump: Dump) -> Placed:
    """Return the calls with their lanes; of a communicator's, a call takes the first that is free at its start."""
    free: dict[tuple[int, int], float] = {}
    order: list[tuple[tuple[int, int], Call]] = []
    for call in dump.calls:
        lane = 0
        while free.get((run.numbers[call.uid], lane), 0.0) > call.start:
            lane += 1
        key = (run.numbers[call.uid], lane)
        free[key] = _until(run, call)
        order.append((key, call))
    rows = {key: row for row, key in enumerate(sorted(free))}
    return [(rows[key], call) for key, call in order]


def _until(run: Run, call: Call) -> float:
    return call.end or max(run.now, call.start)


def _names(run: Run, dump: Dump, placed: Placed) -> Iterator[dict[str, Any]]:
    """Return the events that name a rank and its lanes and keep them in order."""
    about = f"rank {dump.rank} on {dump.host} ({ending(dump)})"
    yield _meta(dump.rank, 0, "process_name", name=about)
    yield _meta(dump.rank, 0, "process_sort_index", sort_index=dump.rank)
    for lane, uid in {lane: call.uid for lane, call in placed}.items():
        label = run.label(uid)
        name = f"{label or f'communicator {run.numbers[uid]}'}: ranks {ranges(run.members[uid])}"
        yield _meta(dump.rank, lane, "thread_name", name=name)
        yield _meta(dump.rank, lane, "thread_sort_index", sort_index=lane)


def _meta(rank: int, lane: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": _thread(rank, lane), "args": args}


def _slice(run: Run, rank: int, lane: int, call: Call) -> dict[str, Any]:
    args = {
        "call": call.plain,
        "algorithm": call.algorithm,
        "label": call.label,
        "nbytes": call.nbytes,
        "number": call.sequence,
        "state": STATES.get(call.state, "unknown"),
    }
    return {
        "name": f"{call.name} {call.label}".rstrip(),
        "cat": call.name,
        "ph": "X",
        "ts": _micros(run, call.start),
        "dur": max(0.0, 1e6 * (_until(run, call) - call.start)),
        "pid": rank,
        "tid": _thread(rank, lane),
        "args": args,
    }


def _end(run: Run, dump: Dump) -> dict[str, Any]:
    return {
        "name": f"rank {dump.rank}: {ending(dump)}",
        "cat": "end",
        "ph": "i",
        "s": "p",
        "ts": _micros(run, dump.ended or dump.last_sign),
        "pid": dump.rank,
        "tid": _thread(dump.rank, 0),
        "args": {"cause": dump.recorded.cause},
    }


def _arrows(run: Run, lanes: dict[tuple[int, int, int], int]) -> Iterator[dict[str, Any]]:
    """Return flows from the start of the last rank's call to the calls of those that waited for it."""
    calls = {(dump.rank, call.uid, call.sequence): call for dump in run.ranks for call in dump.calls}
    number = 0
    for (uid, sequence), starts in meetings(run).items():
        moment, last = starts[-1]
        for start, rank in starts[:-1]:
            key = (rank, uid, sequence)
            if moment - start < WORTH_AN_ARROW or _until(run, calls[key]) < moment:
                continue
            number += 1
            inside = (moment + _until(run, calls[key])) / 2  # at its very end a viewer may take the next call for it
            ends = (("s", last, moment), ("f", rank, inside))
            for phase, where, when in ends:
                yield {
                    "name": "came last",
                    "cat": "waits",
                    "ph": phase,
                    "id": number,
                    "ts": _micros(run, when),
                    "pid": where,
                    "tid": _thread(where, lanes[where, uid, sequence]),
                    **({"bp": "e"} if phase == "f" else {}),
                }


def _thread(rank: int, lane: int) -> int:
    return LANES_PER_RANK * rank + lane + 1


def _micros(run: Run, moment: float) -> float:
    return round(1e6 * (moment - run.began), 3)
