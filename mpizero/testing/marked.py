"""Finding every process of a job by a mark in its environment, also those that its launcher has lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kill_marked", "marked"]

PATIENCE = 10.0
"""Seconds for which killed processes are waited for."""
POLL = 0.02


def marked(name: str, value: str) -> Iterator[int]:
    """Yield the processes of this host whose environment began with `name=value`; zombies have none.

    Args:
        name: of a variable that the job's launcher was started with, and that it hands on to its ranks.
        value: one that no other job has.
    """
    mark = f"{name}={value}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if mark in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def kill_marked(name: str, value: str) -> int:
    """Kill the processes that carry a mark, stopped ones too, and wait until they are gone; return how many it were."""
    killed: set[int] = set()
    end = time.monotonic() + PATIENCE
    while (found := set(marked(name, value))) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(POLL)
    return len(killed)
