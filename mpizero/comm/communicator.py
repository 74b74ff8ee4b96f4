"""Communicators: who the ranks are, where they run, and the wires between them."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.comm.abort import abort, install_abort_hooks
from mpizero.comm.launch import mixed_launch_message, under_launcher
from mpizero.comm.messages import MessageTransport
from mpizero.comm.native import NativeCollectives
from mpizero.comm.raw import mpi
from mpizero.errors import ArgumentTypeError, CollectiveError, LaunchError, must_be
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.comm.stats import Stats
    from mpizero.typing import Bytes

__all__ = ["Communicator", "world"]


class Communicator:
    """Be a group of ranks with a wire of its own.

    Its traffic cannot meet the caller's: the constructor duplicates the given communicator, and is therefore collective
    over it. Making one costs an `MPI_Comm_dup`, an `MPI_Comm_split_type` and a gather of host names, and once more so
    much for the `node` where the ranks are on several hosts.
    """

    def __init__(self, mpi_comm: Any = None, *, timeout: float | None = None) -> None:
        """Duplicate `mpi_comm`.

        Args:
            mpi_comm: an mpi4py intracommunicator; None means `MPI.COMM_WORLD`.
            timeout: seconds after which a wait raises `CollectiveTimeoutError`; None takes `MPIZERO_TIMEOUT`, or 600.

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
        self.transport = MessageTransport(self._comm, settings().timeout if timeout is None else timeout)
        self._native = NativeCollectives(self._comm, self.transport.timeout)
        self._in_channel = False
        self.rank: int = self.transport.rank
        self.size: int = self.transport.size
        self.stats: Stats = self.transport.stats
        self.closed = False
        self._scratch = np.empty(0, np.uint8)
        self._busy = threading.Lock()
        self.hosts: tuple[str, ...] = tuple(self._comm.allgather(socket.gethostname()))
        self.node = self._find_node(module)
        """The communicator of the ranks that share this rank's memory: itself where all do."""
        if self.size > 1 and settings().abort:
            install_abort_hooks()

    def _find_node(self, module: Any) -> Communicator:
        split = self._comm.Split_type(module.COMM_TYPE_SHARED)
        try:
            return self if split.size == self.size else Communicator(split, timeout=self.transport.timeout)
        finally:
            split.Free()

    @cached_property
    def private(self) -> Communicator:
        """Return a communicator over the same ranks for mpizero's own use, whose traffic cannot meet this one's.

        The first use is collective; it is the same one each time, since an MPI has only some 2,000 to give.
        """
        return Communicator(self._comm, timeout=self.transport.timeout)

    @property
    def native(self) -> NativeCollectives | None:
        """Return the MPI library's own collectives; None inside a channel."""
        return None if self._in_channel else self._native

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

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Hold the communicator for one collective.

        Raises:
            CollectiveError: if another thread is in a collective on it (two threads on one communicator could pair
                their messages differently on different ranks, so this is never queued), if it was closed, or if an
                earlier collective on it was given up half-way.
        """
        if self.closed:
            raise CollectiveError(f"{what}: the communicator must be open (got a closed one): make a new one")
        if not self._busy.acquire(blocking=False):
            raise CollectiveError(
                f"{what}: a communicator must be used by one thread at a time (got a second one, "
                f"{threading.current_thread().name!r}): give each thread its own mpizero.Communicator(...)"
            )
        try:
            if self.transport.broken or self._native.broken:
                raise CollectiveError(
                    f"{what}: the communicator must have finished its earlier collectives (got one that was given up "
                    "by a time-out or a signal): its messages no longer match those of the other ranks, end the job"
                )
            yield
        finally:
            self._busy.release()

    @contextmanager
    def channel(self, number: int, label: str) -> Iterator[None]:
        """Mark the messages sent inside as belonging to one thing, say a unit of a model.

        Messages of different channels never meet: ranks that speak of different things wait, and the time-out's text
        has the `label`, instead of taking each other's bytes. The MPI library's own collectives know no channels and
        are not used inside.

        Args:
            number: from 0, the same on all ranks; MPI has room for `CHANNELS` of them, beyond that they are shared.
            label: what the messages are about, for errors.
        """
        self.transport.speak_of(number, label)
        self._in_channel = True
        try:
            yield
        finally:
            self._in_channel = False
            self.transport.speak_of(None, "")

    def abort(self, code: int = 1) -> None:
        """End every rank of the job at once with the exit code `code`."""
        abort(code)

    def close(self) -> None:
        """Free the MPI communicators; collective over the ranks.

        Closes `node` and `private` too. Closing twice does nothing.
        """
        if self.closed:
            return
        self.closed = True
        self.node.close()
        if "private" in self.__dict__:
            self.private.close()
        self._comm.Free()

    def __repr__(self) -> str:
        """Return rank, size and the number of hosts."""
        return f"Communicator(rank={self.rank}, size={self.size}, hosts={len(set(self.hosts))})"


@cache
def world() -> Communicator:
    """Return the communicator over all ranks of the job; the first call starts MPI and is collective.

    Raises:
        MpiNotFoundError, LaunchError: see `Communicator`.
    """
    return Communicator()


def _check_launch(module: Any) -> None:
    """Refuse a job whose launcher says n ranks while MPI says 1 (case K18): each would train alone."""
    claimed = under_launcher()
    if module.COMM_WORLD.size == 1 and claimed is not None and claimed > 1:
        raise LaunchError(mixed_launch_message(claimed, module.Get_library_version()))
