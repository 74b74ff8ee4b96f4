"""Collectives on device memory: which wire they take, what has to be made first, and their order with streams.

Three ways, chosen alike on all ranks: `DeviceLoads` where all ranks are on one host and load each other's memory;
schedules over messages, whose wire is chosen per pair of ranks, with the sums on the device; and `Staged`, through the
host's own collectives, where no pair of ranks has a better wire than the host.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero.arrays import View, dtype_named, kind_of
from mpizero.collectives.buffers import Arithmetic, Buffers, Line
from mpizero.collectives.device_loads import DeviceLoads, meet
from mpizero.collectives.execute import IN_FLIGHT, SCRATCH, execute
from mpizero.collectives.machine import DeviceMachine
from mpizero.collectives.on_host import Scheduled
from mpizero.collectives.registry import LOADS, NATIVE, build
from mpizero.collectives.staged import Staged
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpizero.arrays import Borrowed, Device, Event, Stream
    from mpizero.collectives.route import Route
    from mpizero.comm.side import DeviceSide
    from mpizero.typing import Wait

__all__ = ["DevicePlan", "Fence", "choose_on_device", "plan_on_device", "ready_side"]

PACKING = 8 << 20
"""Bytes, per strand, of the packed messages of a round."""
MOST = 1024
"""Plans that are remembered per device of a communicator."""
SET_UP = 9_998
"""The channel of the messages by which ranks meet before device memory is made."""


class DevicePlan(Protocol):
    """Run one collective on any arrays in device memory of the sizes that it was made for."""

    @property
    def streams(self) -> Sequence[Stream]:
        """Return the streams on which it works."""
        ...

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step; an array that this rank does not have is empty."""
        ...


class Fence:
    """Order a collective between what the caller's streams do before it and after it."""

    def __init__(self, device: Device, arrays: Sequence[Borrowed | None]) -> None:
        """Mark what the caller's streams have been given so far."""
        device.let_go()
        self.device = device
        self.arrays = [array for array in arrays if array is not None]
        self._cupys = any(kind_of(array.array) == "cupy" for array in self.arrays)
        self.before: list[Event] = [stream.record() for stream in device.users_streams(cupys=self._cupys)]
        self._after: Event | None = None

    def around(self, side: DeviceSide, streams: Sequence[Stream], steps: Iterator[Wait]) -> Iterator[Wait]:
        """Give a collective's steps on its streams, behind what came before it; each is run with the device current."""
        self.device.use()
        side.begin(streams, self.before)
        for wait in steps:
            yield wait
            self.device.use()  # other communicators' steps run in between
        self._after = side.end(streams)
        self.device.keep(self._after, *self.arrays)

    def join(self) -> None:
        """Put the caller's streams behind the collective, and packed results back."""
        arrays, self.arrays = self.arrays, []
        if self._after is not None:
            with self.device.current():  # number 0 means a stream of the current device
                for stream in self.device.users_streams(cupys=self._cupys):
                    stream.wait(self._after)
        for array in arrays:
            array.give_back()
        del arrays
        self.device.let_go()


def ready_side(route: Route) -> DeviceSide:
    """Return what the communicator keeps on the route's device, made if it is not there. Collective at first use.

    Raises:
        CollectiveError: on every rank of a host, where some rank's buffers are not on a device.
        DeviceMemoryError: on all ranks, where a device has no room.
    """
    comm: Any = route.comm
    if not hasattr(comm, "has_side"):
        rule = "an mpizero.Communicator for arrays in GPU memory"
        raise ArgumentError(must_be("comm", rule, type(comm).__name__))
    if not comm.has_side(route.device):
        comm.perform(route.about("set-up of GPU memory"), _made(route, lambda: comm.side(route.device)))
    side: DeviceSide = comm.side(route.device)
    return side


def choose_on_device(route: Route, algorithm: str) -> str:
    """Return the name of the algorithm to use; `auto` where the host is to choose, which runs it. See `ready_side`."""
    side = ready_side(route)
    chosen = route.choose(algorithm)
    return "auto" if algorithm == "auto" and wire_of(route, side, chosen) == "staged" else chosen


def wire_of(route: Route, side: DeviceSide, name: str) -> str:
    """Return `loads`, `messages` or `staged` for an algorithm; equal on all ranks."""
    if name == NATIVE or (side.forced == "staged" and route.comm.size > 1):
        return "staged"
    if name == LOADS:
        return "loads"
    return "messages" if side.forced == "messages" or side.has_short_wire or route.comm.size == 1 else "staged"


def plan_on_device(route: Route, name: str, pieces: int = 0) -> DevicePlan:
    """Return the plan for an algorithm on device memory; collective at the first use of a wire.

    Args:
        route: the call, but for its arrays.
        name: one that `choose_on_device` gave.
        pieces: in how many a pipelined algorithm works; 0 leaves it to `select`.
    """
    side = ready_side(route)
    key = (*route.key(), name, pieces)
    plan: DevicePlan | None = side.plans.get(key)
    if plan is None:
        plan = _planned(route, side, name, pieces)
        if len(side.plans) < MOST:
            side.plans[key] = plan
    return plan


def _planned(route: Route, side: DeviceSide, name: str, pieces: int) -> DevicePlan:
    wire = "staged" if name == "auto" else wire_of(route, side, name)
    if wire == "loads":
        return DeviceLoads(side, route.meeting(), route.layout, route.arithmetic())
    make: Callable[[], DevicePlan] = partial(Staged, route, side, name)
    if wire == "messages":
        make = partial(_DeviceMessages, route, side, name, pieces)
    if side.has_made(wire):
        return make()
    made: list[DevicePlan] = []
    comm: Any = route.comm
    comm.perform(f"set-up of GPU memory for {wire}", _made(route, lambda: made.append(make())))
    side.note_made(wire)
    return made[0]


def _made(route: Route, make: Callable[[], Any]) -> Iterator[Wait]:
    """Meet all ranks, with a time-out, and then call what makes memory, which blocks in MPI until all are there."""
    comm: Any = route.comm
    if comm.board is not None:
        with comm.board.collective:
            yield from meet(comm, route.meeting(), f"{route.operation.name} of GPU memory")
    elif comm.size > 1:
        with comm.channel(SET_UP, "GPU memory"):  # which the steps keep, whoever runs them
            steps = comm.transport.voice.carry(_barrier(comm, route.operation.name))
        yield from steps
    make()


def _barrier(comm: Any, what: str) -> Iterator[Wait]:
    token = View(np.zeros(1, np.uint8), dtype_named("uint8"))
    nothing = View(np.empty(0, np.uint8), token.dtype)
    buffers = Buffers(input=token, output=nothing, layout=Line([0, 1]), arithmetic=Arithmetic(token.dtype))
    schedule = build("barrier", "dissemination", comm.size, comm.rank)
    return execute(schedule, buffers, comm, segment=1, what=comm.transport.voice.name(what))


class _DeviceMessages:
    """Run a schedule on device memory, over the wires that pairs of ranks have."""

    def __init__(self, route: Route, side: DeviceSide, name: str, pieces: int) -> None:
        self.route, self.side, self.cut = route, side, Scheduled(route, name, pieces)
        size = route.comm.size
        # What is packed has to fit; the parts of an uneven all-to-all go each by itself, whole.
        room = max(1, PACKING // (2 * self.cut.schedule.chunks * max(self.cut.widths)))
        self.segment = self.cut.segment if route.differs else min(self.cut.segment, room)
        self.transport: Any = route.comm.transport if size == 1 else side.wires
        self._packing = side.device_room("packing", IN_FLIGHT * PACKING if size > 1 else 0)
        self._scratch = side.device_room("scratch", SCRATCH + (1 << 20))
        self.streams = side.strands
        """The streams on which it works."""

    def scratch(self, nbytes: int) -> Any:
        """Return device memory for a schedule's slots."""
        if nbytes > self._scratch.nbytes:
            rule = f"one whose slots fit in {self._scratch.nbytes:,} bytes of GPU memory"
            raise ArgumentError(must_be("algorithm", rule, f"{self.cut.what}: {nbytes:,}", "choose another"))
        return self._scratch

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step."""
        cut, machines = self.cut, [self._machine(strand) for strand in range(IN_FLIGHT)]
        buffers = Buffers(input=source, output=output, layout=cut.layout, arithmetic=self.route.arithmetic())
        return execute(cut.schedule, buffers, self, segment=self.segment, what=cut.what, machines=machines)

    def _machine(self, strand: int) -> DeviceMachine:
        packing = self._packing[strand * PACKING : (strand + 1) * PACKING]
        return DeviceMachine(
            self.side.device, self.side.strands[strand], packing, lambda event: self.side.reached(event, self.cut.what)
        )
