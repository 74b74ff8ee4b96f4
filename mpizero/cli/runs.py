"""Runs: the records of one job together, on one clock, and who of its ranks waits for whom.

[Note: waits] A call waits for the ranks of its communicator that have not entered it. A rank that is waited for and
waits for nobody is where the job hangs; where there is none, ranks wait for each other in a circle.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mpizero.comm.record import FAILED, UNDER_WAY
from mpizero.tables import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mpizero.cli.dumps import Dump
    from mpizero.comm.recorded import Call

__all__ = ["Mismatch", "Run", "Wait", "runs_of"]

NEAR = 60.0
"""Seconds between the starts of ranks of one job, where nothing else says that they are of one."""
SAME_CLOCK = 1.0
"""Seconds by which the wall clocks of ranks on one host may differ; the record of another host may have its name."""


class Wait(NamedTuple):
    """Say that a rank is in a call that others have not entered."""

    rank: int
    call: Call
    missing: tuple[int, ...]
    """The job's ranks that have not entered it; empty where all have, and it goes on or hangs by itself."""


class Mismatch(NamedTuple):
    """Say that ranks made different calls as their same call on a communicator."""

    uid: int
    sequence: int
    calls: dict[int, Call]
    """Each rank's."""


class Run:
    """Be the records of one job."""

    def __init__(self, dumps: Iterable[Dump]) -> None:
        """Order the ranks, and put those of a host on one clock."""
        self.ranks = _on_one_clock(sorted(dumps, key=lambda dump: dump.rank))
        self.by_rank = {dump.rank: dump for dump in self.ranks}
        self.size = max(dump.recorded.size for dump in self.ranks)
        self.began = min(dump.began for dump in self.ranks)
        self.command = self.ranks[0].recorded.command

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have no record here."""
        return [rank for rank in range(self.size) if rank not in self.by_rank]

    @property
    def hosts(self) -> list[str]:
        """Return the hosts in the order of their first ranks."""
        return list(dict.fromkeys(dump.host for dump in self.ranks))

    @cached_property
    def now(self) -> float:
        """Return the time until which the records tell: the present for a job that runs."""
        return max(dump.now for dump in self.ranks)

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each communicator; of a closed one, those that used it last."""
        found: dict[int, tuple[int, ...]] = {}
        for dump in self.ranks:
            found.update({group.uid: group.members for group in dump.groups if group.uid not in found})
        closed: dict[int, list[int]] = {}
        for dump in self.ranks:
            for uid in sorted(dump.sequences.keys() - found.keys()):
                closed.setdefault(uid, []).append(dump.rank)
        return found | {uid: tuple(ranks) for uid, ranks in closed.items()}

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Return the communicators that were called, numbered from 1 in their order."""
        used = {call.uid for dump in self.ranks for call in dump.calls}
        return {uid: number for number, uid in enumerate((uid for uid in self.members if uid in used), 1)}

    def label(self, uid: int) -> str:
        """Return what a communicator is for; "" where nothing is said."""
        return next((group.label for dump in self.ranks for group in dump.groups if group.uid == uid), "")

    def place(self, uid: int) -> str:
        """Return a communicator in words: ` on communicator 2 (ranks 0-3)`; "" where there is one alone.

        The ranks are left out where it has all of the job.
        """
        if len(self.numbers) < 2:
            return ""
        ranks = "" if len(self.members[uid]) == self.size else f"ranks {ranges(self.members[uid])}"
        about = ", ".join(filter(None, (self.label(uid), ranks)))
        return f" on communicator {self.numbers[uid]}" + (f" ({about})" if about else "")

    @cached_property
    def waits(self) -> list[Wait]:
        """Return the calls that ranks are in, or were in when they ended; see [Note: waits]."""
        return [
            Wait(dump.rank, call, tuple(self._not_in(call)))
            for dump in self.ranks
            for call in dump.calls
            if call.state == UNDER_WAY or (call.state == FAILED and _gave_up(dump, call))
        ]

    def _not_in(self, call: Call) -> Iterator[int]:
        known, unknown = [], []
        for rank in self.members[call.uid]:
            dump = self.by_rank.get(rank)
            sequence = None if dump is None else dump.sequences.get(call.uid, _earliest(dump))
            if sequence is None:
                unknown.append(rank)
            elif sequence < call.sequence:
                known.append(rank)
        yield from known or unknown

    @cached_property
    def first_waits(self) -> dict[int, Wait]:
        """Return each rank's first call that waits for others; of calls that all have entered, where that is all."""
        found: dict[int, Wait] = {}
        for wait in sorted(self.waits, key=lambda wait: (not wait.missing, wait.call.number)):
            found.setdefault(wait.rank, wait)
        return found

    @property
    def roots(self) -> list[int]:
        """Return the ranks that are waited for and wait for nobody."""
        waited = {rank for wait in self.waits for rank in wait.missing}
        return sorted(waited - {wait.rank for wait in self.waits if wait.missing})

    @property
    def circle(self) -> list[Wait]:
        """Return a circle of ranks that wait each for the next; empty where somebody can go on."""
        waiting = {rank: wait for rank, wait in self.first_waits.items() if wait.missing}
        if not waiting or self.roots:
            return []
        path: list[int] = []
        rank = min(waiting)
        while rank not in path:
            path.append(rank)
            rank = next(missing for missing in waiting[rank].missing if missing in waiting)
        return [waiting[each] for each in path[path.index(rank) :]]

    @cached_property
    def behind(self) -> dict[int, int]:
        """Return by how many calls each rank is behind the first one, on the communicator where it is most."""
        ahead: dict[int, int] = {}
        for dump in self.ranks:
            for uid, sequence in dump.sequences.items():
                ahead[uid] = max(sequence, ahead.get(uid, 0))
        return {
            dump.rank: max(
                (ahead[uid] - (dump.sequences.get(uid, _earliest(dump)) or 0) for uid in _used(dump, self, ahead)),
                default=0,
            )
            for dump in self.ranks
        }

    @cached_property
    def mismatches(self) -> list[Mismatch]:
        """Return the first call on each communicator in which ranks differ, the earliest first."""
        calls: dict[tuple[int, int], dict[int, Call]] = {}
        for dump in self.ranks:
            for call in dump.calls:
                calls.setdefault((call.uid, call.sequence), {})[dump.rank] = call
        found: dict[int, Mismatch] = {}
        for (uid, sequence), made in sorted(calls.items()):
            if uid not in found and len({(call.plain, call.label) for call in made.values()}) > 1:
                found[uid] = Mismatch(uid, sequence, made)
        return sorted(found.values(), key=lambda mismatch: min(call.start for call in mismatch.calls.values()))


def runs_of(dumps: Sequence[Dump]) -> list[Run]:
    """Return the runs, the newest first.

    Records are of one run if they share a communicator, also by way of others. Those that know none over all ranks, as
    of a job that ended while it started, are joined if command, number of ranks and time of start agree.
    """
    parts: list[list[Dump]] = []
    for dump in dumps:
        joined = [part for part in parts if any(other.uids & dump.uids for other in part)]
        parts = [part for part in parts if part not in joined]
        parts.append([dump, *(other for part in joined for other in part)])
    whole = [part for part in parts if _knows_all(part)]
    for part in sorted((part for part in parts if part not in whole), key=lambda part: part[0].began):
        near = next((other for other in whole if _fit(other, part)), None)
        if near is None:
            whole.append(part)
        else:
            near += part
    return sorted(map(Run, whole), key=lambda run: run.began, reverse=True)


def _knows_all(part: list[Dump]) -> bool:
    size = part[0].recorded.size
    return len({dump.rank for dump in part}) == size or any(
        len(group.members) == size for dump in part for group in dump.groups
    )


def _fit(one: list[Dump], other: list[Dump]) -> bool:
    first, second = one[0].recorded, other[0].recorded
    return (
        (first.size, first.command) == (second.size, second.command)
        and abs(one[0].began - other[0].began) < NEAR
        and not {dump.rank for dump in one} & {dump.rank for dump in other}
    )


def _on_one_clock(dumps: list[Dump]) -> list[Dump]:
    """Give the ranks of a host one offset: their own readings of the wall clock differ by more than a call takes."""
    offsets: dict[str, float] = {}
    found = []
    for dump in dumps:
        offset = offsets.setdefault(dump.host, dump.offset)
        found.append(replace(dump, offset=offset) if abs(offset - dump.offset) < SAME_CLOCK else dump)
    return found


def _gave_up(dump: Dump, call: Call) -> bool:
    """Return whether a call that failed is what a rank was in when it ended, rather than went on from."""
    return not dump.alive and call.number == dump.calls[-1].number


def _earliest(dump: Dump) -> int | None:
    """Return the sequence on a communicator of which the record has no call: unknown where older calls are gone."""
    return 0 if not dump.calls or dump.calls[0].number == 1 else None


def _used(dump: Dump, run: Run, ahead: dict[int, int]) -> list[int]:
    """Return the communicators on which a rank can be behind."""
    return [
        uid for uid in ahead if dump.rank in run.members[uid] and (uid in dump.sequences or _earliest(dump) is not None)
    ]
