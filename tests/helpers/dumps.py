"""Flight records as jobs leave them, made up without a job."""

import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np

from mpizero.comm.about import About
from mpizero.comm.record import AT_RING, DONE, ENTRIES, ENTRY, HEADER, RUNNING, UNDER_WAY, Record

WORLD = 77
WALL = 1_700_000_000.0
"""Seconds since 1970 of the time 0 of all made-up records."""


def dump(
    folder, rank, calls=(), size=3, *, groups=None, state=RUNNING, cause="", ended=0.0, host="a", began=0.0, **head
):
    """Write the record of a rank that is gone and return its path.

    A call is (what, start, end) or (what, start, end, label), on the first of the groups; with end 0 it is under way.
    Or it is a dict with `uid`, `sequence` and `state` too.
    """
    folder.mkdir(exist_ok=True)
    record = Record(folder / f"making-{rank}", rank, size)
    groups = {WORLD: range(size)} if groups is None else groups
    for uid, members in groups.items():
        record.open_group(uid, list(members).index(rank), list(members))
    sequences = {}
    ring = np.frombuffer(record.memory, ENTRY, ENTRIES, AT_RING)
    for each in calls:
        call = each if isinstance(each, dict) else dict(zip(("what", "start", "end", "label"), each, strict=False))
        uid = call.get("uid", next(iter(groups), WORLD))
        sequence = sequences[uid] = call.get("sequence", sequences.get(uid, 0) + 1)
        what, _, algorithm = call["what"].partition(" by ")
        about = About(what.partition("(")[0], what, nbytes=call.get("nbytes", 16), algorithm=algorithm)
        number = record.begin(uid, sequence, about, call.get("label", ""))
        row = ring[number % ENTRIES]
        row["start"], row["end"] = call["start"], call["end"]
        row["state"] = call.get("state", DONE if call["end"] else UNDER_WAY)
    header = np.frombuffer(record.memory, HEADER, 1)[0]
    header["began"], header["wall"], header["state"], header["ended"] = began, WALL, state, ended
    header["host"], header["command"] = record.text(host), record.text(head.pop("command", "train.py"))
    header["cause"] = record.text(cause) if cause else 0
    for name, value in head.items():
        header[name] = value
    path = folder / f"{rank:06d}.record"
    shutil.copy(record.path, path)  # of another name than what this process has mapped: nobody's
    record.path.unlink()
    return path


HOLDER = """
import fcntl, mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
for file in files: fcntl.lockf(file, fcntl.LOCK_EX)
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def alive(*paths):
    """Make a process live that holds the records as theirs do, and give it."""
    line = [sys.executable, "-c", HOLDER, *map(str, paths)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
