"""What a communicator keeps on one device: streams, windows that the host's other ranks can load, memory for schedules.

All of it is made in steps on which all ranks agree, before the collective that needs it moves anything, so that a
device without room is an error on every rank and the job can go on.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.comm.canary import device_messages
from mpizero.comm.device_heap import GRANULE, device_heap
from mpizero.comm.gpus import allocator, memory_warnings
from mpizero.comm.heap import mappings
from mpizero.comm.messages import STRANDS
from mpizero.comm.reached import Reached, together
from mpizero.comm.segment import PAGE, share
from mpizero.comm.wires import DeviceTransport, kinds_of_pairs, make_wires
from mpizero.errors import DeviceError, DeviceMemoryError, MpiZeroError
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.arrays import Device, DeviceArray, Event, Stream
    from mpizero.comm.heap import Heap
    from mpizero.comm.segment import Segment
    from mpizero.typing import Bytes

__all__ = ["MOST_LOADED", "DeviceSide"]

LEAST_WINDOW = 32 << 20
MOST_WINDOW = 128 << 20
"""Bytes of each of the two halves of a rank's window: a thousandth of the device's memory, within these bounds. With
smaller ones the meeting of the ranks between two pieces takes longer than the kernels. Reckoned, not measured."""
MOST_LOADED = 32
"""Ranks of a host up to which loads serve: a kernel adds so many sources at most."""


class DeviceSide:
    """Hold what one communicator's collectives on one device need; made and extended by all ranks together."""

    def __init__(self, comm: Any, device: Device) -> None:
        """Make the streams, and the windows where all ranks are on one host that allows them. Collective.

        Args:
            comm: a `Communicator`.
            device: this rank's; the other ranks may use others.

        Raises:
            DeviceMemoryError: on all ranks, where a device has no room for a window.
        """
        self.comm, self.device = comm, device
        self.mpi = comm.private.mpi
        self.stream: Stream = device.stream()
        self.strands: list[Stream] = [device.stream() for _ in range(STRANDS)]
        self.out_stream: Stream = device.stream()
        """For copies to the device; `stream` has those to the host."""
        self.forced = settings().device_wire
        self.aware, self.why_aware = device_messages(comm) if comm.size > 1 else (False, "there is one rank")
        """Whether messages may carry device memory, and how that is known; equal on all ranks."""
        shares = comm.board is not None and comm.size <= MOST_LOADED and self.forced in {"auto", "loads"}
        self.window = self._window_bytes() if shares else 0
        """Bytes of half a window, equal on all ranks."""
        self.windows: list[DeviceArray] | None = self._open_windows() if shares else None
        """Every rank's window, this rank's own included; None where ranks cannot load each other's device memory."""
        self.pids: list[int] = self.mpi.allgather(os.getpid())
        self._rooms: dict[str, Any] = {}
        self._heap: Heap | None = None
        self._wires: DeviceTransport | None = None
        self._ready: set[str] = set()
        self._last: Event | None = None
        """The end of the last collective."""
        self.notes: dict[str, Any] = {key: comm.notes[key] for key in ("links",) if key in comm.notes}
        """What algorithms are chosen by: the links, but no table of what was measured with host memory."""
        self._shared: list[Segment] = []
        self.plans: dict[Any, Any] = {}
        """What the floor above remembers of collectives on this device."""
        if self.aware and comm.rank == 0:
            for text, remedy in memory_warnings(pool=allocator()):
                os.write(2, f"mpizero: {text}: {remedy}\n".encode())

    @property
    def has_short_wire(self) -> bool:
        """Return whether some pair of ranks has a better wire for device memory than the host."""
        return self.aware or self.may_open

    @property
    def may_open(self) -> bool:
        """Return whether some ranks are on one host and their device memory can be opened, as far as is known."""
        comm = self.comm
        if self.forced in {"messages", "staged"} or len(set(comm.nodes)) == comm.size:
            return False
        return self.windows is not None if comm.board is not None else settings().loads

    @property
    def wires(self) -> DeviceTransport:
        """Return the transport of device memory; the first use is collective.

        Raises:
            DeviceMemoryError: on all ranks, where one has no room for its slots.
        """
        if self._wires is None:
            kinds = partial(kinds_of_pairs, self.comm.nodes, self.comm.rank, aware=self.aware)
            try:
                self._wires = make_wires(self.comm, self.device, kinds(ipc=self.may_open))
            except DeviceMemoryError:
                raise
            except DeviceError as error:
                self._say_refused(str(error))
                self._wires = make_wires(self.comm, self.device, kinds(ipc=False))
            self._wires.cut_small(self.comm.slow_peers)
        return self._wires

    def has_made(self, wire: str) -> bool:
        """Return whether the memory for a wire has been made."""
        return wire in self._ready

    def note_made(self, wire: str) -> None:
        """Remember that the memory for a wire has been made."""
        self._ready.add(wire)

    @property
    def heap(self) -> Heap:
        """Return what gives out symmetric buffers on this device to the ranks of this host."""
        if self._heap is None:
            self._heap = device_heap(self.mpi, self.device)
        return self._heap

    def close(self) -> None:
        """Give the windows and symmetric buffers back. Collective.

        Memory that a peer has opened must not be freed before the peer has closed it, so all close, meet, and free.
        """
        if all(self.mpi.allgather(self.comm.health.sound)) and self._wires is not None:
            self._wires.close()
        for segment in self._shared:
            mappings().drop(segment)
        mine = None if self.windows is None else self.windows[self.comm.rank]
        self.windows = None
        if self._heap is not None:
            self._heap.close()
        self.mpi.Barrier()
        del mine

    def begin(self, streams: Sequence[Stream], events: Sequence[Event]) -> None:
        """Have streams wait for the caller's work, and for the collective before."""
        for stream in streams:
            for event in events:
                stream.wait(event)
            if self._last is not None:
                stream.wait(self._last)

    def end(self, streams: Sequence[Stream]) -> Event:
        """Return an event behind all work of the streams."""
        first, *others = streams
        for stream in others:
            first.wait(stream.record())
        self._last = first.record()
        return self._last

    def reached(self, event: Event, what: str) -> Reached:
        """Return the wait for an event."""
        return Reached(event, self.comm.transport, what)

    def device_room(self, name: str, nbytes: int) -> DeviceArray:
        """Return device memory that is kept under a name; the first call is collective.

        Raises:
            DeviceMemoryError: on all ranks, where a device has no room.
        """
        if name not in self._rooms:
            self._rooms[name] = together(self.mpi, lambda: self.device.allocate(nbytes))
        room: DeviceArray = self._rooms[name]
        return room

    def pinned_room(self, name: str, nbytes: int) -> Bytes:
        """Return page-locked host memory that is kept under a name; the first call is collective.

        Where all ranks are on one host, they have all mapped it. `nbytes` is a multiple of a page.
        """
        if name not in self._rooms:
            shared = share(self.mpi, nbytes) if self.comm.board is not None else None
            if shared is None:
                self._rooms[name] = together(self.mpi, lambda: self.device.pinned(nbytes))
            else:
                mappings().add(shared)
                self._shared.append(shared)
                self._rooms[name] = self._pinned(shared)
        room: Bytes = self._rooms[name]
        return room

    def _pinned(self, shared: Segment) -> Bytes:
        """Return this rank's share of a segment, page-locked where the system does so."""
        start = self.comm.rank * shared.share
        mine = shared.bytes[start : start + shared.share]
        if not self.device.pin(mine) and self.comm.rank == 0:
            text = "the system locks no pages of shared memory (ulimit -l?), and copies between GPU and host are slower"
            os.write(2, f"mpizero: {text}\n".encode())
        return mine

    def _window_bytes(self) -> int:
        share = self.device.memory() >> 10
        wanted: int = min(self.mpi.allgather(max(LEAST_WINDOW, min(share, MOST_WINDOW))))
        return wanted // PAGE * PAGE

    def _open_windows(self) -> list[DeviceArray] | None:
        mine = together(self.mpi, lambda: self.device.allocate(-(-2 * self.window // GRANULE) * GRANULE))
        windows, refusal = None, ""
        try:
            handle = self.device.share(mine)
        except DeviceError as error:
            handle, refusal = b"", str(error)
        handles = self.mpi.allgather(handle)
        if all(handles):
            try:
                windows = [self._opened(rank, given, mine) for rank, given in enumerate(handles)]
            except MpiZeroError as error:
                refusal = str(error)
        refusals = [text for text in self.mpi.allgather(refusal) if text]
        if not refusals:
            return windows
        del windows  # closed by all before any of them frees its own
        self.mpi.Barrier()
        self._say_refused(refusals[0])
        return None

    def _say_refused(self, refusal: str) -> None:
        if self.comm.rank == 0:
            text = (
                f"mpizero: ranks of {self.comm.hosts[0]} cannot load each other's GPU memory, which goes through the "
            )
            os.write(2, f"{text}host instead, slower: {refusal}\n".encode())

    def _opened(self, rank: int, handle: bytes, mine: DeviceArray) -> DeviceArray:
        return mine if rank == self.comm.rank else self.device.open(handle, mine.nbytes)
