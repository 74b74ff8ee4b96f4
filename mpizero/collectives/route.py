"""How a collective gets from its arguments to its steps: all about a call but its arrays, and the plan made of it.

A plan depends on dtype, sizes and words alone, so it can be kept and run again on other arrays.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mpizero.arrays import View, copy
from mpizero.collectives.agree import Signature, pack
from mpizero.collectives.buffers import Arithmetic, Buffers, Layout, Line, Square
from mpizero.collectives.cells import CellCall, fits
from mpizero.collectives.execute import execute
from mpizero.collectives.on_device import plan_on_device, ready_side, wire_of
from mpizero.collectives.phase import Meeting, PhaseCall
from mpizero.collectives.registry import LOADS, NATIVE, Operation, build
from mpizero.collectives.schedule import Schedule, even_offsets
from mpizero.collectives.select import Case, by_messages, choose, pieces_of, segment_of
from mpizero.comm.waiting import drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.arrays import Device, DType
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

    def is_staged(self, name: str) -> bool:
        """Return whether an algorithm on device memory would be run by the host."""
        return wire_of(self, ready_side(self), name) == "staged"

    def case(self) -> Case:
        """Return what a choice depends on."""
        comm = self.comm
        board = comm.board is not None
        if self.device is not None and board:
            board = ready_side(self).windows is not None
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
            notes=comm.notes,
        )

    @property
    def differs(self) -> bool:
        """Return whether each rank knows its own lengths alone, as in an uneven all-to-all."""
        return bool(self.uneven) and self.operation.input == "row"

    def _known_bytes(self) -> int:
        """Return the bytes of the whole buffer, or a number that is large on all ranks where none knows them."""
        return LARGE if self.differs else self.total * self.dtype.itemsize

    def plan(self, name: str, pieces: int = 0) -> Plan:
        """Return the plan for an algorithm.

        Args:
            name: one that `choose` gave.
            pieces: in how many a pipelined algorithm works; 0 leaves it to `select`.
        """
        if self.device is not None:
            return plan_on_device(self, name, pieces)
        if name == NATIVE:
            return _Native(self)
        if name != LOADS:
            return _Messages(self, name, pieces)
        share = self.total
        if self.operation.input == "chunk":
            share = max(self.layout.length(rank) for rank in range(self.comm.size))
        if fits(self.operation.name, share * self.dtype.itemsize, uneven=bool(self.uneven)):
            return CellCall(self.comm, self.meeting(), self.layout, self.arithmetic())
        return PhaseCall(self.comm, self.meeting(), self.layout, self.arithmetic(), self._by_messages)

    def arithmetic(self) -> Arithmetic:
        """Return what is done with the elements."""
        return Arithmetic(self.dtype, self.op, self.comm.size if self.op == "mean" else 1)

    def _by_messages(self, source: View, output: View) -> Iterator[Wait]:
        return self.plan(by_messages(self.operation.name, self.case()).name).steps(source, output)

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


class _Messages:
    """Run a schedule over messages."""

    def __init__(self, route: Route, name: str, pieces: int) -> None:
        self.route, self.comm = route, route.comm
        operation, size = route.operation.name, route.comm.size
        self.what = f"{operation} ({name})"
        pieces = pieces or pieces_of(operation, name, route.case())

        def schedule_of(rank: int) -> Schedule:
            return build(operation, name, size, rank, route.root, nodes=route.comm.nodes, pieces=pieces)

        self.schedule = schedule_of(route.comm.rank)
        self.layout = route.layout
        if isinstance(self.layout, Line) and self.schedule.chunks != len(self.layout.offsets) - 1:
            self.layout = Line(even_offsets(route.total, self.schedule.chunks))
        acc = route.dtype.accumulator(route.op)
        widths = (route.dtype.itemsize, acc.itemsize)
        # A cut by lengths that each rank has for itself would differ from rank to rank.
        hosts = 1 if route.differs else len(set(route.comm.nodes))
        self.segment = segment_of(schedule_of(0), widths, self.layout.longest, hosts=hosts)

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step."""
        buffers = Buffers(input=source, output=output, layout=self.layout, arithmetic=self.route.arithmetic())
        return execute(self.schedule, buffers, self.comm, segment=self.segment, what=self.what)

    def run(self, source: Bytes, output: Bytes) -> None:
        """Run it once in this thread."""
        dtype = self.route.dtype
        drive(self.steps(View(source, dtype), View(output, dtype)))

    def bind(self, source: Bytes, output: Bytes) -> Callable[[], None]:
        """Return `run` on these arrays."""
        return partial(self.run, source, output)


class _Native:
    """Call the MPI library's own collective."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.native = route.comm.native
        self.is_root = route.comm.rank == route.root
        self.offsets = route.layout.offsets if isinstance(route.layout, Line) else []

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step."""
        yield self._call(source, output)
        if self.route.op == "mean" and output.count:
            copy(output, output, self.route.comm.size)

    def run(self, source: Bytes, output: Bytes) -> None:
        """Run it once in this thread."""
        dtype = self.route.dtype
        drive(self.steps(View(source, dtype), View(output, dtype)))

    def bind(self, source: Bytes, output: Bytes) -> Callable[[], None]:
        """Return `run` on these arrays."""
        return partial(self.run, source, output)

    def _call(self, x: View, out: View) -> Any:
        route, native, offsets = self.route, self.native, self.offsets
        name, op, root = route.operation.name, route.op, route.root
        at_root = out if self.is_root else None
        if isinstance(route.layout, Square):
            return native.all_to_all(x, out, route.layout.leaving, route.layout.arriving)
        calls = {
            "barrier": native.barrier,
            "broadcast": lambda: native.broadcast(out, root),
            "all_gather": lambda: native.all_gather(x, out, offsets),
            "gather": lambda: native.gather(x, at_root, offsets, root),
            "scatter": lambda: native.scatter(x if self.is_root else None, out, offsets, root),
            "all_reduce": lambda: native.all_reduce(x, out, op),
            "reduce_scatter": lambda: native.reduce_scatter(x, out, offsets, op),
            "reduce": lambda: native.reduce(x, at_root, op, root),
        }
        return calls[name]()
