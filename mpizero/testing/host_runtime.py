"""A GPU's runtime played on the host, as badly as CUDA allows: work runs late, streams overtake each other.

`HostRuntime` has the functions of `cupy.cuda.runtime` that mpizero uses, on host memory. Nothing that is queued on a
stream runs when it is queued. It runs when an event behind it is asked for often enough, when the host waits for it,
or at some moment in between that a seeded generator chooses, always in the order of its stream and behind the events
that its stream waits for. Freed memory is overwritten. So code that forgets an event reads old bytes, sends what is
not yet there, or receives into what is still read, and a comparison of results fails; see [Note: streams and MPI] in
`arrays/device`.

Other processes open its memory by handles, as with CUDA IPC, so that ranks under mpirun share it for real.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.arrays import Device, View, combine, copy, gpus
from mpizero.collectives.order import pairwise

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["IMMEDIATE", "HostKernels", "HostRuntime", "HostRuntimeError", "device_on", "stand_in"]

IMMEDIATE = 1
"""The handle of the stream that torch's CPU tensors are on: its work is done when the call returns."""
POISON = 0xA5
OUT_OF_MEMORY, INVALID_VALUE, INVALID_HANDLE, NOT_READY = 2, 1, 400, 600
_LONGEST = 4
"""Times at most that an event says that it is not done before its work is run."""


class HostRuntimeError(RuntimeError):
    """Be what CuPy's runtime raises: an error with CUDA's number for it."""

    def __init__(self, status: int, text: str) -> None:
        """Hold CUDA's error number, and a text."""
        super().__init__(text)
        self.status = status


class _Mark:
    """Be a recorded event: done when its stream has come to it."""

    def __init__(self, stream: int, patience: int) -> None:
        self.stream, self.patience, self.done = stream, patience, False


class _Memory(NamedTuple):
    mapped: mmap.mmap
    nbytes: int
    file: int


_Work = Callable[[], None] | _Mark


class HostRuntime:
    """Play one GPU's runtime for this process."""

    def __init__(self, seed: int = 0, *, capacity: int = 1 << 30, ipc: bool = True, restless: float = 0.2) -> None:
        """Begin with an empty device.

        Args:
            seed: of the generator that chooses when work runs; runs with the same calls repeat.
            capacity: bytes that can be allocated before the device is out of memory.
            ipc: whether other processes' memory can be opened.
            restless: the chance that a call runs some stream's next piece of work.
        """
        self.capacity, self.ipc, self.restless = capacity, ipc, restless
        self._random = random.Random(seed)  # noqa: S311  (repeatable on purpose)
        self._lock = threading.RLock()
        self._streams: dict[int, deque[_Work]] = {IMMEDIATE: deque()}
        self._events: dict[int, _Mark | None] = {}
        self._memory: dict[int, _Memory] = {}
        self._spare: dict[int, list[_Memory]] = {}
        self._opened: dict[int, mmap.mmap] = {}
        self._pinned: list[_Memory] = []
        self._next = 100
        self.users: list[int] = [IMMEDIATE]
        """The streams that the caller's libraries use now."""
        self.copies = 0
        """Copies that were queued."""
        self.allocated = 0
        """Bytes of device memory in use."""

    def setDevice(self, number: int) -> None:  # noqa: N802
        """Accept the only device there is."""
        if number:
            raise HostRuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def getDevice(self) -> int:  # noqa: N802
        """Return the number of the only device there is."""
        return 0

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        """Return the free and all bytes."""
        return self.capacity - self.allocated, self.capacity

    def malloc(self, size: int) -> int:
        """Return memory full of poison."""
        with self._lock:
            self._stir()
            if self.allocated + size > self.capacity:
                raise HostRuntimeError(OUT_OF_MEMORY, "cudaErrorMemoryAllocation: out of memory")
            self.allocated += size
            spare = self._spare.get(size)
            memory = spare.pop() if spare else self._map(size)
            address = _start(memory.mapped)
            self._memory[address] = memory
            return address

    def free(self, address: int) -> None:
        """Overwrite the memory, which work in flight may still use, and keep it for the next allocation."""
        with self._lock:
            memory = self._memory.pop(address)
            ctypes.memset(address, POISON, memory.nbytes)
            self.allocated -= memory.nbytes
            self._spare.setdefault(memory.nbytes, []).append(memory)

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: ARG002, N802
        """Return host memory."""
        memory = self._map(size)
        self._pinned.append(memory)
        return _start(memory.mapped)

    def freeHost(self, address: int) -> None:  # noqa: N802
        """Forget host memory; it stays mapped, since work in flight may use it."""

    def hostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        """Do nothing: all of the host's memory will do."""

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        """Do nothing."""

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: ARG002, N802
        """Queue a copy."""
        self.copies += 1
        self.enqueue(stream, lambda: ctypes.memmove(dst, src, size))

    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: ARG002, N802
        """Return a new stream."""
        with self._lock:
            self._next += 1
            self._streams[self._next] = deque()
            return self._next

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802
        """Have later work of a stream wait for what an event marks now."""
        with self._lock:
            mark = self._events[event]
            if mark is not None:
                self.enqueue(stream, lambda: self._run_to(mark))

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: ARG002, N802
        """Return a new event, which marks nothing."""
        with self._lock:
            self._next += 1
            self._events[self._next] = None
            return self._next

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        """Forget an event; streams that wait for it go on waiting."""
        self._events.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        """Mark the end of what a stream has been given."""
        with self._lock:
            mark = _Mark(stream, self._random.randrange(_LONGEST))
            self._events[event] = mark
            self._streams[stream].append(mark)
            self._stir(stream)

    def eventQuery(self, event: int) -> int:  # noqa: N802
        """Return 0 where the mark has been reached, else 600; asked often enough, run what is before it."""
        with self._lock:
            self._stir()
            mark = self._events[event]
            if mark is None or mark.done:
                return 0
            mark.patience -= 1
            if mark.patience >= 0:
                return NOT_READY
            self._run_to(mark)
            return 0

    def eventSynchronize(self, event: int) -> None:  # noqa: N802
        """Run all that is before the mark."""
        with self._lock:
            mark = self._events[event]
            if mark is not None:
                self._run_to(mark)

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        """Return a handle by which another process opens an allocation."""
        with self._lock:
            if address not in self._memory:
                raise HostRuntimeError(INVALID_VALUE, "cudaErrorInvalidValue: not the start of an allocation")
            memory = self._memory[address]
            return struct.pack("QQQ", os.getpid(), memory.file, memory.nbytes).ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        """Map another process's allocation."""
        if not self.ipc:
            raise HostRuntimeError(INVALID_HANDLE, "cudaErrorInvalidResourceHandle: invalid resource handle")
        pid, file, nbytes = struct.unpack_from("QQQ", handle)
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            mapped = mmap.mmap(opened, nbytes)
        finally:
            os.close(opened)
        address = _start(mapped)
        self._opened[address] = mapped
        return address

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        """Forget another process's memory; it stays mapped, since work in flight may use it."""

    def enqueue(self, stream: int, work: Callable[[], Any]) -> None:
        """Queue anything on a stream."""
        with self._lock:
            self._streams[stream].append(work)
            self._stir(stream)

    def finish(self) -> None:
        """Run everything, as cudaDeviceSynchronize does."""
        with self._lock:
            for stream in list(self._streams):
                while self._streams[stream]:
                    self._step(stream)

    def _map(self, size: int) -> _Memory:
        file = os.memfd_create("mpizero-device")
        os.ftruncate(file, max(size, 1))
        mapped = mmap.mmap(file, max(size, 1))
        ctypes.memset(_start(mapped), POISON, size)
        return _Memory(mapped, size, file)

    def _stir(self, stream: int = 0) -> None:
        """Run a piece of work of some stream now and then; all of it where the stream's work is immediate."""
        if stream == IMMEDIATE:
            while self._streams[IMMEDIATE]:
                self._step(IMMEDIATE)
        if self._random.random() < self.restless:
            busy = [number for number, queue in self._streams.items() if queue]
            if busy:
                self._step(self._random.choice(busy))

    def _step(self, stream: int) -> None:
        queue = self._streams[stream]
        if not queue:
            return
        work = queue.popleft()
        if isinstance(work, _Mark):
            work.done = True
        else:
            work()

    def _run_to(self, mark: _Mark) -> None:
        while not mark.done:
            self._step(mark.stream)


class HostKernels:
    """Queue numpy's arithmetic on a `HostRuntime`."""

    def __init__(self, runtime: HostRuntime) -> None:
        """Use a runtime's streams."""
        self._runtime = runtime
        self.launched: list[str] = []
        """The name of every kernel that was launched, for tests that count them."""

    def reduce(self, op: str, targets: Sequence[View], sources: Sequence[View], divisor: int, stream: int) -> None:
        """Queue the sum, or what `op` says, of the sources; see `arrays.runtime.Kernels`."""
        if not sources[0].count:
            return
        self.launched.append(op)
        into, out_of = [_on_host(view) for view in targets], [_on_host(view) for view in sources]
        self._runtime.enqueue(stream, lambda: _reduce(op, into, out_of, divisor))

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue copies of bytes, each (from, to, number)."""
        self.launched.append("move")
        self._runtime.copies += 1

        def work() -> None:
            for source, target, nbytes in runs:
                ctypes.memmove(target, source, nbytes)

        self._runtime.enqueue(stream, work)


def _reduce(op: str, targets: list[View], sources: list[View], divisor: int) -> None:
    dtype = next((view.dtype for view in (*targets, *sources) if view.dtype.is_half), targets[0].dtype)
    acc = dtype.accumulator(op)

    def pair(left: View, right: View) -> View:
        result = View(np.empty(left.count, acc.storage), acc)
        combine(op, result, left, right)
        return result

    total = pairwise(sources, pair)
    if total is sources[0]:  # a copy: of one source, which a target may be
        total = View(total.data.copy(), total.dtype)
    for target in targets:
        copy(target, total, divisor)


def _on_host(view: View) -> View:
    memory = (ctypes.c_uint8 * view.data.nbytes).from_address(view.data.address)
    return View(np.frombuffer(memory, view.dtype.storage), view.dtype)


def _start(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def device_on(runtime: HostRuntime) -> Device:
    """Return the device that a runtime plays."""
    inside = threading.local()
    users = lambda _, **__: getattr(inside, "users", None) or runtime.users  # noqa: E731
    entered = lambda _, stream: _using(inside, stream)  # noqa: E731
    return Device(runtime, HostKernels(runtime), 0, users=users, entered=entered)


@contextmanager
def stand_in(runtime: HostRuntime) -> Iterator[Device]:
    """Take torch's CPU tensors for tensors on a device that `runtime` plays, inside the `with` block."""
    before = gpus().stand_in
    device = gpus().stand_in = device_on(runtime)
    try:
        yield device
        runtime.finish()
    finally:
        gpus().stand_in = before


@contextmanager
def _using(inside: threading.local, stream: int) -> Iterator[None]:
    """Make a stream this thread's current one."""
    before, inside.users = getattr(inside, "users", None), [stream]
    try:
        yield
    finally:
        inside.users = before
