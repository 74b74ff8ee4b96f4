"""Which rank comes last to the calls of a run, and where the time of the calls goes."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mpizero.comm.record import DONE

if TYPE_CHECKING:
    from mpizero.cli.runs import Run

__all__ = ["Late", "Operation", "latecomers", "meetings", "operations"]


class Late(NamedTuple):
    """Say how often a rank came last to a call that the ranks made together, and by how much."""

    rank: int
    times: int
    """Calls to which it came last."""
    of: int
    """Calls that it made with others."""
    middle: float
    """Seconds from the last but one to it, the median of the calls to which it came last."""
    longest: float
    waited: float
    """Seconds that the others together spent in calls before it came."""


class Operation(NamedTuple):
    """Sum up the calls of one kind, of all ranks."""

    name: str
    algorithm: str
    calls: int
    """Of all ranks together."""
    nbytes: int
    """Of their buffers, all ranks' together."""
    middle: float
    """Seconds from the call's issue to its end, the median."""
    longest: float
    per_rank: float
    """Seconds in such calls, the mean of the ranks; more than passed where calls overlap."""


def meetings(run: Run) -> dict[tuple[int, int], list[tuple[float, int]]]:
    """Return by communicator and number each call that all its ranks have made here: start and rank, in their order."""
    found: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for dump in run.ranks:
        for call in dump.calls:
            found.setdefault((call.uid, call.sequence), []).append((call.start, dump.rank))
    here = {uid: sum(rank in run.by_rank for rank in ranks) for uid, ranks in run.members.items()}
    return {key: sorted(starts) for key, starts in found.items() if len(starts) == here[key[0]] > 1}


def latecomers(run: Run) -> list[Late]:
    """Return the ranks that came last to a call, those for which others waited longest first."""
    lags: dict[int, list[float]] = {}
    waited: dict[int, float] = {}
    made: dict[int, int] = {}
    for starts in meetings(run).values():
        moment, rank = starts[-1]
        lags.setdefault(rank, []).append(moment - starts[-2][0])
        waited[rank] = waited.get(rank, 0.0) + sum(moment - start for start, _ in starts)
        for _, each in starts:
            made[each] = made.get(each, 0) + 1
    found = [Late(rank, len(lag), made[rank], median(lag), max(lag), waited[rank]) for rank, lag in lags.items()]
    return sorted(found, key=lambda late: late.waited, reverse=True)


def operations(run: Run) -> list[Operation]:
    """Return the kinds of calls that are over, those that took most time first."""
    spans: dict[tuple[str, str], list[float]] = {}
    nbytes: dict[tuple[str, str], int] = {}
    for dump in run.ranks:
        for call in dump.calls:
            if call.state == DONE:
                key = call.name, call.algorithm
                spans.setdefault(key, []).append(call.end - call.start)
                nbytes[key] = nbytes.get(key, 0) + call.nbytes
    found = [
        Operation(*key, len(took), nbytes[key], median(took), max(took), sum(took) / len(run.ranks))
        for key, took in spans.items()
    ]
    return sorted(found, key=lambda operation: operation.per_rank, reverse=True)
