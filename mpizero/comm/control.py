"""How ranks of different hosts ask where the others are: by messages on a communicator of their own.

A thread of every rank answers, also while its main thread computes or waits; it looks ten times a second, which costs
some microseconds each time. One rank answers for all of its host, whose records it reads.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from mpizero.comm.raw import mpi
from mpizero.comm.recorded import Call
from mpizero.comm.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.comm.standing import Member

__all__ = ["Control"]

QUESTION, ANSWER = 1, 2
"""Tags."""
NAP = 0.1
"""Seconds between two looks for questions."""
PATIENCE = 2.0
"""Seconds that hosts have to answer."""


class Control:
    """Ask other hosts, and answer them."""

    def __init__(self, mpi_comm: Any, answer: Callable[..., list[Standing]]) -> None:
        """Duplicate the communicator of all ranks of the job, which is collective, and start the thread.

        Args:
            mpi_comm: an mpi4py communicator over all ranks, with their numbers. MPI must grant MPI_THREAD_MULTIPLE.
            answer: gives the standings of this host's ranks, seen from another's call; `ask` as of `standing`.
        """
        self._comm = mpi_comm.Dup()
        self._answer = answer
        self._any = mpi().ANY_SOURCE
        self._asking = threading.Lock()
        self._questions = 0
        self._sent: list[Any] = []
        """Messages under way, whose buffers must be kept."""
        self._sending = threading.Lock()
        self._barrier: Any = None
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="mpizero control", daemon=True)
        self._thread.start()

    def ask(self, members: Sequence[Member], call: Call | None, *, stacks: bool) -> list[Standing]:
        """Return where ranks on other hosts are, as far as these answer in time.

        A host whose first rank does not answer, since it is dead or stopped, is asked once more, by way of its last.

        Args:
            members: the communicator's ranks.
            call: what they are seen from; None for no call.
            stacks: whether ranks in code of their own are asked for their stacks.
        """
        me = self._comm.rank
        here = next((member.node for member in members if member.rank == me), -1)
        hosts: dict[int, list[int]] = {}
        for member in members:
            if member.node != here:
                hosts.setdefault(member.node, []).append(member.rank)
        with self._asking:
            found = self._answers({ranks[0]: node for node, ranks in hosts.items()}, hosts, call, stacks=stacks)
            again = {ranks[-1]: node for node, ranks in hosts.items() if node not in found and len(ranks) > 1}
            found |= self._answers(again, hosts, call, stacks=stacks)
        return [one for rows in found.values() for one in rows]

    def _answers(
        self, speakers: dict[int, int], hosts: dict[int, list[int]], call: Call | None, *, stacks: bool
    ) -> dict[int, list[Standing]]:
        """Ask some ranks, one of each host; return what each host says."""
        self._questions += 1
        for rank, node in speakers.items():
            question = (self._questions, None if call is None else tuple(call), hosts[node], stacks)
            self._send(question, rank, QUESTION)
        found: dict[int, list[Standing]] = {}
        end = time.monotonic() + PATIENCE
        status = mpi().Status()
        while len(found) < len(speakers) and time.monotonic() < end:
            if not self._comm.Iprobe(self._any, ANSWER, status):
                time.sleep(NAP / 10)
                continue
            source = status.Get_source()
            number, rows = self._comm.recv(source=source, tag=ANSWER)
            if number == self._questions:
                found[speakers[source]] = [Standing(*row) for row in rows]
        return found

    def all_have_left(self) -> bool:
        """Return whether every rank has called this; never blocks."""
        if self._barrier is None:
            self._barrier = self._comm.Ibarrier()
        return bool(self._barrier.Test())

    def close(self) -> None:
        """End the thread: MPI, which is finalized after this, must not be called any more."""
        self._open = False
        self._thread.join(10 * NAP)

    def _serve(self) -> None:
        status = mpi().Status()
        while self._open:
            if not self._comm.Iprobe(self._any, QUESTION, status):
                time.sleep(NAP)
                continue
            source = status.Get_source()
            number, call, ranks, stacks = self._comm.recv(source=source, tag=QUESTION)
            found = self._answer(ranks, None if call is None else Call(*call), ask=stacks)
            self._send((number, [tuple(one) for one in found]), source, ANSWER)

    def _send(self, message: Any, rank: int, tag: int) -> None:
        with self._sending:
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent.append(self._comm.isend(message, rank, tag))
