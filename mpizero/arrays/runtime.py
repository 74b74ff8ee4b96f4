"""What a device is asked for: the functions of CUDA's runtime that are used, and the arithmetic of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.arrays.view import View

__all__ = ["Kernels", "Runtime"]


class Runtime(Protocol):
    """Be `cupy.cuda.runtime`, or what stands in for it: functions under CuPy's names, with CuPy's arguments.

    Addresses, streams and events are numbers. What CUDA refuses is raised, as an error with CUDA's number in `status`.
    """

    def setDevice(self, number: int) -> None:  # noqa: N802
        """Make a device the calling thread's current one."""
        ...

    def getDevice(self) -> int:  # noqa: N802
        """Return the number of the calling thread's current device."""
        ...

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        """Return the free and all bytes of the current device's memory."""
        ...

    def malloc(self, size: int) -> int:
        """Return the address of `size` bytes of device memory."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        """Return the address of `size` bytes of page-locked host memory."""
        ...

    def freeHost(self, address: int) -> None:  # noqa: N802
        """Give page-locked memory back."""
        ...

    def hostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        """Page-lock host memory."""
        ...

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        """Undo `hostRegister`."""
        ...

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        """Start a copy of `size` bytes on a stream."""
        ...

    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        """Return a new stream."""
        ...

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802
        """Have later work of a stream wait for an event."""
        ...

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        """Return a new event."""
        ...

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        """Give an event back; what waits for it goes on waiting."""
        ...

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        """Have an event mark the end of what a stream has been given."""
        ...

    def eventQuery(self, event: int) -> int:  # noqa: N802
        """Return 0 where the event has been reached, 600 where it has not, another number where work has failed."""
        ...

    def eventSynchronize(self, event: int) -> None:  # noqa: N802
        """Block until an event has been reached."""
        ...

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        """Return a handle by which other processes open an allocation."""
        ...

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        """Return the address of another process's allocation."""
        ...

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        """Close another process's allocation."""
        ...


class Kernels(Protocol):
    """Do the arithmetic of collectives on a device."""

    def reduce(self, op: str, targets: Sequence[View], sources: Sequence[View], divisor: int, stream: int) -> None:
        """Combine the sources in the canonical order, divide, round once, and store the result in every target.

        Args:
            op: sum, mean (adds), prod, max, min, or copy (of one source).
            targets: views of the element type, or of its accumulation type; may be exactly one of the sources.
            sources: likewise, at most 32, the lowest rank's first.
            divisor: 1, or the number of ranks for a mean.
            stream: the handle of the stream.
        """
        ...

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copy runs of device memory, each (from, to, bytes), in one go: pack or unpack."""
        ...
