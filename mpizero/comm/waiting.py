"""How a rank waits: poll, then poll and yield the core, then sleep between polls, and give up after the time-out.

A rank that spins takes the core from the rank that it waits for wherever ranks outnumber cores, and a rank that blocks
inside MPI serves no signals. Hence one loop in Python for every wait.

[Note: steps] A collective is a generator that yields a `Wait` wherever it cannot go on. `drive` runs one to its end in
the caller's thread; the progress thread keeps several under way and polls their waits in turn. Nothing else differs
between a synchronous and an asynchronous call.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mpizero.comm.launch import cores
from mpizero.comm.watch import LOOK, look_around, story
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpizero.typing import Wait

__all__ = ["ADVICE", "drive", "poll", "spins_for"]

ADVICE = (
    "Either those ranks are slower than the time-out (MPIZERO_TIMEOUT, seconds) or they never made "
    "this call: every rank must make the same collective calls in the same order, a forward pass of a sharded "
    "model included (to evaluate on some ranks only, wrap that in `with mpizero.unsharded(model):` on all)"
)
"""What a time-out means, for the error of one."""

SPINS = 40
"""Polls before the core is first given away: some ten microseconds, in which a peer that is running answers. Where
other programs want the core, a yield may cost a whole time slice."""
YIELDS = 200
"""Polls that give the core away before the first sleep."""
NAP = 50e-6
"""Seconds of one sleep: short beside a message of 1 MiB, long beside a scheduler's time slice."""
LATE = 30.0
"""Seconds after which a rank says, once per wait, what it is waiting for."""


def spins_for(ranks: int, spins: int = SPINS) -> int:
    """Return `spins`, or 1 where so many ranks outnumber the cores, all of them taken to be on one host."""
    return spins if ranks <= cores() else 1


def poll(
    done: Callable[[], bool],
    timeout: float,
    missing: Callable[[], str],
    *,
    spins: int = SPINS,
    needs: tuple[int, Callable[[], Sequence[int]]] | None = None,
) -> bool:
    """Return True as soon as `done()` does, False after `timeout` seconds.

    A wait of more than `LATE` seconds is told on stderr, with what `missing()` says.

    Args:
        done: the question; asked often.
        timeout: seconds.
        missing: what to say of a wait that is late.
        spins: polls before the core is first given away; few where ranks outnumber cores.
        needs: for a wait outside any call of a communicator: its uid, and what tells the ranks that have to be there.
    """
    for _ in range(spins):
        if done():
            return True
    for _ in range(YIELDS):
        if done():
            return True
        os.sched_yield()
    start = time.monotonic()
    look, tell = LOOK, LATE
    while not done():
        waited = time.monotonic() - start
        if waited > look:
            look = waited + LOOK
            if needs is None:
                look_around()
            else:
                look_around(missing, needs[0], needs[1]())
        if waited > tell or waited > timeout:
            if waited > timeout and not goes_on():
                return False
            tell_late(waited, timeout, missing())
            tell, timeout = float("inf"), timeout if waited <= timeout else 2 * timeout
        time.sleep(NAP)
    return True


def goes_on() -> bool:
    """Return whether a rank waits on after the time-out; where it does, it says more rarely for whom."""
    return settings().on_timeout == "wait"


def tell_late(waited: float, timeout: float, missing: str) -> None:
    """Say on stderr how long this rank has been waiting, for what, and where the others are."""
    where = story()
    text = f"mpizero: waiting since {waited:.3g} s, of {timeout:.3g} s (MPIZERO_TIMEOUT): {missing}\n"
    os.write(2, f"{text}{where}{chr(10) * bool(where)}".encode(errors="replace"))


def drive(steps: Iterator[Wait]) -> None:
    """Run a collective's steps to their end in this thread; see [Note: steps].

    Raises:
        CollectiveTimeoutError: if a wait takes longer than its time-out; a wait that is left half-way, by that or by a
            signal's exception, leaves its wire broken.
    """
    for wait in steps:
        start = time.perf_counter()
        finished = False
        try:
            finished = wait.block()
        finally:
            wait.settle(time.perf_counter() - start, finished=finished)
        if not finished:
            raise wait.late()
