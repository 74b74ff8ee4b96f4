"""How a rank waits: poll, then poll and yield the core, then sleep between polls, and give up after the time-out.

A rank that spins takes the core from the rank that it waits for wherever ranks outnumber cores, and a rank that blocks
inside MPI serves no signals. Hence one loop in Python for every wait.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["poll"]

SPINS = 40
"""Polls before the core is first given away: some ten microseconds, in which a peer that is running answers. Where
other programs want the core, a yield may cost a whole time slice."""
YIELDS = 200
"""Polls that give the core away before the first sleep."""
NAP = 50e-6
"""Seconds of one sleep: short beside a message of 1 MiB, long beside a scheduler's time slice."""


def poll(done: Callable[[], bool], timeout: float) -> bool:
    """Return True as soon as `done()` does, False after `timeout` seconds."""
    for _ in range(SPINS):
        if done():
            return True
    for _ in range(YIELDS):
        if done():
            return True
        os.sched_yield()
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(NAP)
    return True
