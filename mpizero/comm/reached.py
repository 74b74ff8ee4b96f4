"""Waits for a device, and steps that all ranks take or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mpizero.comm.waiting import poll, spins_for
from mpizero.errors import CollectiveTimeoutError, DeviceError, DeviceMemoryError, MpiZeroError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.arrays import Event

__all__ = ["Reached", "together"]

SPINS = 2000
"""Looks at an event, each somewhat under a microsecond, before the core is given away: kernels and copies of a piece
take some hundred microseconds, and a sleep as long again. Not measured."""
Made = TypeVar("Made")


class Reached:
    """Wait for an event of a stream."""

    def __init__(self, event: Event, transport: Any, what: str) -> None:
        """Wait for `event` in the collective called `what`, as long as `transport` waits for a message."""
        self._event, self._transport, self._what = event, transport, what

    def done(self) -> bool:
        """Return whether the stream has come to it; never blocks."""
        return self._event.done()

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once it has, or what `done` asks instead, False after the time-out."""
        transport = self._transport
        return poll(done or self.done, transport.timeout, self._text, spins=spins_for(transport.size, SPINS))

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self._transport.stats.wait_seconds += seconds

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return bool(seconds > self._transport.timeout)

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait; work that was given up may still write."""
        self.count(seconds)
        if not finished:
            self._transport.health.sound = False

    def late(self) -> CollectiveTimeoutError:
        """Say that the device is late."""
        return CollectiveTimeoutError(f"{self._text()} for more than {self._transport.timeout:g} s (MPIZERO_TIMEOUT)")

    def _text(self) -> str:
        transport = self._transport
        return f"{self._what}: rank {transport.rank} of {transport.size} waits for its GPU"


def together(mpi_comm: Any, make: Callable[[], Made]) -> Made:
    """Return what `make` returns, if it does on every rank; where it fails on one, all raise. Collective.

    Raises:
        DeviceMemoryError: where a device of some rank has no room.
        DeviceError: where `make` raised another of mpizero's errors on some rank; the text names the rank.
    """
    made: Made | None = None
    failure: MpiZeroError | None = None
    try:
        made = make()
    except MpiZeroError as error:
        failure = error
    found = mpi_comm.allgather(None if failure is None else (isinstance(failure, DeviceMemoryError), str(failure)))
    failed = [(rank, *each) for rank, each in enumerate(found) if each is not None]
    if not failed:
        return made  # type: ignore[return-value]  # there was no failure here either
    rank, _, text = failed[0]
    kind = DeviceMemoryError if any(lacks_room for _, lacks_room, _ in failed) else DeviceError
    raise kind(f"rank {rank}: {text}") from failure
