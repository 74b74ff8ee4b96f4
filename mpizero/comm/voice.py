"""What a rank's messages are about: the channel in use, which each thread has for itself.

The caller's thread may be deciding a collective of one channel while the progress thread posts messages of another.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.typing import Wait

__all__ = ["Voice"]


class Voice(threading.local):
    """Hold the thread's channel, from 1, or 0 outside any, and what it is about."""

    channel = 0
    label = ""

    @contextmanager
    def speak(self, channel: int, label: str) -> Iterator[None]:
        """Use a channel inside the `with` block, and then the one before."""
        before = self.channel, self.label
        self.channel, self.label = channel, label
        try:
            yield
        finally:
            self.channel, self.label = before

    def name(self, what: str) -> str:
        """Return `what`, with what it is about."""
        return f"{what} of {self.label}" if self.label else what

    def carry(self, steps: Iterator[Wait]) -> Iterator[Wait]:
        """Return steps that keep the present channel, whichever thread runs them and whenever."""
        channel, label = self.channel, self.label

        def carried() -> Iterator[Wait]:
            while True:
                with self.speak(channel, label):
                    wait = next(steps, None)
                if wait is None:
                    return
                yield wait

        return carried()
