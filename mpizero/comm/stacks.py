"""Where another process of this host is in its Python code, without its help: by `faulthandler` at a signal.

The signal is one of the real-time signals. SIGUSR2, as schedulers and their users know it, may get a handler of the
program's at any time, unseen from outside, which a question would start.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpizero.comm.record import Record
    from mpizero.comm.recorded import Recorded

__all__ = ["ASK", "answer_for", "where"]

ASK = signal.SIGRTMIN + 12
"""The signal."""
PATIENCE = 2.0
"""Seconds that a process has to write its stacks."""
AGAIN = 0.2
"""Seconds after which it is asked again: faulthandler drops a signal that comes to one thread while another writes."""
SHOWN = 3
"""Frames, the innermost first."""
_HEADER = re.compile(r"^(Current thread|Thread) 0x")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def answer_for(mine: Record) -> None:
    """Have this process write its threads' stacks beside its record when it is asked, unless it uses the signal."""
    if signal.getsignal(ASK) == signal.SIG_DFL:
        with suppress(OSError):
            faulthandler.register(ASK, file=mine.open_stacks(ASK), all_threads=True)


def where(peer: Recorded) -> str:
    """Return the innermost frames of a process's main thread, `train.py:88 in step < train.py:120 in main`, or "".

    A stopped process does not answer; one in another container cannot be asked.
    """
    path = peer.path.with_suffix(".stacks")
    if not peer.asked_by or not peer.is_near:
        return ""
    with suppress(OSError):
        before = size = path.stat().st_size
        if not peer.is_alive():
            return ""
        end, again = time.monotonic() + PATIENCE, 0.0
        while (clock := time.monotonic()) < end:
            if clock >= again:
                os.kill(peer.pid, peer.asked_by)
                again = clock + AGAIN
            time.sleep(0.01)
            now = path.stat().st_size
            # Another rank may have asked too, and `before` lie in the midst of what it is told.
            found = _innermost(path.read_bytes()[before:].decode(errors="replace")) if now == size > before else ""
            if found:
                return found
            size = now
    return ""


def _innermost(text: str) -> str:
    """Return the frames of the thread that began the program, the last one of a dump."""
    frames: list[tuple[str, ...]] | None = None
    for line in text.splitlines():
        if _HEADER.match(line):
            frames = []
        elif frames is not None and (found := _FRAME.match(line)):
            frames.append(found.groups())
    return " < ".join(f"{Path(file).name}:{line} in {name}" for file, line, name in (frames or [])[:SHOWN])
