"""Communicators: who the ranks are, where they run, and the wires between them."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.comm.abort import abort, install_abort_hooks
from mpizero.comm.board import make_board
from mpizero.comm.describe import machine
from mpizero.comm.door import Door
from mpizero.comm.forks import Gone, refuse_in_child, tell_in_child
from mpizero.comm.health import Health
from mpizero.comm.heap import Heap
from mpizero.comm.launch import mixed_launch_message, under_launcher
from mpizero.comm.leaks import user_line, warn_of_leak
from mpizero.comm.messages import MessageTransport
from mpizero.comm.native import NativeCollectives
from mpizero.comm.pingpong import measure_links
from mpizero.comm.progress import NAP, Queue, Work
from mpizero.comm.raw import mpi
from mpizero.comm.segment import PAGE, share
from mpizero.comm.side import DeviceSide
from mpizero.comm.standing import Member
from mpizero.comm.strict import Strict
from mpizero.comm.waiting import drive, poll, spins_for
from mpizero.comm.watch import has_been_told, watch
from mpizero.errors import ArgumentTypeError, CollectiveTimeoutError, LaunchError, must_be
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized
    from contextlib import AbstractContextManager

    from mpizero.arrays import Device
    from mpizero.comm.about import About
    from mpizero.comm.stats import Stats
    from mpizero.typing import Bytes, Wait

__all__ = ["Communicator", "world"]

LARGE = 1 << 20
SLOW = 3e9
"""Bytes per second below which a link is taken to be TCP; InfiniBand and its like are above."""


class Communicator:
    """Be a group of ranks with a wire of its own.

    Its traffic cannot meet the caller's: the constructor duplicates the given communicator, and is therefore collective
    over it. Making one costs an `MPI_Comm_dup`, an `MPI_Comm_split_type` and a gather of host names, and once more so
    much for the `node` where the ranks are on several hosts. One that is dropped without `close` is a leak, of which a
    ResourceWarning says where it was made; at the end of the job none needs to be closed.
    """

    driven_by_caller = False
    """Whether asynchronous collectives move only in `progress` and `Work.wait`; see `let_caller_drive`."""
    _made_at = ""
    """The user's line; "" while it is not made, and where another communicator closes it."""

    def __init__(self, mpi_comm: Any = None, *, timeout: float | None = None, strict: bool | None = None) -> None:
        """Duplicate `mpi_comm`.

        Args:
            mpi_comm: an mpi4py intracommunicator; None means `MPI.COMM_WORLD`.
            timeout: seconds after which a wait raises `CollectiveTimeoutError`; None takes `MPIZERO_TIMEOUT`, or 600.
            strict: whether every collective is compared over its ranks before it begins; None takes `MPIZERO_STRICT`.

        Raises:
            MpiNotFoundError: where no MPI library can be loaded; the text says how to get one.
            LaunchError: where the launcher of one MPI started processes that load another, each alone in its world.
            ArgumentTypeError: where `mpi_comm` is not an mpi4py intracommunicator.
        """
        module = mpi()
        mpi_comm = module.COMM_WORLD if mpi_comm is None else mpi_comm
        if not isinstance(mpi_comm, module.Comm) or mpi_comm == module.COMM_NULL or mpi_comm.Is_inter():
            got = type(mpi_comm).__name__
            raise ArgumentTypeError(must_be("mpi_comm", "an mpi4py intracommunicator", got, "pass MPI.COMM_WORLD"))
        _check_launch(module)
        self._comm = mpi_comm.Dup()
        self.health = Health()
        self.transport = MessageTransport(self._comm, settings().timeout if timeout is None else timeout, self.health)
        self._native = NativeCollectives(self._comm, self.transport.timeout, self.health)
        self.rank: int = self.transport.rank
        self.size: int = self.transport.size
        self.stats: Stats = self.transport.stats
        self._scratch = np.empty(0, np.uint8)
        self._queue = self._make_queue()
        self.under_way: Sized = self._queue.jobs
        """The collectives in the background that are not over."""
        self._in_background = module.Query_thread() == module.THREAD_MULTIPLE
        self.slow_peers: list[int] = []
        """The ranks beyond slow links, to which messages are cut small."""
        self.notes: dict[Any, Any] = {}
        """What the floors above remember of this communicator."""
        self._watch = watch() if self.size > 1 else None
        who = self._who(module)
        self.hosts: tuple[str, ...] = tuple(host for host, *_ in who)
        self.node = self._find_node(module)
        """The communicator of the ranks that share this rank's memory: itself where all do."""
        self.nodes: tuple[int, ...] = self._number_nodes()
        """The number of each rank's node, in the order of the nodes' lowest ranks."""
        self.uid = self._introduce(who)
        """The communicator's number, the same on all its ranks and another's nowhere."""
        shares = self.node is self and self.size > 1 and settings().loads
        self.board = make_board(self._comm, self.transport.timeout, self.health) if shares else None
        """The memory through which all ranks meet; None where they are on several hosts or can share none."""
        self._door = door = Door(self.uid, self.transport.voice, self.health, self._queue, self._watch)
        # For whoever calls a collective, where a microsecond counts; see `Door`.
        self.enter, self.leave, self.give_up, self.exclusive = door.enter, door.leave, door.give_up, door.exclusive
        self.compare(on=settings().strict if strict is None else strict)
        self._heap: Heap | None = None
        self._sides: dict[int, DeviceSide] = {}
        self._adopted: list[Communicator] = []
        if self.node is not self:
            self.adopt(self.node)
        self._made_at = user_line()
        tell_in_child(self)
        if self.size > 1 and settings().abort:
            install_abort_hooks(has_been_told)

    def _who(self, module: Any) -> list[tuple[str, int, str]]:
        """Return all ranks' hosts, ranks in the job, and records ("" for none). Collective."""
        path = "" if self._watch is None else str(self._watch.mine.path)
        mine = (socket.gethostname(), module.COMM_WORLD.rank, path)
        rows: list[tuple[str, int, str]] = self._comm.allgather(mine)
        return rows

    def _introduce(self, who: list[tuple[str, int, str]]) -> int:
        """Agree on a number for the communicator, take over what rank 0 knows, and be watched. Collective."""
        made: tuple[int, dict[str, Any]]
        made = self._comm.bcast((1 + secrets.randbits(62), self._site_notes()) if self.rank == 0 else None)
        uid, notes = made
        self.remember(notes)
        if self._watch is not None:
            self._watch.enlist(uid, tuple(map(Member, *zip(*who, strict=True), self.nodes)), self.rank)
        return uid

    def _find_node(self, module: Any) -> Communicator:
        split = self._comm.Split_type(module.COMM_TYPE_SHARED)
        try:
            alone = split.size == self.size
            return self if alone else Communicator(split, timeout=self.transport.timeout, strict=False)
        finally:
            split.Free()

    def remember(self, notes: dict[str, Any]) -> None:
        """Add to `notes`, the same on all ranks; with measured links, adapt the messages to them."""
        self.notes.update(notes)
        remote = self.notes.get("links", {}).get("remote", ())
        if any(nbytes >= LARGE and nbytes / seconds < SLOW for nbytes, seconds in remote):
            mine = self.nodes[self.rank]
            self._queue.slow = True
            self.slow_peers = [peer for peer in range(self.size) if self.nodes[peer] != mine]
            self.transport.cut_small(self.slow_peers)

    def _site_notes(self) -> dict[str, Any]:
        """Return what rank 0 knows of the site: the text of a tuning table, and measured links."""
        path = settings().tuning
        notes: dict[str, Any] = {}
        with suppress(OSError):
            if path is not None:
                notes["tuning"] = path.read_text()
                notes["machine"] = machine()
        if _world.cache_info().currsize and "links" in _world().notes:
            notes["links"] = _world().notes["links"]
        return notes

    def _number_nodes(self) -> tuple[int, ...]:
        """Return each rank's node; not by host names, which containers may share or change."""
        if self.node is self:
            return (0,) * self.size
        leaders = self._comm.allgather(self.node.mpi.bcast(self.rank))
        numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
        return tuple(numbers[leader] for leader in leaders)

    @cached_property
    def private(self) -> Communicator:
        """Return a communicator over the same ranks for mpizero's own use, whose traffic cannot meet this one's.

        The first use is collective; it is the same one each time, since an MPI has only some 2,000 to give.
        """
        self._settle()
        made = Communicator(self._comm, timeout=self.transport.timeout, strict=self.strict is not None)
        self.adopt(made)
        return made

    def adopt(self, other: Communicator) -> None:
        """Have `other` closed with this one."""
        other._made_at = ""
        self._adopted.append(other)

    @property
    def channel_number(self) -> int:
        """Return the channel that this thread uses, from 1; 0 outside any."""
        return self.transport.voice.channel

    @property
    def native(self) -> NativeCollectives | None:
        """Return the MPI library's own collectives; None inside a channel."""
        return None if self.channel_number else self._native

    @property
    def heap(self) -> Heap:
        """Return what gives symmetric buffers to the ranks of this host."""
        if self._door.in_child:
            refuse_in_child("a symmetric buffer")
        if self.node is not self:
            return self.node.heap
        if self._heap is None:
            self._heap = Heap(self._comm, meet=partial(self._meet, "a symmetric buffer"))
        return self._heap

    @property
    def mpi(self) -> Any:
        """Return the mpi4py communicator underneath, for a program's own small messages."""
        return self._comm

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` bytes that are kept from call to call; the next call may hand out the same ones."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(0, np.uint8)  # let the old block go before the new one comes
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._door.closed

    @property
    def strict(self) -> Strict | None:
        """Return what compares the ranks' calls; None where nothing does."""
        return self._door.strict

    def compare(self, *, on: bool = True) -> None:
        """Have every collective compared over its ranks before it begins, or no more; collective. See `strict`."""
        door = self._door
        if self.size == 1 or on == (door.strict is not None):
            return
        if door.strict is not None:
            door.strict.close()
            door.strict = None
            return
        shares = self.board is not None
        door.strict = Strict(self._comm, timeout=settings().strict_timeout, health=self.health, shares=shares)

    def perform(self, what: str | About, steps: Iterator[Wait]) -> None:
        """Run a collective's steps to their end, behind those that are under way.

        Raises:
            CollectiveError: as of `exclusive`.
        """
        if self.under_way:
            self.submit(what, steps, None).wait()
            return
        with self.exclusive(what):
            drive(steps)

    def submit(
        self, what: str | About, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None = None
    ) -> Work:
        """Run a collective's steps in the background, behind those that are under way.

        Where MPI does not grant `MPI_THREAD_MULTIPLE`, and the caller does not drive them, they are run at once
        instead.

        Args:
            what: the collective, for errors and the record.
            steps: see [Note: steps] in `waiting`.
            result: what the work's `wait` returns.
            then: called by `wait`, in the thread that waits, before it returns.

        Raises:
            CollectiveError: as of `exclusive`.
        """
        if not (self._in_background or self.driven_by_caller):
            with self.exclusive(what):
                drive(steps)
            return Work.finished(result, then)
        work = self._work(self.transport.voice.carry(steps), result, then)

        def add(number: int) -> None:
            work.told = partial(self._door.finished, number)
            self._queue.add(work)

        self._door.issue(what, add)
        return work

    def _make_queue(self) -> Queue:
        return Queue()

    def _work(self, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None) -> Work:
        return Work(steps, result, self._queue if self.driven_by_caller else None, then)

    def let_caller_drive(self, *, on: bool = True) -> None:
        """Have asynchronous collectives move only in `progress` and `Work.wait`, or, with False, in the background.

        See [Note: driven by the caller] in `progress`. For all ranks alike; a change waits for what is under way.
        """
        if on != self.driven_by_caller:
            self._settle()
            self.driven_by_caller = on

    def _settle(self) -> None:
        """Wait for what is under way: MPI pairs its own collectives by the order of their calls, whoever makes them."""
        if self._door.in_child:
            refuse_in_child("a communicator")
        while self.under_way:
            if self.driven_by_caller:
                self._queue.run_to(self._queue.jobs[-1])
            else:
                time.sleep(NAP)

    def _meet(self, what: str) -> None:
        """Wait for all ranks ahead of what MPI does blocking: nobody looks after a rank that waits in there.

        Raises:
            CollectiveTimeoutError: if they do not come.
        """
        if self.size == 1:
            return
        others = [rank for rank in range(self.size) if rank != self.rank]

        def missing() -> str:
            return f"rank {self.rank} of {self.size} waits for all ranks to come to {what}"

        done, needs = self._comm.Ibarrier().Test, (self.uid, lambda: others)
        if not poll(done, self.transport.timeout, missing, spins=spins_for(self.size), needs=needs):
            self.health.sound = False
            where = "" if self._watch is None else self._watch.roll(self.uid)
            raise CollectiveTimeoutError(f"{missing()} since {self.transport.timeout:g} s\n{where}".strip())

    def progress(self) -> None:
        """Advance what is under way without blocking, where the caller drives it; else nothing is to be done."""
        if self.driven_by_caller and self.under_way:
            self._queue.progress()

    def channel(self, number: int, label: str) -> AbstractContextManager[None]:
        """Mark the messages sent inside as belonging to one thing, say a unit of a model.

        Messages of different channels never meet: ranks that speak of different things wait, and the time-out's text
        has the `label`, instead of taking each other's bytes. The MPI library's own collectives know no channels and
        are not used inside.

        Args:
            number: from 0, the same on all ranks; MPI has room for `CHANNELS` of them, beyond that they are shared.
            label: what the messages are about, for errors.
        """
        return self.transport.voice.speak(number + 1, label)

    def split(self, color: int, key: int = 0) -> Communicator:
        """Return the communicator of the ranks that give the same `color`, in the order of `key` and rank. Collective.

        Args:
            color: a number of 0 or more.
            key: the wanted order; equal keys keep the order of this communicator's ranks.
        """
        self._settle()
        self._meet("a split")
        part = self._comm.Split(color, key)
        try:
            return Communicator(part, timeout=self.transport.timeout, strict=self.strict is not None)
        finally:
            part.Free()

    def window(self, nbytes: int) -> Bytes | None:
        """Return zeroed memory that all ranks share as one; None, on all of them, where there is none. Collective.

        It is given back when its last array is dropped on every rank.

        Args:
            nbytes: bytes in all, the same on all ranks.
        """
        if self.board is None:
            return None
        self._settle()
        self._meet("a window")
        made = share(self._comm, max(1, -(-nbytes // (PAGE * self.size))) * PAGE)
        return None if made is None else made.bytes[:nbytes]

    def has_side(self, device: Device) -> bool:
        """Return whether `side` has been made for a device."""
        return device.number in self._sides

    def side(self, device: Device) -> DeviceSide:
        """Return what this communicator keeps on a device; the first call for each is collective."""
        if device.number not in self._sides:
            self._sides[device.number] = DeviceSide(self, device)
        return self._sides[device.number]

    def watch_hosts(self) -> None:
        """Have the ranks of different hosts tell each other where they are, if all keep records. Collective.

        For a communicator over all ranks of the job, in the job's order, whose MPI grants MPI_THREAD_MULTIPLE.
        """
        if self._watch is not None and self._in_background:
            self._watch.link(self.uid, self._comm)

    def abort(self, code: int = 1) -> None:
        """End every rank of the job at once with the exit code `code`."""
        abort(code)

    def leave_behind(self) -> None:
        """Refuse everything from now on, this process being a forked child; the parent's communicator is unharmed."""
        self._door.leave_behind()
        self._comm = Gone()

    def close(self) -> None:
        """Free the MPI communicators; collective over the ranks.

        Closes `node`, `private` and what else it has adopted too. Closing twice does nothing.
        """
        if self._door.closed or self._door.in_child:
            return
        self._door.closed = True
        try:
            for side in self._sides.values():
                side.close()
        finally:
            self.health.sound = False
        self._sides.clear()
        if self._heap is not None:
            self._heap.close()
        self.board = None
        if self.strict is not None:
            self.strict.close()
        if self._watch is not None:
            self._watch.dismiss(self.uid)
        for other in self._adopted:
            other.close()
        self._comm.Free()

    def __del__(self) -> None:
        """Warn of a leak; one that an error has left half-way cannot be closed in order, and is none."""
        if self._made_at and not self.closed and self.health.sound:
            warn_of_leak(self._made_at, self)

    def __repr__(self) -> str:
        """Return rank, size and the number of hosts."""
        return f"Communicator(rank={self.rank}, size={self.size}, hosts={len(set(self.hosts))})"


def world(*, strict: bool | None = None) -> Communicator:
    """Return the communicator over all ranks of the job; the first call starts MPI and is collective.

    Where the ranks are on several hosts it times a few messages, for the choice of algorithms.

    Args:
        strict: whether every collective is compared over its ranks before it begins; None leaves it as it is, at first
            as `MPIZERO_STRICT` says. A change is collective; communicators that were split off before keep theirs.

    Raises:
        MpiNotFoundError, LaunchError: see `Communicator`.
    """
    comm = _world()
    if strict is not None:
        comm.compare(on=strict)
    return comm


@cache
def _world() -> Communicator:
    comm = Communicator()
    comm.watch_hosts()
    if len(set(comm.nodes)) > 1:
        comm.remember({"links": measure_links(comm.mpi, comm.nodes)})
    return comm


def _check_launch(module: Any) -> None:
    """Refuse a job whose launcher says n ranks while MPI says 1 (case K18): each would train alone."""
    claimed = under_launcher()
    if module.COMM_WORLD.size == 1 and claimed is not None and claimed > 1:
        raise LaunchError(mixed_launch_message(claimed, module.Get_library_version()))
