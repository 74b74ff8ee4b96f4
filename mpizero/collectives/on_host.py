"""Collectives on host memory: the plan for a call by an algorithm.

A plan depends on dtype, sizes and words alone, so it can be kept and run again on other arrays.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.arrays import View, copy
from mpizero.collectives.buffers import Buffers, Line, Square
from mpizero.collectives.cells import CellCall, fits
from mpizero.collectives.execute import execute
from mpizero.collectives.phase import PhaseCall
from mpizero.collectives.registry import LOADS, NATIVE, build
from mpizero.collectives.schedule import Schedule, even_offsets
from mpizero.collectives.select import by_messages, pieces_of, segment_of
from mpizero.comm.waiting import drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.collectives.route import Plan, Route
    from mpizero.typing import Bytes, Wait

__all__ = ["Scheduled", "plan_on_host"]


def plan_on_host(route: Route, name: str, pieces: int = 0) -> Plan:
    """Return the plan for an algorithm.

    Args:
        route: the call, but for its arrays, which lie in host memory.
        name: one that `choose` gave.
        pieces: in how many a pipelined algorithm works; 0 leaves it to `select`.
    """
    if name == NATIVE:
        return _Native(route)
    if name != LOADS:
        return _Messages(route, name, pieces)
    share = route.total
    if route.operation.input == "chunk":
        share = max(route.layout.length(rank) for rank in range(route.comm.size))
    if fits(route.operation.name, share * route.dtype.itemsize, uneven=bool(route.uneven)):
        return CellCall(route.comm, route.meeting(), route.layout, route.arithmetic())
    return PhaseCall(route.comm, route.meeting(), route.layout, route.arithmetic(), partial(_by_messages, route))


def _by_messages(route: Route, source: View, output: View) -> Iterator[Wait]:
    return plan_on_host(route, by_messages(route.operation.name, route.case()).name).steps(source, output)


class Scheduled:
    """Be a route's schedule for this rank, and how it is cut."""

    def __init__(self, route: Route, name: str, pieces: int) -> None:
        """Build the schedule of an algorithm; `pieces` as of `plan_on_host`."""
        operation, size = route.operation.name, route.comm.size
        self.what = f"{operation} ({name})"
        pieces = pieces or pieces_of(operation, name, route.case())

        def schedule_of(rank: int) -> Schedule:
            return build(operation, name, size, rank, route.root, nodes=route.comm.nodes, pieces=pieces)

        self.schedule = schedule_of(route.comm.rank)
        self.layout = route.layout
        if isinstance(self.layout, Line) and self.schedule.chunks != len(self.layout.offsets) - 1:
            self.layout = Line(even_offsets(route.total, self.schedule.chunks))
        self.widths = (route.dtype.itemsize, route.dtype.accumulator(route.op).itemsize)
        # A cut by lengths that each rank has for itself would differ from rank to rank.
        hosts = 1 if route.differs else len(set(route.comm.nodes))
        self.segment = segment_of(schedule_of(0), self.widths, self.layout.longest, hosts=hosts)


class _Messages:
    """Run a schedule over messages."""

    def __init__(self, route: Route, name: str, pieces: int) -> None:
        self.route, self.comm, self.cut = route, route.comm, Scheduled(route, name, pieces)

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step."""
        cut = self.cut
        buffers = Buffers(input=source, output=output, layout=cut.layout, arithmetic=self.route.arithmetic())
        return execute(cut.schedule, buffers, self.comm, segment=cut.segment, what=cut.what)

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
