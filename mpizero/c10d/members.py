"""The communicators of a group: made by its members alone, freed when it is destroyed.

torch makes a group on its members only, and gives them a store, their number, and the ranks in the default group. MPI
makes a communicator of some ranks by `MPI_Comm_create_group`, which only these call; it blocks without a time-out, so
the members first meet in the store, where a missing one is noticed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from mpizero.c10d.lanes import GroupCommunicator
from mpizero.c10d.messages import Link
from mpizero.comm import world
from mpizero.comm.raw import mpi
from mpizero.comm.waiting import poll
from mpizero.errors import ArgumentError, CollectiveTimeoutError, LaunchError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.comm import Communicator

__all__ = ["Members", "Place", "meet"]

TAGS = 1 << 15
"""MPI has tags from 0 to 32767 at least."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Say what torch tells a member of its group."""

    store: Any
    """A `torch.distributed.Store` that the members share with nobody."""
    rank: int
    """Within the group."""
    size: int
    name: str
    """The group's, the same on its members."""
    seconds: float
    """The group's time-out."""


class Members:
    """Hold the communicators of a group."""

    def __init__(self, place: Place, own: Any, ranks: Sequence[int]) -> None:
        """Make them over `own`, an mpi4py communicator that becomes the group's. Collective over its ranks.

        Args:
            place: the group.
            own: the ranks; freed by `close`. None for a group of this rank alone, which shares one communicator with
                others of that kind, since they cannot meet anybody's calls.
            ranks: the members' ranks in MPI's world.
        """
        self.ranks = tuple(ranks)
        self.seconds = place.seconds
        self.comm = _alone() if own is None else GroupCommunicator(own, timeout=place.seconds)
        self._own = own
        self._link: Link | None = None

    @property
    def link(self) -> Link:
        """Return the wire for messages."""
        if self._link is None:
            own = mpi().COMM_SELF.Dup() if self._own is None else self._own
            self._link = Link(own, self.seconds, self.comm.uid)
        return self._link

    def set_timeout(self, seconds: float) -> None:
        """Change the time-out of everything that is started from now on."""
        self.seconds = seconds
        self.link.seconds = seconds
        for comm in {self.comm, self.comm.node}:
            if self._own is not None:
                comm.transport.timeout = seconds
                if comm.native is not None:
                    comm.native.timeout = seconds
                if comm.board is not None:
                    comm.board.timeout = seconds

    def close(self) -> None:
        """Free the communicators, once nothing is under way; what does not end within the time-out is left to MPI."""
        if self._own is None:
            if self._link is not None:
                self._link.close()
            return
        if poll(lambda: not self.comm.under_way, self.seconds, lambda: "the end of a group's collectives"):
            self.comm.close()
            self._own.Free()


@cache
def _alone() -> Communicator:
    """Return the communicator of this rank alone."""
    return GroupCommunicator(mpi().COMM_SELF)


def meet(place: Place, ranks: Sequence[int] | None) -> Members:
    """Make a group's communicators. Collective over its members.

    Args:
        place: the group.
        ranks: the members' ranks in MPI's world; None asks them.

    Raises:
        CollectiveTimeoutError: where members do not come within the time-out.
        LaunchError: where the ranks are not ranks of one MPI job.
        ArgumentError: where two ranks of torch are one rank of MPI.
    """
    everyone = mpi().COMM_WORLD
    if ranks is None and place.size == everyone.size:
        return _all_ranks(place)
    if ranks is None:
        ranks = _ask(place, everyone.rank, everyone.size)
    if place.size == 1:
        return Members(place, None, ranks)
    await_members(place)
    some = everyone.group.Incl(list(ranks))
    try:
        return Members(place, everyone.Create_group(some, zlib.crc32(place.name.encode()) % TAGS), ranks)
    finally:
        some.Free()


def _all_ranks(place: Place) -> Members:
    await_members(place)
    whole = world()
    ranks = [0] * place.size
    told = whole.mpi.allgather(place.rank)
    for at, rank in enumerate(told):
        ranks[rank] = at
    if sorted(told) != list(range(place.size)):
        raise ArgumentError(must_be("ranks", f"0 to {place.size - 1}, each once", told, "set RANK to the launcher's"))
    if place.size == 1:
        return Members(place, None, ranks)
    return Members(place, whole.mpi.Split(0, place.rank), ranks)


def _ask(place: Place, mine: int, most: int) -> list[int]:
    """Return the members' ranks in MPI's world, which each tells the others in the store."""
    if place.size > most:
        rule = f"at most {most}, the ranks of this MPI job"
        remedy = "start all ranks with one mpirun or srun; torchrun starts none of MPI's"
        raise LaunchError(must_be("the number of ranks", rule, place.size, remedy))
    place.store.set(f"mpizero/rank/{place.rank}", str(mine))
    await_members(place)
    ranks = [int(place.store.get(f"mpizero/rank/{rank}")) for rank in range(place.size)]
    if len(set(ranks)) < len(ranks):
        raise LaunchError(must_be("ranks", "ranks of one MPI job, each once", ranks, "start them with one mpirun"))
    return ranks


def await_members(place: Place) -> None:
    """Return when all members have come here.

    Raises:
        CollectiveTimeoutError: names those that do not within the group's time-out.
    """
    store = place.store
    count = store.add("mpizero/met", 1)
    meeting = (count - 1) // place.size
    store.set(f"mpizero/here/{meeting}/{place.rank}", "1")
    if count == (meeting + 1) * place.size:
        store.set(f"mpizero/all/{meeting}", "1")
    try:
        store.wait([f"mpizero/all/{meeting}"], timedelta(seconds=place.seconds))
    except RuntimeError as error:
        here = [rank for rank in range(place.size) if store.check([f"mpizero/here/{meeting}/{rank}"])]
        missing = ", ".join(str(rank) for rank in range(place.size) if rank not in here)
        text = f"a new group of {place.size} ranks: waited {place.seconds:g} s for rank {missing} of it; every member "
        raise CollectiveTimeoutError(f"{text}must make the same groups in the same order") from error
