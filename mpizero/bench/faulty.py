"""What runs in the ranks of `soak_faults`: mixed collectives, in the midst of which one rank fails.

`python -m mpizero.bench.faulty FAULT RANK AT SEED MARK`: rank RANK fails before its collective number AT and writes the
time into the file MARK first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.bench.mixed import Mix
from mpizero.comm import world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FAULTS", "STOP", "main"]

STOP = "SIGSTOP"
DELAY = 1.0
"""Seconds by which a rank is late."""
MORE = 30
"""Collectives after one that was late."""


def _raise() -> None:
    raise RuntimeError("a fault on purpose")


FAULTS: dict[str, Callable[[], None]] = {
    "delay": lambda: time.sleep(DELAY),
    "raise": _raise,
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    STOP: lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""By what they do to a rank."""


def main(argv: Sequence[str]) -> int:
    """Make mixed collectives until the fault ends the job, or a few more after one that does not. Collective.

    Args:
        argv: the fault, the rank, the collective, the seed, and where to write the time.
    """
    fault, victim, at, seed, mark = argv[0], int(argv[1]), int(argv[2]), int(argv[3]), Path(argv[4])
    comm = world()
    mix = Mix(comm, seed)
    pending = [FAULTS[fault]] if comm.rank == victim else []

    def before() -> None:
        if pending and mix.calls >= at:
            part = mark.with_suffix(".part")
            part.write_text(str(time.monotonic()))
            part.rename(mark)
            pending.pop()()

    mix.before = before
    while fault != "delay" or mix.calls < at + MORE:
        mix.turn()
    mix.close()
    return int(bool(mix.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
