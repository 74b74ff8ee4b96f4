"""Counters of what a communicator moved and how long it waited."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Count this rank's traffic over one communicator since its construction.

    Only messages of our own schedules count; what the MPI library's own collectives move is not visible to us.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    """Payload bytes handed to the transport, without MPI's own headers."""
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """Seconds spent waiting for messages, transfer included."""

    def copy(self) -> Stats:
        """Return the counters as they are now."""
        return Stats(self.messages_sent, self.bytes_sent, self.bytes_received, self.wait_seconds)

    def since(self, before: Stats) -> Stats:
        """Return what was counted since `before` was copied."""
        return Stats(
            self.messages_sent - before.messages_sent,
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.wait_seconds - before.wait_seconds,
        )
