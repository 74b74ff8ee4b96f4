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
LATE = 30.0
"""Seconds after which a rank says, once per wait, what it is waiting for."""


def poll(done: Callable[[], bool], timeout: float, missing: Callable[[], str]) -> bool:
    """Return True as soon as `done()` does, False after `timeout` seconds.

    A wait of more than `LATE` seconds is told on stderr, with what `missing()` says.
    """
    for _ in range(SPINS):
        if done():
            return True
    for _ in range(YIELDS):
        if done():
            return True
        os.sched_yield()
    start = time.monotonic()
    told = False
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        if waited > LATE and not told:
            told = True
            text = f"mpizero: waiting since {LATE:.0f} s, of {timeout:g} s (MPIZERO_TIMEOUT): {missing()}\n"
            os.write(2, text.encode(errors="replace"))
        time.sleep(NAP)
    return True
