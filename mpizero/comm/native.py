"""The MPI library's own collectives on views, as one more algorithm to choose.

Every call is MPI's non-blocking one, polled: so it serves signals and times out like our own schedules, and a rank that
waits gives its core away. That costs about a microsecond a call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.comm.raw import mpi
from mpizero.comm.waiting import poll
from mpizero.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpizero.arrays import View

__all__ = ["NativeCollectives"]

_OPS = {"sum": "SUM", "mean": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}


class NativeCollectives:
    """Call MPI's own collectives; data movement travels as bytes, reductions as MPI's datatypes."""

    def __init__(self, mpi_comm: Any, timeout: float) -> None:
        """Use `mpi_comm`, an mpi4py intracommunicator of mpizero's own; a wait ends with an error after `timeout` s."""
        self._comm = mpi_comm
        self._mpi = mpi()
        self._timeout = timeout
        self._abandoned: list[Any] = []

    @property
    def broken(self) -> bool:
        """Return whether a call was given up; its request is kept, since MPI may still write into its buffers."""
        return bool(self._abandoned)

    def barrier(self) -> None:
        """Call MPI_Ibarrier."""
        self._finish("barrier", self._comm.Ibarrier())

    def broadcast(self, x: View, root: int) -> None:
        """Call MPI_Ibcast on the bytes of `x`."""
        self._finish("broadcast", self._comm.Ibcast(self._as_bytes(x), root))

    def all_gather(self, x: View, out: View, offsets: list[int]) -> None:
        """Call MPI_Iallgatherv; rank r's elements go to [offsets[r], offsets[r + 1]) of `out`."""
        width = x.dtype.itemsize
        counts = [(stop - start) * width for start, stop in pairwise(offsets)]
        starts = [start * width for start in offsets[:-1]]
        target = [out.data.view("uint8"), counts, starts, self._mpi.BYTE]
        self._finish("all_gather", self._comm.Iallgatherv(self._as_bytes(_apart(x, out)), target))

    def all_reduce(self, x: View, out: View, op: str) -> None:
        """Call MPI_Iallreduce, in place where `x` is `out`."""
        source = self._mpi.IN_PLACE if x.data is out.data else x.data
        self._finish("all_reduce", self._comm.Iallreduce(source, out.data, self._op(op)))

    def reduce(self, x: View, out: View | None, op: str, root: int) -> None:
        """Call MPI_Ireduce; `out` is the root's, and may be `x`."""
        if out is None:
            self._finish("reduce", self._comm.Ireduce(x.data, None, self._op(op), root))
            return
        source = self._mpi.IN_PLACE if out.data is x.data else x.data
        self._finish("reduce", self._comm.Ireduce(source, out.data, self._op(op), root))

    def reduce_scatter(self, x: View, out: View, offsets: list[int], op: str) -> None:
        """Call MPI_Ireduce_scatter; rank r gets elements [offsets[r], offsets[r + 1])."""
        counts = [stop - start for start, stop in pairwise(offsets)]
        source = _apart(x, out).data
        self._finish("reduce_scatter", self._comm.Ireduce_scatter(source, out.data, counts, self._op(op)))

    def _finish(self, what: str, request: Any) -> None:
        finished = False
        try:
            finished = poll(
                request.Test, self._timeout, lambda: f"{what} (native): rank {self._comm.rank} waits for its peers"
            )
        finally:
            if not finished:
                self._abandoned.append(request)
        if not finished:
            raise CollectiveTimeoutError(
                f"{what} (native): rank {self._comm.rank} of {self._comm.size} waited {self._timeout:g} s for its "
                "peers. Either some are slower than the time-out (MPIZERO_TIMEOUT, seconds) or they never made this "
                "call: every rank must make the same collective calls in the same order"
            )

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, _OPS[op])

    def _as_bytes(self, x: View) -> list[Any]:
        return [x.data.view("uint8"), self._mpi.BYTE]


def _apart(x: View, out: View) -> View:
    """Return `x`, or a copy where it shares memory with `out`, which MPI forbids for two buffers of one call.

    MPICH compares the addresses alone, and so refuses an empty chunk at the start of `x` too.
    """
    alike = x.data.ctypes.data == out.data.ctypes.data or np.may_share_memory(x.data, out.data)
    return type(x)(x.data.copy(), x.dtype) if alike else x
