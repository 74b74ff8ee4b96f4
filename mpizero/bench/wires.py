"""Communicators over the same ranks whose device memory takes one wire each, to measure wires side by side."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpizero.comm import Communicator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpizero.arrays import Device

__all__ = ["Wires", "forced_wire"]

VARIABLE = "MPIZERO_DEVICE_WIRE"


class Wires:
    """Hold a communicator for each wire."""

    def __init__(self, comm: Any, device: Device | None, wires: Sequence[str]) -> None:
        """Make the communicators and what they keep on the device. Collective.

        Args:
            comm: the ranks.
            device: this rank's; None where there are no wires.
            wires: out of `settings.DEVICE_WIRES`.

        Raises:
            DeviceMemoryError: on all ranks, where a device has no room.
        """
        self._comm = comm
        self._comms: dict[str, Communicator] = {}
        self.refused: dict[str, str] = {}
        """The wires that there are not here, with the reason; the same on all ranks."""
        for wire in wires:
            assert device is not None  # noqa: S101
            with forced_wire(wire):
                made = self._comms[wire] = Communicator(comm.mpi, timeout=comm.transport.timeout)
                side = made.side(device)
            if comm.size > 1 and wire == "loads" and side.windows is None:
                self.refused[wire] = "the ranks cannot load each other's GPU memory"
            if comm.size > 1 and wire == "messages" and not side.aware:
                self.refused[wire] = f"MPI is not known to take GPU memory: {side.why_aware}"

    def comm(self, wire: str) -> Any:
        """Return the communicator of a wire, or that of all for a name that is no wire of this run."""
        return self._comms.get(wire, self._comm)

    def close(self) -> None:
        """Close the communicators. Collective."""
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()


@contextmanager
def forced_wire(wire: str) -> Iterator[None]:
    """Have communicators choose a wire for device memory when they first meet it, inside the `with` block.

    The choice is read from the environment at that moment and then kept.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = wire
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
