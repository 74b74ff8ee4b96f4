"""Whether a communicator can still be used."""

from __future__ import annotations

__all__ = ["Health"]


class Health:
    """Be one flag that a communicator's wires share.

    A collective that is given up half-way, by an error, a time-out or a signal, leaves messages and flags behind that
    the next one would take for its own; whoever notices clears the flag, and every later collective is refused.
    """

    __slots__ = ("sound",)

    def __init__(self) -> None:
        self.sound = True
