"""Who is late, and who is gone: what a rank that waits finds out about the others, by their records.

[Note: gone] A rank that exits while others wait for it leaves them waiting for ever under every MPI; so does one that
ends by `os._exit` under some. A rank that waits looks at its peers' records four times a second. It ends the job, and
says why, where a peer has died, or has left without having come to the call that it waits for. A rank that leaves says
so in its record and then waits for the others before it lets MPI finalize, so that nobody is stuck in there. That is
when the interpreter exits, or when the program calls `os._exit` (MPICH's launcher kills the others then, without a word
and with exit code 0), or MPI_Finalize, which begins by telling the attributes of MPI_COMM_SELF.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpizero.comm.abort import abort
from mpizero.comm.control import Control
from mpizero.comm.raw import mpi
from mpizero.comm.record import DIED, LEFT, STOPPED, UNDER_WAY, Record, record
from mpizero.comm.recorded import Call, Recorded
from mpizero.comm.stacks import answer_for
from mpizero.comm.standing import Standing, after, died, grouped, has_done, standing
from mpizero.errors import ArgumentError
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.comm.standing import Member

__all__ = ["LOOK", "Watch", "look_around", "story", "watch"]

LOOK = 0.25
"""Seconds between two looks at the peers of the host."""
FIRST_QUESTION, LAST_PAUSE = 1.0, 30.0
"""Seconds of waiting before the other hosts are asked, and most of a pause before they are asked again."""
DYING = 3.0
"""Seconds that the launcher has to end the job after a rank has aborted it, before the others do so themselves."""
TURN = 0.05
"""Seconds by which a rank is ahead of the next in saying what ended the job: one of a host is enough."""
PARTING = 3.0
"""Seconds after a rank has left in which a message that it sent may still be on its way."""
FOR_STACKS = 4.0
"""Seconds within which ranks of a host are asked for their stacks, one after the other."""
NAPS = (0.002, 0.05)
"""The shortest and the longest sleep of a rank that has left and waits for the others."""


class Watch:
    """Look after the other ranks of this process's communicators."""

    def __init__(self, mine: Record) -> None:
        """Use this process's own record."""
        self.mine = mine
        self.own = Recorded(mine.path, mine.memory)
        self.control: Control | None = None
        """What asks and answers other hosts; None on one host."""
        self._members: dict[int, tuple[Member, ...]] = {}
        self._here: dict[int, Path] = {}
        """The records of the job's other ranks on this host."""
        self._read: dict[int, Recorded | None] = {}
        self._looking = threading.Lock()
        self._asked: dict[tuple[int, int], tuple[float, float]] = {}
        """Per call, when the other hosts were asked last, and the pause until they are asked again."""
        self._aborted = 0.0
        """When a rank was first seen to have aborted."""

    def enlist(self, uid: int, members: tuple[Member, ...], rank: int) -> None:
        """Look after the ranks of one more communicator, in which this one has the number `rank`."""
        self.mine.open_group(uid, rank, [member.rank for member in members])
        self._members[uid] = members
        for member in members:
            if member.node == members[rank].node and member.rank != self.own.rank and member.record:
                self._here[member.rank] = Path(member.record)

    def dismiss(self, uid: int) -> None:
        """Forget a communicator that is closed."""
        self.mine.close_group(uid)
        self._members.pop(uid, None)

    def link(self, uid: int, mpi_comm: Any) -> None:
        """Have this host's ranks and the others' answer each other; collective over all ranks of the job."""
        members = self._members[uid]
        if len({member.node for member in members}) > 1 and all(member.record for member in members):
            self.control = Control(mpi_comm, self.answer)

    def look(self) -> None:
        """End the job where a rank that this one waits for is gone; return at once where another thread looks."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            waits = self.own.under_way()
            for rank in list(self._here):
                self._look_at(rank, waits)
            for call in waits:
                self._look_far(call)
        finally:
            self._looking.release()

    def _look_at(self, rank: int, waits: list[Call]) -> None:
        peer = self._peer(rank)
        if peer is None:
            return
        if peer.is_lost():
            self.end(f"rank {rank} on {peer.host} {died(peer)}")
        if peer.state in {DIED, STOPPED}:
            self._await_end(rank, peer)
        if peer.state != LEFT:
            return
        for call in waits:
            if rank in self._ranks(call.uid) and not has_done(peer, call):
                self.end(f"rank {rank} on {peer.host} left ({peer.cause}){after(peer)}; {self._waits(call)}")

    def miss(self, uid: int, ranks: Sequence[int], what: str) -> None:
        """End the job where a rank has left without which a wait outside any call cannot end.

        Args:
            uid: of a communicator.
            ranks: in it; those of other hosts are not looked at.
            what: this rank waits for, with its name.
        """
        members = self._members.get(uid, ())
        for rank in (members[number].rank for number in ranks if members):
            peer = self._peer(rank) if rank in self._here else None
            if peer is not None and peer.state == LEFT and time.monotonic() - peer.ended > PARTING:
                self.end(f"rank {rank} on {peer.host} left ({peer.cause}){after(peer)}; {what}")

    def _await_end(self, rank: int, peer: Recorded) -> None:
        """Leave it for a while to the launcher to end the job that another rank has aborted."""
        self._aborted = self._aborted or time.monotonic()
        if time.monotonic() - self._aborted > DYING:
            self.end(f"rank {rank} on {peer.host} ended ({peer.cause})")

    def _look_far(self, call: Call) -> None:
        """Ask the other hosts, the longer the wait the less often; one rank of each host does."""
        now = time.monotonic()
        asked, pause = self._asked.get((call.uid, call.sequence), (call.start, FIRST_QUESTION))
        if self.control is None or now - asked < pause or call.uid not in self._members:
            return
        self._asked = {key: value for key, value in self._asked.items() if value[0] > now - 2 * LAST_PAUSE}
        self._asked[call.uid, call.sequence] = now, min(2 * pause, LAST_PAUSE)
        before = [rank for rank in self._here if rank < self.own.rank and rank in self._ranks(call.uid)]
        if any(self._waits_too(rank, call) for rank in before):
            return
        for one in self.control.ask(self._members[call.uid], call, stacks=False):
            if one.gone:
                self.end(f"rank {one.rank} {one.text}; {self._waits(call)}")

    def _waits_too(self, rank: int, call: Call) -> bool:
        peer = self._peer(rank)
        its = None if peer is None else peer.call(call.uid, call.sequence)
        return its is not None and its.state == UNDER_WAY

    def _waits(self, call: Call) -> str:
        return f"rank {self.own.rank} waits for it in {call.title} since {time.monotonic() - call.start:.1f} s"

    def report(self, number: int) -> str:
        """Return where the other ranks are, seen from one of this process's calls, several lines; "" if unknown."""
        call = self.own.numbered(number)
        if call is None or call.uid not in self._members:
            return ""
        heading = f"where the other ranks are, seen from {call.title}, {call.what}, on {call.place}:\n"
        return heading + grouped(self._standings(self._members[call.uid], call))

    def roll(self, uid: int) -> str:
        """Return where the other ranks of a communicator are, seen from no call of it, several lines; "" if unknown."""
        if uid not in self._members:
            return ""
        return "where the other ranks are:\n" + grouped(self._standings(self._members[uid], None))

    def _standings(self, members: tuple[Member, ...], call: Call | None) -> list[Standing]:
        """Return where the other ranks of a communicator are, with their stacks."""
        standings = self.answer([member.rank for member in members if member.rank != self.own.rank], call, ask=True)
        if self.control is not None:
            standings += self.control.ask(members, call, stacks=True)
        told = {one.rank for one in standings} | {self.own.rank}
        missing = [member for member in members if member.rank not in told]
        return standings + [Standing(one.rank, gone=False, text=f"on {one.host} does not answer") for one in missing]

    def answer(self, ranks: list[int], call: Call | None, *, ask: bool) -> list[Standing]:
        """Return where some ranks are, those of this host, seen from a call of a rank of any host.

        Args:
            ranks: in the job.
            call: as of `standing`.
            ask: whether ranks in code of their own are asked for their stacks.
        """
        end = time.monotonic() + FOR_STACKS
        return [
            standing(rank, self._peer(rank), call, ask=ask and time.monotonic() < end)
            for rank in ranks
            if rank in self._here or rank == self.own.rank
        ]

    def _ranks(self, uid: int) -> list[int]:
        return [member.rank for member in self._members.get(uid, ())]

    def _peer(self, rank: int) -> Recorded | None:
        """Return the record of a rank of this host; None where it cannot be read."""
        if rank == self.own.rank:
            return self.own
        if rank not in self._read:
            try:
                self._read[rank] = Recorded(self._here[rank])
            except (OSError, ArgumentError):
                self._read[rank] = None
        return self._read[rank]

    def end(self, text: str) -> None:
        """End the job; of several ranks of a host that find the same, the first says why."""
        time.sleep(TURN * min(sum(rank < self.own.rank for rank in self._here), 20))
        said = self.has_been_told()
        self.mine.conclude(STOPPED, text)
        if not said:
            os.write(2, f"mpizero: {text}; ending the job\n".encode(errors="replace"))
        abort(1)

    def has_been_told(self) -> bool:
        """Return whether another rank of this host has said why the job ends."""
        return any((peer := self._peer(rank)) is not None and peer.state in {DIED, STOPPED} for rank in self._here)

    def leave(self, cause: str = "it exits") -> None:
        """Say that this rank exits, and wait until all have come to that or the job is ended; see [Note: gone].

        With `MPIZERO_ABORT=0` it waits for nobody, and who starts next removes its record.
        """
        if os.getpid() != self.mine.pid or mpi().Is_finalized():
            return
        self.mine.conclude(LEFT, cause)
        waits = settings().abort and self.own.state == LEFT  # else it raised, or was ended
        world = mpi().COMM_WORLD
        nap = NAPS[0]
        while waits and self._some_are_left():
            world.Iprobe()  # messages that others still wait for move while this rank is in MPI
            time.sleep(nap)
            nap = min(2 * nap, NAPS[1])
        if self.control is not None:
            self.control.close()
        if waits:
            self.mine.remove()

    def leave_at_exit(self) -> None:
        """Have `leave` called when the interpreter exits, or before that when MPI is finalized, or at `os._exit`."""
        atexit.register(self.leave)
        module = mpi()
        key = module.Comm.Create_keyval(delete_fn=lambda *_: self.leave("MPI_Finalize"))
        module.COMM_SELF.Set_attr(key, self)
        if settings().abort:
            exit_at_once = os._exit

            def leave_and_exit(status: int) -> NoReturn:
                self.leave(f"os._exit({status})")
                exit_at_once(status)

            os._exit = leave_and_exit

    def _some_are_left(self) -> bool:
        """Return whether some rank of the job has not come to its end; end the job where one has died."""
        for rank in self._here:
            peer = self._peer(rank)
            if peer is None or peer.state == LEFT:
                continue
            if peer.is_lost():
                self.end(f"rank {rank} on {peer.host} {died(peer)}, and did not come to its end")
            if peer.state in {DIED, STOPPED}:
                self._await_end(rank, peer)
            if peer.state != LEFT:
                return True
        return self.control is not None and not self.control.all_have_left()


@cache
def watch() -> Watch | None:
    """Return what looks after the other ranks, made at the first call; None where no records are kept. Starts MPI."""
    mine = record()
    if mine is None:
        return None
    made = Watch(mine)
    answer_for(mine)
    made.leave_at_exit()
    return made


def _made() -> Watch | None:
    """Return what looks after the other ranks, if it has been made."""
    return watch() if watch.cache_info().currsize else None


def look_around(missing: Callable[[], str] | None = None, uid: int = 0, needs: Sequence[int] = ()) -> None:
    """Look at the peers once, from a wait that has lasted; see [Note: gone].

    Args:
        missing: says what is waited for outside any call.
        uid: of the communicator of those that it needs.
        needs: ranks of that communicator.
    """
    found = _made()
    if found is not None and settings().abort:
        found.look()
        if missing is not None and needs:
            found.miss(uid, needs, missing())


def has_been_told() -> bool:
    """Return whether another rank of this host has said why the job ends."""
    found = _made()
    return found is not None and found.has_been_told()


def story(uid: int = 0) -> str:
    """Return where the other ranks are, seen from all that this process waits in; "" where nothing is known.

    Args:
        uid: of the communicator whose ranks are of interest where the process is in no call.
    """
    found = _made()
    if found is None:
        return ""
    if uid:
        return found.roll(uid)
    return "\n".join(filter(None, (found.report(call.number) for call in found.own.under_way())))
