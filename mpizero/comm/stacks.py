"""Where another process of this host is in its Python code, without its help: by `faulthandler` at SIGUSR2."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpizero.comm.recorded import Recorded

__all__ = ["where"]

PATIENCE = 0.5
"""Seconds that a process has to write its stacks."""
SHOWN = 3
"""Frames, the innermost first."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def where(peer: Recorded) -> str:
    """Return the innermost frames of a process's main thread, `train.py:88 in step < train.py:120 in main`, or "".

    A stopped process does not answer, and one that has a handler of its own for SIGUSR2 is not asked.
    """
    path = peer.path.with_suffix(".stacks")
    if not peer.has_stacks:
        return ""
    with suppress(OSError):
        before = path.stat().st_size
        os.kill(peer.pid, signal.SIGUSR2)
        end = time.monotonic() + PATIENCE
        size = before
        while time.monotonic() < end:
            time.sleep(0.02)
            now = path.stat().st_size
            if now > before and now == size:
                break
            size = now
        return _innermost(path.read_bytes()[before:].decode(errors="replace"))
    return ""


def _innermost(text: str) -> str:
    """Return the frames of the thread that runs the program: the one whose stack ends in a module's body."""
    for block in text.split("\n\n"):
        frames = [found.groups() for line in block.splitlines() if (found := _FRAME.match(line))]
        if frames and frames[-1][2] == "<module>":
            return " < ".join(f"{Path(file).name}:{line} in {name}" for file, line, name in frames[:SHOWN])
    return ""
