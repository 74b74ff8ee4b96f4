"""Flight records as files that a job has left or is writing: found, read and put together to runs.

Each is copied into memory of its own when it is read, and its lock is asked for, not taken: a reader disturbs no rank.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpizero.comm.record import AT_RING, ENTRIES, ENTRY, HEADER, MAGIC, RUNNING, SIZE, SUFFIX, UNDER_WAY, is_locked
from mpizero.comm.recorded import Call, Recorded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mpizero.comm.recorded import Group

__all__ = ["Dump", "Unread", "find", "read", "read_all"]


class Unread(NamedTuple):
    """Say which file was left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Be one rank's record as it was when it was read."""

    path: Path
    recorded: Recorded
    alive: bool
    """Whether its process runs; of a record copied from elsewhere, whether it is known to."""
    process: str
    """The kernel's letter for what the process does, as `T` where it is stopped; "" where it cannot be seen."""
    offset: float
    """What makes its times seconds since 1970."""
    uids: frozenset[int]
    """The communicators that it has open, or used in its last calls."""

    @property
    def rank(self) -> int:
        """Return the rank in the job."""
        return self.recorded.rank

    @property
    def host(self) -> str:
        """Return the host's name."""
        return self.recorded.host

    @property
    def began(self) -> float:
        """Return when it began, in seconds since 1970."""
        return self.recorded.began + self.offset

    @property
    def ended(self) -> float:
        """Return when the rank said that it ends, in seconds since 1970; 0 where it did not."""
        return self.recorded.ended + self.offset if self.recorded.ended else 0.0

    @property
    def is_silent(self) -> bool:
        """Return whether the process is gone without a word: killed, or ended by `os._exit`."""
        return self.recorded.state == RUNNING and not self.alive

    @cached_property
    def groups(self) -> list[Group]:
        """Return the communicators that are open."""
        return self.recorded.groups()

    @cached_property
    def calls(self) -> list[Call]:
        """Return the last calls in their order, with times in seconds since 1970."""
        return [
            call._replace(start=call.start + self.offset, end=call.end + self.offset if call.end else 0.0)
            for call in self.recorded.calls()
        ]

    @cached_property
    def sequences(self) -> dict[int, int]:
        """Return the number of its last call on each communicator."""
        return {call.uid: call.sequence for call in sorted(self.calls, key=lambda call: call.sequence)}

    @property
    def under_way(self) -> list[Call]:
        """Return the calls that are not over, in their order."""
        return [call for call in self.calls if call.state == UNDER_WAY]

    @property
    def last_sign(self) -> float:
        """Return the time of the last thing that it wrote."""
        return max([self.began, self.ended, *(max(call.start, call.end) for call in self.calls)])

    @property
    def now(self) -> float:
        """Return the present on its clock where it is alive, else the time of its last sign."""
        if not self.alive:
            return self.last_sign
        return max(self.last_sign, time.monotonic() + self.offset if self.process else time.time())

    @property
    def stacks(self) -> Path | None:
        """Return the file with the stacks of its threads; None where there are none."""
        path = self.path.with_suffix(".stacks")
        try:
            return path if path.stat().st_size else None
        except OSError:
            return None


def find(places: Iterable[Path]) -> tuple[list[Path], list[Unread]]:
    """Return the records' files: files as they are given, and what folders hold, with the folders inside them."""
    found: dict[Path, None] = {}
    unread = []
    for place in places:
        inside = _inside(place)
        if isinstance(inside, Unread):
            unread.append(inside)
        else:
            found.update(dict.fromkeys(inside))
    return list(found), unread


def _inside(place: Path) -> list[Path] | Unread:
    try:
        if not place.is_dir():
            return [place]
        next(place.iterdir(), None)  # rglob keeps silent on a folder that may not be read
        return sorted(place.rglob(f"*{SUFFIX}"))
    except OSError as error:
        return Unread(place, error.strerror or str(error))


def read_all(paths: Iterable[Path]) -> tuple[list[Dump], list[Unread]]:
    """Return the records that can be read, and what is left out with the reason, as a copy of one that is there."""
    dumps: dict[tuple[str, int, int, float], Dump] = {}
    unread = []
    for path in paths:
        dump = _read(path)
        if isinstance(dump, Unread):
            unread.append(dump)
            continue
        record = dump.recorded
        first = dumps.setdefault((record.host, record.pid, record.rank, record.began), dump)
        if first is not dump:
            unread.append(Unread(path, f"the same record as {first.path}"))
    return list(dumps.values()), unread


def _read(path: Path) -> Dump | Unread:
    try:
        return read(path)
    except OSError as error:
        return Unread(path, error.strerror or str(error))
    except ValueError as error:
        return Unread(path, str(error))


def read(path: Path) -> Dump:
    """Return one record.

    Raises:
        OSError: where the file cannot be read.
        ValueError: for what is no whole record; the text says what is wrong with it.
    """
    if not path.is_file():
        raise ValueError("no such file" if not path.exists() else "not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(SIZE) if size <= SIZE else b""
        alive = is_locked(file.fileno())
    if len(data) < HEADER.itemsize or np.frombuffer(data, HEADER, 1)[0]["magic"] != MAGIC:
        raise ValueError("no flight record" if size else "empty")
    if len(data) < SIZE:
        raise ValueError(f"cut short, {len(data)} of {SIZE} bytes: copy it again")
    memory = mmap.mmap(-1, SIZE)
    memory[:] = data
    recorded = Recorded(path, memory)
    uids = np.frombuffer(memory, ENTRY, ENTRIES, AT_RING)["uid"]
    try:
        opened = {group.uid for group in recorded.groups()}
        process = recorded.process
        return Dump(
            path=path,
            recorded=recorded,
            alive=alive or bool(process),
            process=process,
            offset=recorded.wall,
            uids=frozenset(opened.union(np.unique(uids[uids != 0]).tolist())),
        )
    except (ValueError, OverflowError):
        raise ValueError("damaged: its list of communicators makes no sense") from None
