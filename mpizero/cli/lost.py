"""Notice that a launcher has lost a host: Open MPI's mpirun says so, and may then end with exit code 0.

Tried with Open MPI 5.0.11, a host's processes all killed at once: the ranks on the other hosts are ended half-way,
"PRTE has lost communication with a remote daemon" or "A daemon failed to report back" comes on stdout or stderr, and
the exit code is 0, or what the remote shell's was: that of a job that went well. So its output is listened to, where
there may be several hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading

__all__ = ["Listener"]

SIGNS = re.compile(rb"lost communication with a remote daemon|A daemon failed to report back")
LONGEST = 64
"""Bytes in which any of them fits."""
PATIENCE = 1.0
"""Seconds for what is left in a pipe when the launcher has ended; something that it has started may hold it open."""


class Listener:
    """Pass on what a launcher writes to one of its streams, as it comes, and look for the loss of a host in it."""

    def __init__(self, stream: int) -> None:
        """Listen on behalf of file descriptor `stream`, 1 or 2."""
        reads, self.writes = os.pipe()
        """What to give to the launcher, and to close then."""
        self._lost = False
        self._thread = threading.Thread(target=self._pass_on, args=(reads, stream), daemon=True)
        self._thread.start()

    def lost_a_host(self) -> bool:
        """Wait for the rest of what the launcher, which has ended, has said; return whether it had lost a host."""
        self._thread.join(PATIENCE)
        return self._lost

    def _pass_on(self, reads: int, stream: int) -> None:
        tail = b""
        while data := os.read(reads, 1 << 16):
            tail += data
            self._lost = self._lost or SIGNS.search(tail) is not None
            tail = tail[-LONGEST:]
            with contextlib.suppress(OSError):  # nobody reads ours any more: the launcher must not be held up
                while data:
                    data = data[os.write(stream, data) :]
        os.close(reads)
