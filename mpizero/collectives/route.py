"""A call of a collective without its arrays: what an algorithm is chosen by, and what a plan is made of."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from mpizero.collectives.agree import Signature, pack, unpack
from mpizero.collectives.buffers import Arithmetic, Layout
from mpizero.collectives.phase import Meeting
from mpizero.collectives.select import Case, choose
from mpizero.comm import About

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.arrays import Device, DType, View
    from mpizero.collectives.registry import Operation
    from mpizero.typing import Bytes, CommunicatorLike, Wait

__all__ = ["Plan", "Route"]

LARGE = 1 << 20
"""Bytes that an all-to-all of unknown length is taken to have."""


class Plan(Protocol):
    """Run one collective on any arrays of the sizes that it was made for."""

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step; an array that this rank does not have is empty."""
        ...

    def run(self, source: Bytes, output: Bytes) -> None:
        """Run it once in this thread."""
        ...

    def bind(self, source: Bytes, output: Bytes) -> Callable[[], None]:
        """Return `run` on these arrays."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Hold what a call is, but for its arrays; equal on all ranks but for the layout's view of it."""

    comm: CommunicatorLike
    operation: Operation
    dtype: DType
    op: str
    order: str
    root: int
    layout: Layout
    total: int
    """Elements of the whole buffer; of this rank's input in an all-to-all."""
    uneven: tuple[int, ...]
    """Counts that the caller gave, if any."""
    device: Device | None = None
    """The device on which the arrays lie; None for host memory."""

    def choose(self, algorithm: str) -> str:
        """Return the name of the algorithm to use."""
        return choose(self.operation.name, algorithm, self.case())

    def key(self) -> tuple[object, ...]:
        """Return all that a plan depends on, but for the communicator and the device."""
        where = self.layout.key()
        return (self.operation.name, self.dtype.name, self.op, self.order, self.root, self.total, self.uneven, *where)

    def case(self) -> Case:
        """Return what a choice depends on."""
        comm = self.comm
        board, notes = comm.board is not None, comm.notes
        if self.device is not None:
            side = comm.side(self.device)  # made before anything is chosen
            board, notes = side.windows is not None, side.notes
        return Case(
            size=comm.size,
            nbytes=self._known_bytes(),
            dtype=self.dtype,
            op=self.op,
            strict=self.order == "canonical",
            even=not self.uneven,
            root=self.root,
            native=comm.native is not None,
            board=board,
            nodes=comm.nodes,
            notes=notes,
        )

    @property
    def differs(self) -> bool:
        """Return whether each rank knows its own lengths alone, as in an uneven all-to-all."""
        return bool(self.uneven) and self.operation.input == "row"

    def _known_bytes(self) -> int:
        """Return the bytes of the whole buffer, or a number that is large on all ranks where none knows them."""
        return LARGE if self.differs else self.total * self.dtype.itemsize

    def arithmetic(self) -> Arithmetic:
        """Return what is done with the elements."""
        return Arithmetic(self.dtype, self.op, self.comm.size if self.op == "mean" else 1)

    def meeting(self) -> Meeting:
        """Return what all ranks must pass alike, for their records."""
        name = self.operation.name
        is_row = self.operation.input == "row"
        count = 0 if self.uneven and is_row else self.total
        checked = () if is_row else self.uneven
        extra = zlib.crc32(repr(checked).encode()) if checked else 0
        on_device = self.device is not None
        signature = pack(Signature(name, self.dtype.name, self.op, self.root, count, on_device))
        return Meeting(name, self.root, signature, extra, f"{name} (loads)")

    def about(self, algorithm: str) -> About:
        """Return what the flight record and strict mode are told of the call."""
        meeting = self.meeting()
        return _about(meeting.signature, meeting.extra, self.total * self.dtype.itemsize, algorithm)


@lru_cache(maxsize=1024)
def _about(signature: int, extra: int, nbytes: int, algorithm: str) -> About:
    call = unpack(signature)
    counts = f" with counts #{extra:x}" if extra else ""
    return About(call.operation, f"{call}{counts}", nbytes=nbytes, algorithm=algorithm)
