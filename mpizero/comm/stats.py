"""Counters of what a communicator moved and how long it waited."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Count this rank's traffic over one communicator since its construction.

    Only our own schedules count; what the MPI library's own collectives move is not visible to us.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    """Payload bytes handed to the transport, without MPI's own headers."""
    bytes_received: int = 0
    bytes_loaded: int = 0
    """Bytes read from, and stored to, other ranks' memory, where the ranks of one host reach it."""
    wait_seconds: float = 0.0
    """Seconds spent waiting for messages, transfer included."""

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that this rank sent or, within a host, read from and stored to its peers' memory."""
        return self.bytes_sent + self.bytes_loaded

    def copy(self) -> Stats:
        """Return the counters as they are now."""
        return replace(self)

    def plus(self, other: Stats) -> Stats:
        """Return the sum of two communicators' counters."""
        return Stats(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, before: Stats) -> Stats:
        """Return what was counted since `before` was copied."""
        return Stats(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))
