"""The processes of a job that have outlived their launcher: found by a variable that they all carry, and ended.

Standard library alone, and a script too, `python -I sweep.py MARK`: a launcher starts it on other hosts, where mpizero
need not be installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

__all__ = ["MARK", "end", "members"]

MARK = "MPIZERO_JOB"
"""The variable that a job's processes carry: launchers put them into groups and sessions of their own, and when the
launcher is dead nothing else says what they belonged to."""
PATIENCE = 5.0
"""Seconds that the kernel is given to take killed processes away, with their memory and their GPUs."""

Processes = dict[int, str]
"""Process numbers, each with when it was born: a number may be given out again."""


def members(mark: str) -> Processes:
    """Return this host's processes whose environment has MARK=`mark`, and all that descend from them; not this one."""
    wanted = f"{MARK}={mark}".encode()
    entries = {int(entry.name): entry for entry in Path("/proc").glob("[0-9]*")}
    parents = {pid: _born(pid) for pid in entries}
    found = {pid for pid, entry in entries.items() if wanted in _variables(entry)}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return {pid: parents[pid][1] for pid in found if pid != os.getpid()}


def end(processes: Processes) -> None:
    """Kill processes, stopped ones too, and wait until they are gone."""
    for pid, born in processes.items():
        if _born(pid)[1] == born:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while any(_running(pid, born) for pid, born in processes.items()) and time.monotonic() < deadline:
        time.sleep(0.02)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _born(pid: int) -> tuple[int, str]:
    """Return a process's parent and its start time in clock ticks; (0, "") where it is gone."""
    fields = _stat(pid)
    return (int(fields[1]), fields[19]) if fields else (0, "")


def _running(pid: int, born: str) -> bool:
    """Return whether it is there; one that is dead and not yet reaped is not."""
    fields = _stat(pid)
    return bool(fields) and fields[19] == born and fields[0] not in "ZX"


def _variables(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    end(members(sys.argv[1]))
