"""Copies between a model's device and host memory, beside what the device computes.

[Note: transfers] A model on a GPU whose state is offloaded has two streams of copies, one each way.

- Down, for gradients: the stream waits for the caller's, in whose order the reduction was waited for; the host looks at
  a copy once its event is done, in a thread of its own, which adds the gradients up while backward goes on. There are
  `AT_ONCE` copies at most, in as many pieces of page-locked memory; the next one waits for the first.
- Up, for parameters: inside `aside` the stream is torch's current one, behind the caller's. What is filled there and
  the gather that is called there wait for each other, the caller's stream for neither: it computes, and goes on behind
  them where the gather is waited for, or `follow` called. Host memory that was copied from is written again only once
  the copy's event is done.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpizero.errors import DeviceMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.arrays import Device, Event, Stream

__all__ = ["Transfers"]

AT_ONCE = 4


class Transfers:
    """Copy for one model; see [Note: transfers]."""

    def __init__(self, device: Device, *, pin: bool) -> None:
        """Make the streams.

        Args:
            device: where the model is.
            pin: whether host memory is page-locked: copies are faster, and the host does not wait for them.
        """
        self._device, self._pin = device, pin
        with device.current():
            self._down, self._up = device.stream(), device.stream()
        self._thread = ThreadPoolExecutor(1, "mpizero offload")
        self._landing: deque[Future[None]] = deque()
        self._spare: list[Tensor] = []
        """Bytes to copy down to; with those in use `AT_ONCE` at most."""
        self.bytes_down = self.bytes_up = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory of so many elements, uninitialised.

        Raises:
            DeviceMemoryError: where the system does not lock so much.
        """
        if not self._pin:
            return torch.empty(numel, dtype=dtype)
        nbytes = numel * dtype.itemsize
        try:
            with self._device.current():  # the caller's stays
                memory = self._device.pinned(nbytes)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{error}: pass mpizero.Offload(pin=False, ...)") from error
        return torch.from_numpy(memory[:nbytes]).view(dtype)

    def bring_down(self, values: Tensor, then: Callable[[Tensor], None]) -> None:
        """Copy a contiguous tensor of the device to the host, and call `then` with the copy, in another thread.

        Args:
            values: must not be changed by the caller any more.
            then: must not keep the copy.
        """
        while len(self._landing) >= AT_ONCE:
            self._landing.popleft().result()
        room = self._room(_nbytes(values))
        copy = room[: _nbytes(values)].view(values.dtype)
        with self._device.current():  # of events, and of what the stream of number 0 is
            for stream in self._device.users_streams():
                self._down.wait(stream.record())
            event = self._copy(copy, values, self._down, sleeping=True)
        self.bytes_down += _nbytes(values)

        def land() -> None:
            self._device.use()
            event.synchronize()
            then(copy)
            self._spare.append(room)

        self._landing.append(self._thread.submit(land))

    def _room(self, nbytes: int) -> Tensor:
        """Return memory to copy down to, a larger one in place of one that is too small."""
        spare = sorted((self._spare.pop() for _ in range(len(self._spare))), key=Tensor.numel)
        at = next((at for at, room in enumerate(spare) if room.numel() >= nbytes), 0)
        room = spare.pop(at) if spare else None
        self._spare += spare
        return room if room is not None and room.numel() >= nbytes else self.take(nbytes, torch.uint8)

    def settle(self) -> None:
        """Wait until all that was brought down has been taken; raises what failed first in doing so."""
        failures = []
        while self._landing:
            failures.append(self._landing.popleft().exception())
        for failure in failures:
            if failure is not None:
                raise failure

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do what is inside in the order of the copies up, behind what the caller's streams were given so far."""
        with self._device.current():
            for stream in self._device.users_streams():
                self._up.wait(stream.record())
            with self._device.entered(self._up):
                yield

    def bring_up(self, values: Tensor, into: Tensor) -> Event:
        """Copy a contiguous tensor to the device, inside `aside`.

        Args:
            values: in host memory; not to be changed until the event is done.
            into: of as many elements, on the device.

        Returns:
            An event behind the copy.
        """
        self.bytes_up += _nbytes(values)
        return self._copy(into, values, self._up)

    def move(self, values: Tensor, into: Tensor) -> None:
        """Copy a contiguous tensor within the device, inside `aside`."""
        self._copy(into, values, self._up)

    def follow(self) -> None:
        """Have the caller's streams go on behind all that was brought up."""
        with self._device.current():
            event = self._up.record()
            for stream in self._device.users_streams():
                stream.wait(event)

    def _copy(self, into: Tensor, values: Tensor, stream: Stream, *, sleeping: bool = False) -> Event:
        if values.numel():
            self._device.copy_bytes(into.data_ptr(), values.data_ptr(), _nbytes(values), stream)
        event = stream.record(sleeping=sleeping)
        self._device.keep(event, into, values)
        return event


def _nbytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
