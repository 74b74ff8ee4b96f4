"""The flight record: what this rank called last, in a file mapped in memory that others read without its help.

[Note: record] One file per rank, of fixed size, on a disk or memory of its host:

    header     who this is, and how it ended
    groups     the communicators that are open: uid, size, this rank, members
    texts      every text once; its number is its place
    ring       the last `ENTRIES` calls: which, on which communicator, when it began and ended

It is written by stores alone, so it costs no system call, and it is there after a crash, a kill and a stop: the kernel
keeps a mapped file's pages. Peers on the host read it while it is written; an entry is zero before it is filled anew,
its number comes first and its state late, and a reader drops an entry that lacks one of them. While the process lives
it holds a lock on the file, which the kernel drops with it: so a reader knows whether the rank is alive, in another
container too.

Times are seconds of `time.monotonic`, one clock for all processes of a host; the header has the wall clock's offset.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import itertools
import mmap
import os
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import numpy as np

from mpizero.comm.raw import mpi
from mpizero.settings import settings
from mpizero.tables import ranges

if TYPE_CHECKING:
    from mpizero.comm.about import About

__all__ = [
    "DIED",
    "DONE",
    "FAILED",
    "LEFT",
    "RUNNING",
    "STOPPED",
    "UNDER_WAY",
    "Record",
    "clean",
    "conclude",
    "folder",
    "is_locked",
    "record",
    "space",
]

MAGIC = b"mpizrec1"
SUFFIX = ".record"
RUNNING, LEFT, DIED, STOPPED = range(1, 5)
"""States of a rank: at work; ended by its own exit; ended by an exception; ended by a signal or by mpizero."""
UNDER_WAY, DONE, FAILED = range(1, 4)
"""States of a call."""

ENTRIES = 4096
GROUPS = 512
TEXTS = 512 << 10
FOR_NAMES, FOR_CAUSE = 16 << 10, 8 << 10
"""Bytes that are kept free in the texts: for plain names of calls, and of these for how the process ends."""
NO_ROOM = "(no room for more texts)"

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("rank", "<i4"),
        ("size", "<i4"),
        ("pid", "<u4"),
        ("state", "<u4"),
        ("wall", "<f8"),
        ("began", "<f8"),
        ("ended", "<f8"),
        ("host", "<u4"),
        ("command", "<u4"),
        ("cause", "<u4"),
        ("room", "<u4"),
        ("stacks", "<u4"),
        ("space", "<u8"),
    ]
)
"""`wall` is the wall clock less the monotonic one; `room` the bytes of texts in use; host, command, cause: texts;
`stacks` is the signal at which the process writes its threads' stacks into the file beside this one, 0 for none;
`space` says in which namespace `pid` is its number."""
GROUP = np.dtype([("uid", "<u8"), ("size", "<i4"), ("rank", "<i4"), ("members", "<u4"), ("label", "<u4")])
ENTRY = np.dtype(
    [
        ("number", "<u8"),
        ("uid", "<u8"),
        ("sequence", "<u8"),
        ("nbytes", "<u8"),
        ("about", "<u4"),
        ("label", "<u4"),
        ("start", "<f8"),
        ("state", "<u4"),
        ("spare", "<u4"),
        ("end", "<f8"),
    ]
)
_BEGIN = struct.Struct("<QQQQIIdI4xd").pack_into
_END = struct.Struct("<I4xd").pack_into
_LOCK = struct.Struct("hhqqi0q")
"""The kernel's `struct flock`: type, whence, start, length, process."""
_AT_STATE = ENTRY.fields["state"][1]  # type: ignore[index]  # it has fields
AT_GROUPS = 4096
AT_TEXTS = AT_GROUPS + GROUPS * GROUP.itemsize
AT_RING = AT_TEXTS + TEXTS
SIZE = AT_RING + ENTRIES * ENTRY.itemsize

OLD = 24 * 3600.0
"""Seconds after which the record of a rank that failed is removed by whoever starts next."""
MOST = 256
"""Records of ranks that failed that are left, the newest."""


class Record:
    """Be this process's record."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        """Make the file.

        Args:
            path: where; its folder must exist.
            rank: the process's number in the job.
            size: ranks of the job.

        Raises:
            OSError: where there is no room, or no right to write; no file is left then.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file, 0, SIZE)  # a hole that finds no room later would be a SIGBUS
            self._map = mmap.mmap(self._file, SIZE)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(self._file)
            raise
        self._header = np.frombuffer(self._map, HEADER, 1)
        self._groups = np.frombuffer(self._map, GROUP, GROUPS, AT_GROUPS)
        self._texts: dict[str, int] = {}
        self._room = 8  # no text has the number 0
        self._numbers = itertools.count(1)
        self._latest = 0
        self._lock = RLock()
        """For what is written rarely: calls are written by one thread per communicator without it."""
        self.pid = os.getpid()
        head = self._header[0]
        head["rank"], head["size"], head["pid"], head["state"] = rank, size, self.pid, RUNNING
        head["began"] = time.monotonic()
        head["wall"] = time.time() - head["began"]
        head["space"] = space()
        head["host"], head["command"] = self.text(socket.gethostname()), self.text(" ".join(sys.argv)[:1000])
        head["magic"] = MAGIC

    @property
    def memory(self) -> mmap.mmap:
        """Return what is written to, for reading."""
        return self._map

    def text(self, text: str, free: int = FOR_NAMES) -> int:
        """Return the number of a text, written at its first use; that of `NO_ROOM` where there is none.

        Args:
            text: the text.
            free: bytes of all texts' that must stay free.
        """
        number = self._texts.get(text)
        return self._write(text, free) if number is None else number

    def _write(self, text: str, free: int) -> int:
        data = text.encode(errors="replace")[: 16 << 10]
        with self._lock:
            if text in self._texts:
                return self._texts[text]
            number, end = self._room, self._room + 2 + len(data)
            if end > TEXTS - free and text != NO_ROOM:
                return self.text(NO_ROOM)
            at = AT_TEXTS + number
            self._map[at : at + 2 + len(data)] = len(data).to_bytes(2, "little") + data
            self._room = self._header["room"] = end
            self._texts[text] = number
        return number

    def open_group(self, uid: int, rank: int, members: list[int], label: str = "") -> None:
        """Enter a communicator.

        Args:
            uid: its number, the same on all its ranks.
            rank: this process's rank in it.
            members: the job's ranks that it has, in order.
            label: what it is for.
        """
        with self._lock:
            free = np.flatnonzero(self._groups["uid"] == 0)
            if free.size:
                row = self._groups[free[0]]
                row["size"], row["rank"] = len(members), rank
                row["members"], row["label"] = self.text(ranges(members)), self.text(label) if label else 0
                row["uid"] = uid

    def close_group(self, uid: int) -> None:
        """Give the row of a communicator back."""
        self._groups["uid"][self._groups["uid"] == uid] = 0

    def begin(self, uid: int, sequence: int, what: About, label: str) -> int:
        """Enter a call that begins now; return its number for `end`.

        Args:
            uid: of the communicator.
            sequence: how many calls this rank has made on it, with this one.
            what: the call.
            label: what it is about, as a unit of a model; "" for nothing.
        """
        self._latest = number = next(self._numbers)
        at = AT_RING + number % ENTRIES * 64
        text = what.number or self._number(what)
        spoken = self.text(label) if label else 0
        _BEGIN(self._map, at, number, uid, sequence, what.nbytes, text, spoken, monotonic(), UNDER_WAY, 0.0)
        return number

    def _number(self, what: About) -> int:
        number = self.text(what.text)
        if number == self._texts.get(NO_ROOM):
            number = self.text(what.name, FOR_CAUSE)
        what.number = number
        return number

    def end(self, number: int, state: int = DONE) -> None:
        """Say that a call is over, unless so many have begun since that its place is another's."""
        if self._latest - number < ENTRIES:
            _END(self._map, AT_RING + number % ENTRIES * 64 + _AT_STATE, state, monotonic())

    def conclude(self, state: int, cause: str) -> None:
        """Say how this process ends; the first word counts."""
        head = self._header[0]
        if head["state"] == RUNNING and os.getpid() == self.pid:
            head["cause"], head["ended"] = self.text(cause[: FOR_CAUSE // 4], 64), time.monotonic()
            head["state"] = state

    def remove(self) -> None:
        """Remove the file; what is mapped stays readable for those that have it mapped."""
        if os.getpid() == self.pid:
            _remove(self.path)

    @property
    def stacks(self) -> Path:
        """Return where the threads' stacks are written."""
        return self.path.with_suffix(".stacks")

    def open_stacks(self, signal: int) -> TextIO:
        """Return the open file for them, and say that a signal has this process write there."""
        file = self.stacks.open("w")
        self._header["stacks"] = signal
        return file


def space() -> int:
    """Return a number of the namespace in which this process's id is counted; 0 where the system does not tell."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  (a cheap call of one number)
    return 0


def folder() -> Path | None:
    """Return the folder of this user's records on this host; None where none are kept."""
    chosen = settings().record
    if chosen is not None and not chosen.name:
        return None
    return chosen or Path(tempfile.gettempdir()) / f"mpizero-{_user()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        return str(os.getuid())


@cache
def record() -> Record | None:
    """Return this process's record, made at the first call; None where none is kept.

    Starts MPI. `MPIZERO_RECORD=0` keeps none; so does a host without room, which is said once.
    """
    place = folder()
    if place is None:
        return None
    world = mpi().COMM_WORLD
    name = f"{time.time_ns() // 1000:x}-{os.getpid()}-{world.rank:06d}{SUFFIX}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings().record is None and place.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder is another user's", str(place))
        clean(place)
        return Record(place / name, world.rank, world.size)
    except OSError as error:
        text = f"mpizero: rank {world.rank} keeps no flight record ({error}); MPIZERO_RECORD names another folder\n"
        os.write(2, text.encode(errors="replace"))
        return None


def conclude(state: int, cause: str) -> None:
    """Say in this process's record, if one has been made, how it ends."""
    mine = record() if record.cache_info().currsize else None
    if mine is not None:
        mine.conclude(state, cause)


def is_locked(file: int) -> bool:
    """Return whether another process holds a record's lock; asks the kernel, takes none.

    A reader that took the lock, if for a moment, could have it while a rank that starts wants it.
    """
    asked = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    try:
        return bool(_LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:  # a copy, on a file system without locks
        return False


def _age(data: bytes) -> float:
    """Return the seconds since a rank wrote last: of a mapped file on tmpfs, the file's own time is its making's."""
    head = np.frombuffer(data, HEADER, 1)[0]
    ring = np.frombuffer(data, ENTRY, ENTRIES, AT_RING)
    last = max(head["began"], head["ended"], ring["start"].max(), ring["end"].max())
    return float(time.time() - head["wall"] - last)


def clean(place: Path) -> None:
    """Remove the records of processes that are gone: those that ended well, and the old ones of the others."""
    kept = []
    for path in place.glob(f"*{SUFFIX}"):
        try:
            with path.open("rb") as file:
                if is_locked(file.fileno()):
                    continue
                head = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)[0]
                age = time.time() - head["wall"] - head["began"]
                if age > OLD:
                    file.seek(0)
                    age = _age(file.read(SIZE))
        except (OSError, ValueError, IndexError):
            continue  # being made, or gone meanwhile
        if head["magic"] == MAGIC and (head["state"] == LEFT or age > OLD):
            _remove(path)
        elif head["magic"] == MAGIC:
            kept.append((age, path))
    for _, path in sorted(kept)[MOST:]:
        _remove(path)


def _remove(path: Path) -> None:
    for one in (path, path.with_suffix(".stacks")):
        with suppress(OSError):  # another's, or gone
            one.unlink()
