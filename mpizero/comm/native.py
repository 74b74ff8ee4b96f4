"""The MPI library's own collectives on views, as one more algorithm to choose.

Every call is MPI's non-blocking one, polled: so it serves signals and times out like our own schedules, and a rank that
waits gives its core away. That costs about a microsecond a call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.comm.messages import UNLIKE
from mpizero.comm.raw import mpi
from mpizero.comm.waiting import ADVICE, poll, spins_for
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.arrays import View
    from mpizero.comm.health import Health

__all__ = ["NativeCollectives"]

_OPS = {"sum": "SUM", "mean": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}


class NativeCollectives:
    """Call MPI's own collectives; data movement travels as bytes, reductions as MPI's datatypes."""

    def __init__(self, mpi_comm: Any, timeout: float, health: Health) -> None:
        """Use `mpi_comm`, an mpi4py intracommunicator of mpizero's own; a wait ends with an error after `timeout` s."""
        self._comm = mpi_comm
        self.health = health
        self._mpi = mpi()
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.timeout = timeout
        self.spins = spins_for(mpi_comm.size)
        self._abandoned: list[Any] = []

    def abandon(self, request: Any) -> None:
        """Keep a request that nobody waits for any more, since MPI may still write into its buffers."""
        self.health.sound = False
        self._abandoned.append(request)

    def barrier(self) -> _Request:
        """Call MPI_Ibarrier."""
        return self._wait("barrier", self._comm.Ibarrier())

    def broadcast(self, x: View, root: int) -> _Request:
        """Call MPI_Ibcast on the bytes of `x`."""
        return self._wait("broadcast", self._comm.Ibcast(self._as_bytes(x), root), x)

    def all_gather(self, x: View, out: View, offsets: list[int]) -> _Request:
        """Call MPI_Iallgatherv; rank r's elements go to [offsets[r], offsets[r + 1]) of `out`."""
        source, target = self._as_bytes(_apart(x, out)), self._parts(out, offsets)
        return self._wait("all_gather", self._comm.Iallgatherv(source, target), source, target)

    def all_reduce(self, x: View, out: View, op: str) -> _Request:
        """Call MPI_Iallreduce, in place where `x` is `out`."""
        source = self._mpi.IN_PLACE if x.data is out.data else x.data
        return self._wait("all_reduce", self._comm.Iallreduce(source, out.data, self._op(op)), x, out)

    def reduce(self, x: View, out: View | None, op: str, root: int) -> _Request:
        """Call MPI_Ireduce; `out` is the root's, and may be `x`."""
        if out is None:
            return self._wait("reduce", self._comm.Ireduce(x.data, None, self._op(op), root), x)
        source = self._mpi.IN_PLACE if out.data is x.data else x.data
        return self._wait("reduce", self._comm.Ireduce(source, out.data, self._op(op), root), x, out)

    def reduce_scatter(self, x: View, out: View, offsets: list[int], op: str) -> _Request:
        """Call MPI_Ireduce_scatter; rank r gets elements [offsets[r], offsets[r + 1])."""
        counts = [stop - start for start, stop in pairwise(offsets)]
        source = _apart(x, out).data
        request = self._comm.Ireduce_scatter(source, out.data, counts, self._op(op))
        return self._wait("reduce_scatter", request, source, out)

    def gather(self, x: View, out: View | None, offsets: list[int], root: int) -> _Request:
        """Call MPI_Igatherv; rank r's elements go to [offsets[r], offsets[r + 1]) of the root's `out`."""
        target = None if out is None else self._parts(out, offsets)
        source = self._as_bytes(x if out is None else _apart(x, out))
        return self._wait("gather", self._comm.Igatherv(source, target, root), source, target)

    def scatter(self, x: View | None, out: View, offsets: list[int], root: int) -> _Request:
        """Call MPI_Iscatterv; rank r gets elements [offsets[r], offsets[r + 1]) of the root's `x`."""
        source = None if x is None else self._parts(_apart(x, out), offsets)
        return self._wait("scatter", self._comm.Iscatterv(source, self._as_bytes(out), root), source, out)

    def all_to_all(self, x: View, out: View, leaving: list[int], arriving: list[int]) -> _Request:
        """Call MPI_Ialltoallv; both lists are element offsets by peer."""
        source, target = self._parts(_apart(x, out), leaving), self._parts(out, arriving)
        return self._wait("all_to_all", self._comm.Ialltoallv(source, target), source, target)

    def _parts(self, x: View, offsets: list[int]) -> list[Any]:
        """Return `x` as bytes in parts, one per rank."""
        width = x.dtype.itemsize
        counts = [(stop - start) * width for start, stop in pairwise(offsets)]
        return [x.data.view("uint8"), counts, [start * width for start in offsets[:-1]], self._mpi.BYTE]

    def _wait(self, what: str, request: Any, *buffers: object) -> _Request:
        return _Request(self, request, f"{what} (native)", buffers)

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, _OPS[op])

    def _as_bytes(self, x: View) -> list[Any]:
        return [x.data.view("uint8"), self._mpi.BYTE]


class _Request:
    """Wait for one of MPI's own collectives."""

    def __init__(self, native: NativeCollectives, request: Any, what: str, buffers: tuple[object, ...]) -> None:
        self.native, self.request, self.what = native, request, what
        self.buffers = buffers
        """What MPI works on until the request is done: mpi4py does not keep all of it."""

    def done(self) -> bool:
        """Return whether it is over.

        Raises:
            CollectiveError: where MPI notices that another rank passes something else, which it need not.
        """
        try:
            return bool(self.request.Test())
        except mpi().Exception as error:
            self.native.abandon((self.request, self.buffers))
            raise CollectiveError(f"{self._here()} failed in the MPI library ({error}). {UNLIKE}") from error

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once it is over, False after the time-out."""
        native = self.native
        return poll(
            done or self.done, native.timeout, lambda: f"{self._here()} waits for its peers", spins=native.spins
        )

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return seconds > self.native.timeout

    def settle(self, seconds: float, *, finished: bool) -> None:  # noqa: ARG002  (what MPI does inside is not counted)
        """Give the request up if the wait was."""
        if not finished:
            self.native.abandon((self.request, self.buffers))

    def count(self, seconds: float) -> None:
        """Do nothing: what MPI does inside is not counted."""

    def late(self) -> CollectiveTimeoutError:
        """Say what a time-out means."""
        return CollectiveTimeoutError(f"{self._here()} waited {self.native.timeout:g} s for its peers. {ADVICE}")

    def _here(self) -> str:
        return f"{self.what}: rank {self.native.rank} of {self.native.size}"


def _apart(x: View, out: View) -> View:
    """Return `x`, or a copy where it shares memory with `out`, which MPI forbids for two buffers of one call.

    MPICH compares the addresses alone, and so refuses an empty chunk at the start of `x` too.
    """
    alike = x.data.ctypes.data == out.data.ctypes.data or np.may_share_memory(x.data, out.data)
    return type(x)(x.data.copy(), x.dtype) if alike else x
