"""Device memory, and what a GPU does with it for a collective: allocate, copy, add, and say when that is done.

Everything goes through a few functions of CUDA's runtime, those of `cupy.cuda.runtime`, so that a stand-in on the host
can take their place in tests (`testing/host_runtime`), and through `Kernels`, the arithmetic.

[Note: streams and MPI] A kernel or a copy that was started is not done; it runs some time later, in the order of its
stream and in no order with other streams and with the host. MPI, the other ranks and the host's own loads know nothing
of streams. So, everywhere in mpizero:

1. A collective begins by recording an event on every stream that the caller may have used (torch's current one and
   CuPy's), and its own streams wait for these before they touch a buffer, be it to read or to write it.
2. Memory is shown to MPI, to a peer or to the host's loads only when an event recorded behind all work on it is done,
   as seen by the host: before a send, for what writes the buffer; before a receive, for what still reads it.
3. A received message is there when MPI or the peer says so; work started after that sees it.
4. The collective ends by recording an event on its own stream, for which the caller's streams wait: the device waits,
   the host does not.
5. Memory that work in flight touches is kept alive until an event behind that work is done (`Device.keep`), and is used
   again only behind such an event: the caller may drop its arrays at once.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays.device_array import DeviceArray, address_of
from mpizero.errors import DeviceError, DeviceMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from mpizero.arrays.runtime import Kernels, Runtime

__all__ = ["Device", "Event", "Stream"]

_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the runtime sees from the addresses which way a copy goes."""
_NON_BLOCKING = 1
"""cudaStreamNonBlocking: no order with the legacy default stream but the one that events make."""
_NO_TIMING = 2
"""cudaEventDisableTiming."""
_PORTABLE = 1
"""cudaHostAllocPortable and cudaHostRegisterPortable: page-locked for all devices."""
_BLOCKING_SYNC = 1
"""cudaEventBlockingSync: who waits sleeps, and leaves its core to others."""
_SUCCESS, _OUT_OF_MEMORY, _NOT_READY = 0, 2, 600


class Event:
    """Mark a place in a stream: done once all work before it is."""

    __slots__ = ("__weakref__", "_finished", "_runtime", "handle")

    def __init__(self, runtime: Runtime, stream: int, *, sleeping: bool = False) -> None:
        """Record an event on `stream`; whoever synchronizes with it waits by `sleeping`, or by looking all the time."""
        self._runtime, self._finished = runtime, False
        self.handle = runtime.eventCreateWithFlags(_NO_TIMING | (_BLOCKING_SYNC if sleeping else 0))
        runtime.eventRecord(self.handle, stream)
        weakref.finalize(self, runtime.eventDestroy, self.handle).atexit = False

    def done(self) -> bool:
        """Return whether it has been reached; never blocks.

        Raises:
            DeviceError: where the device has failed meanwhile.
        """
        if not self._finished:
            status = self._runtime.eventQuery(self.handle)
            if status not in {_SUCCESS, _NOT_READY}:
                raise DeviceError(f"the device must finish what it was given (got CUDA error {status})")
            self._finished = status == _SUCCESS
        return self._finished

    def synchronize(self) -> None:
        """Block until it has been reached."""
        if not self._finished:
            self._runtime.eventSynchronize(self.handle)
            self._finished = True


class Stream:
    """Be a queue of work on a device, run in its order."""

    __slots__ = ("_runtime", "handle")

    def __init__(self, runtime: Runtime, handle: int) -> None:
        """Name the stream `handle`."""
        self._runtime, self.handle = runtime, handle

    def record(self, *, sleeping: bool = False) -> Event:
        """Return an event behind all work given so far; see `Event`."""
        return Event(self._runtime, self.handle, sleeping=sleeping)

    def wait(self, event: Event) -> None:
        """Have later work wait for an event; the host does not."""
        self._runtime.streamWaitEvent(self.handle, event.handle)


def empty_pools() -> None:
    """Have torch and CuPy give back the device memory that they keep for later, those of them that are loaded."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if cupy is not None and cupy.cuda.is_available():
        cupy.get_default_memory_pool().free_all_blocks()


class _Allocation:
    """Own device memory; freed when the last array of it is dropped."""

    __slots__ = ("__weakref__",)

    def __init__(self, free: Callable[[int], None], address: int) -> None:
        # At exit the driver frees all memory, and may be gone before Python is.
        weakref.finalize(self, free, address).atexit = False


class _Pinned:
    """Offer page-locked host memory as an array, and own it."""

    def __init__(self, free: Callable[[int], None], address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "typestr": "|u1", "shape": (nbytes,), "version": 3}
        weakref.finalize(self, free, address).atexit = False


class Device:
    """Be one GPU as seen by this process."""

    def __init__(
        self,
        runtime: Runtime,
        kernels: Kernels,
        number: int,
        *,
        users: Callable[..., Sequence[int]],
        entered: Callable[[int, int], AbstractContextManager[Any]],
    ) -> None:
        """Use a device.

        Args:
            runtime: `cupy.cuda.runtime`, or what stands in for it.
            kernels: the arithmetic.
            number: the device's index among those that this process sees.
            users: gives the handles of the streams that the caller's libraries use now on the device of a number; told
                by `cupys` whether CuPy arrays are concerned.
            entered: makes the stream of a handle torch's current one, on the device of a number, in a `with` block.
        """
        self.runtime, self.kernels, self.number = runtime, kernels, number
        self._users, self._entered = users, entered
        self._kept: list[tuple[Event, Any]] = []
        self._lock = threading.Lock()

    def memory(self) -> int:
        """Return the bytes of memory that the device has in all."""
        self.use()
        return int(self.runtime.memGetInfo()[1])

    def use(self) -> None:
        """Make it this thread's current device, for a thread that is the library's own."""
        self.runtime.setDevice(self.number)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the caller's current device inside the `with` block, and then the one before."""
        before = self.runtime.getDevice()
        if before == self.number:  # to set it would make a context on it, were there none
            yield
            return
        self.runtime.setDevice(self.number)
        try:
            yield
        finally:
            self.runtime.setDevice(before)

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return uninitialised bytes of plain `cudaMalloc`, which other processes can be given (see `share`).

        Raises:
            DeviceMemoryError: where the device has no room.
        """
        self.use()
        try:
            address = self._malloc(max(nbytes, 1))
        except Exception as error:
            if getattr(error, "status", None) != _OUT_OF_MEMORY:
                raise
            text = f"GPU {self.number} must have {nbytes:,} bytes free for collectives (got too few): free tensors"
            raise DeviceMemoryError(text) from error
        return DeviceArray(self, address, nbytes, np.uint8, _Allocation(self._free, address))

    def _malloc(self, nbytes: int) -> int:
        """Allocate, if need be with what the caller's libraries keep for later given back."""
        try:
            return self.runtime.malloc(nbytes)
        except Exception as error:
            if getattr(error, "status", None) != _OUT_OF_MEMORY:
                raise
            empty_pools()
            return self.runtime.malloc(nbytes)

    def _free(self, address: int) -> None:
        with self.current():
            self.runtime.free(address)

    def _close(self, address: int) -> None:
        with self.current():
            self.runtime.ipcCloseMemHandle(address)

    def pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uninitialised bytes of page-locked host memory, which copies reach at full speed.

        Raises:
            DeviceMemoryError: where the system does not lock so much.
        """
        self.use()
        try:
            address = self.runtime.hostAlloc(max(nbytes, 1), _PORTABLE)
        except Exception as error:
            if getattr(error, "status", None) != _OUT_OF_MEMORY:
                raise
            text = f"the host must have {nbytes:,} bytes of page-locked memory for GPU {self.number} (got too few)"
            raise DeviceMemoryError(text) from error
        return np.asarray(_Pinned(self.runtime.freeHost, address, nbytes))

    def pin(self, memory: np.ndarray[Any, Any]) -> bool:
        """Page-lock host memory until its array is dropped; return whether the system lets us."""
        self.use()
        address = memory.ctypes.data
        try:
            self.runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except Exception:  # noqa: BLE001  (CuPy's error class cannot be named without CuPy; unpinned memory works too)
            return False
        owner = memory  # views keep that alive, and not the array between
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        weakref.finalize(owner, self.runtime.hostUnregister, address).atexit = False
        return True

    def share(self, array: DeviceArray) -> bytes:
        """Return the handle by which another process opens an array that `allocate` returned.

        Raises:
            DeviceError: where the system gives none.
        """
        self.use()
        try:
            return bytes(self.runtime.ipcGetMemHandle(array.address))
        except Exception as error:
            raise self._refused(error) from error

    def open(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Return another process's memory, closed when the last array of it is dropped.

        Raises:
            DeviceError: where the system does not let one process reach the other's memory.
        """
        self.use()
        try:
            address = self.runtime.ipcOpenMemHandle(handle)
        except Exception as error:
            raise self._refused(error) from error
        return DeviceArray(self, address, nbytes, np.uint8, _Allocation(self._close, address))

    def _refused(self, error: Exception) -> DeviceError:
        rule = "open to the other processes of the host by CUDA IPC"
        return DeviceError(f"memory of GPU {self.number} must be {rule} (got {error})")

    def stream(self) -> Stream:
        """Return a new stream; made once per communicator and never destroyed."""
        self.use()
        return Stream(self.runtime, self.runtime.streamCreateWithFlags(_NON_BLOCKING))

    def users_streams(self, *, cupys: bool = False) -> list[Stream]:
        """Return the streams that the calling thread's libraries use now: torch's current one and CuPy's.

        CuPy's default stream is one of them if `cupys`, that is, if CuPy arrays are concerned.
        """
        handles = dict.fromkeys(self._users(self.number, cupys=cupys))
        return [Stream(self.runtime, handle) for handle in handles]

    def entered(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make a stream torch's current one inside the `with` block."""
        return self._entered(self.number, stream.handle)

    def copy(self, dst: Any, src: Any, stream: Stream) -> None:
        """Start a copy of bytes between device memory and page-locked host memory, or within either.

        Args:
            dst: a `DeviceArray` or a numpy array.
            src: likewise, of as many bytes.
            stream: where the copy is queued.
        """
        if src.nbytes:
            self.copy_bytes(address_of(dst), address_of(src), src.nbytes, stream)

    def copy_bytes(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Start a copy between addresses, as `copy` does."""
        self.runtime.memcpyAsync(dst, src, nbytes, _ANY_DIRECTION, stream.handle)

    def keep(self, event: Event, *owners: Any) -> None:
        """Keep objects alive until an event is done, as found out by the next call of this or of `let_go`."""
        with self._lock:
            self._kept.append((event, owners))
        self.let_go()

    def let_go(self) -> None:
        """Forget what was kept until events that are done."""
        over: list[tuple[Event, Any]] = []
        left: list[tuple[Event, Any]] = []
        with self._lock:
            for kept in self._kept:
                (over if kept[0].done() else left).append(kept)
            self._kept = left
        over.clear()  # here, since what goes with it may free memory, and take its time

    def __repr__(self) -> str:
        """Return its number."""
        return f"GPU {self.number}"
