"""What does the local steps of a schedule: the processor on host memory, or a GPU's stream on device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero.arrays import View, address_of, combine, copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.arrays import Device, DeviceArray, Event, Stream
    from mpizero.typing import Bytes, Wait

__all__ = ["HOST", "DeviceMachine", "Machine"]

ALIGN = 64


class Machine(Protocol):
    """Add, copy, pack and unpack, in the order of the calls."""

    def combine(self, op: str, dst: View, left: View, right: View, divisor: int) -> None:
        """Store `(left op right) / divisor` in `dst`; see `arrays.combine`."""
        ...

    def copy(self, dst: View, src: View, divisor: int) -> None:
        """Store `src / divisor` in `dst`; see `arrays.copy`."""
        ...

    def pack(self, views: list[Bytes]) -> Bytes:
        """Return the views' bytes one after the other."""
        ...

    def unpack(self, packed: Bytes, views: list[Bytes]) -> None:
        """Store packed bytes in the views, which adjoin in it."""
        ...

    def room(self, nbytes: int) -> Bytes:
        """Return memory for a message that is unpacked when it has come."""
        ...

    def settled(self) -> Wait | None:
        """Return the wait after which messages may touch what was worked on so far, None where there is none."""
        ...

    def turn(self) -> None:
        """Begin a round: the memory of the last one's packed messages is free."""
        ...


class _Host:
    """Work with the processor: what was called for is done when the call returns."""

    def combine(self, op: str, dst: View, left: View, right: View, divisor: int) -> None:
        combine(op, dst, left, right, divisor)

    def copy(self, dst: View, src: View, divisor: int) -> None:
        copy(dst, src, divisor)

    def pack(self, views: list[Bytes]) -> Bytes:
        return np.concatenate([view.view(np.uint8) for view in views])

    def unpack(self, packed: Bytes, views: list[Bytes]) -> None:
        position = 0
        for view in views:
            view.view(np.uint8)[:] = packed[position : position + view.nbytes]
            position += view.nbytes

    def room(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def settled(self) -> None:
        return None

    def turn(self) -> None:
        pass


HOST: Machine = _Host()


class DeviceMachine:
    """Work on one of a device's streams; see [Note: streams and MPI] in `arrays/device`."""

    def __init__(self, device: Device, stream: Stream, packing: DeviceArray, wait: Callable[[Event], Wait]) -> None:
        """Use a stream.

        Args:
            device: the device.
            stream: one that nobody else gives work to meanwhile.
            packing: memory for the packed messages of a round.
            wait: makes the wait for an event.
        """
        self._device, self._stream, self._packing, self._wait = device, stream, packing, wait
        self._used = 0
        self._busy = True
        """Whether work was started that no event has been waited for."""

    def combine(self, op: str, dst: View, left: View, right: View, divisor: int) -> None:
        """Start the addition of two views into a third."""
        self._busy = True
        self._device.kernels.reduce(op, [dst], [left, right], divisor, self._stream.handle)

    def copy(self, dst: View, src: View, divisor: int) -> None:
        """Start a copy."""
        self._busy = True
        self._device.kernels.reduce("copy", [dst], [src], divisor, self._stream.handle)

    def pack(self, views: list[Any]) -> Any:
        """Start packing views into memory that is theirs until the round is over."""
        packed = self.room(sum(view.nbytes for view in views))
        runs = [(address_of(view), place, view.nbytes) for view, place in _places(views, packed)]
        self._busy = True
        self._device.kernels.move(runs, self._stream.handle)
        return packed

    def unpack(self, packed: Any, views: list[Any]) -> None:
        """Start unpacking."""
        runs = [(place, address_of(view), view.nbytes) for view, place in _places(views, packed)]
        self._busy = True
        self._device.kernels.move(runs, self._stream.handle)

    def room(self, nbytes: int) -> Any:
        """Return memory that is the message's until the round is over."""
        start, self._used = self._used, self._used + -(-nbytes // ALIGN) * ALIGN
        return self._packing[start : start + nbytes]

    def settled(self) -> Wait | None:
        """Return the wait for all that was started, None where nothing was."""
        if not self._busy:
            return None
        self._busy = False
        return self._wait(self._stream.record())

    def turn(self) -> None:
        """Begin a round: the memory of the last one's packed messages is free."""
        self._used = 0


def _places(views: list[Any], packed: Any) -> list[tuple[Any, int]]:
    """Return the views with the addresses of their places in packed memory."""
    places, at = [], address_of(packed)
    for view in views:
        places.append((view, at))
        at += view.nbytes
    return places
