"""Reading flight records: a live peer's, or those that a job has left; see [Note: record] in `record`."""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm.record import (
    AT_GROUPS,
    AT_RING,
    AT_TEXTS,
    ENTRIES,
    ENTRY,
    GROUP,
    GROUPS,
    HEADER,
    MAGIC,
    RUNNING,
    SIZE,
    UNDER_WAY,
    is_locked,
    space,
)
from mpizero.errors import ArgumentError, must_be

__all__ = ["Call", "Group", "Recorded"]

BY = " by "
"""Between what is called and how it is done; see `About`."""


class Call(NamedTuple):
    """Be one call of a rank."""

    number: int
    """Among all calls of the rank, from 1."""
    uid: int
    """Of the communicator."""
    sequence: int
    """Among the rank's calls on the communicator, from 1: the same call on every rank of it."""
    what: str
    label: str
    """What it was about, as a unit of a model; "" for nothing."""
    nbytes: int
    state: int
    """`UNDER_WAY`, `DONE` or `FAILED`."""
    start: float
    """In seconds of the host's monotonic clock."""
    end: float
    """The same; 0 while it is under way."""

    @property
    def plain(self) -> str:
        """Return what was called, without how it is done, which ranks need not have in common."""
        return self.what.partition(BY)[0]

    @property
    def algorithm(self) -> str:
        """Return how it is done; "" where that is not said."""
        return self.what.partition(BY)[2]

    @property
    def name(self) -> str:
        """Return the name of the collective alone."""
        return self.plain.partition("(")[0]

    @property
    def place(self) -> str:
        """Return a short name of the communicator, the same on all its ranks."""
        return f"communicator {self.uid & 0xFFFF:04x}"

    @property
    def title(self) -> str:
        """Return the call as `all_gather #1041 (blocks.7)`; see `place` for where it was made."""
        return f"{self.name} #{self.sequence}" + (f" ({self.label})" if self.label else "")


class Group(NamedTuple):
    """Be one communicator as one of its ranks sees it."""

    uid: int
    rank: int
    """Of the record's rank."""
    members: tuple[int, ...]
    """The job's ranks that it has, in order."""
    label: str


class Recorded:
    """Be one rank's record, which may be written meanwhile."""

    def __init__(self, path: Path, memory: mmap.mmap | None = None) -> None:
        """Map a file, or read this process's own in its memory: a file that is opened here loses its lock when closed.

        Raises:
            OSError: where it cannot be read.
            ArgumentError: for what is no record, or a part of one.
        """
        self.path = path
        self._file = -1 if memory else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = SIZE if memory else os.fstat(self._file).st_size
        if size == SIZE:
            memory = memory or mmap.mmap(self._file, SIZE, prot=mmap.PROT_READ)
            self._memory = memoryview(memory)
            self._header: Any = np.frombuffer(memory, HEADER, 1)[0]
            self._groups = np.frombuffer(memory, GROUP, GROUPS, AT_GROUPS)
            self._ring = np.frombuffer(memory, ENTRY, ENTRIES, AT_RING)
            self._texts: dict[int, str] = {0: ""}
        if size != SIZE or self._header["magic"] != MAGIC:
            self.close()
            got = f"{size} bytes" if size != SIZE else "other contents"
            raise ArgumentError(must_be(str(path), f"a flight record of {SIZE} bytes", got, "was it copied whole?"))

    def close(self) -> None:
        """Let the file go; what is mapped stays readable, and `is_alive` is told no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def rank(self) -> int:
        """Return the rank in the job."""
        return int(self._header["rank"])

    @property
    def size(self) -> int:
        """Return the ranks of the job."""
        return int(self._header["size"])

    @property
    def pid(self) -> int:
        """Return the process's id on its host."""
        return int(self._header["pid"])

    @cached_property
    def host(self) -> str:
        """Return the host's name."""
        return self.text(int(self._header["host"]))

    @cached_property
    def command(self) -> str:
        """Return the command line."""
        return self.text(int(self._header["command"]))

    @property
    def state(self) -> int:
        """Return `RUNNING`, `LEFT`, `DIED` or `STOPPED`, as the rank itself has said; see `is_alive`."""
        return int(self._header["state"])

    @property
    def cause(self) -> str:
        """Return why it ended; "" where it did not say."""
        return self.text(int(self._header["cause"]))

    @property
    def wall(self) -> float:
        """Return what to add to the record's times to get seconds since 1970."""
        return float(self._header["wall"])

    @property
    def began(self) -> float:
        """Return when the record was begun, in its own times."""
        return float(self._header["began"])

    @property
    def ended(self) -> float:
        """Return when the rank said that it ends; 0 where it did not."""
        return float(self._header["ended"])

    @property
    def is_near(self) -> bool:
        """Return whether `pid` is the process's number here too, and not another's in another container."""
        return int(self._header["space"]) == space()

    @property
    def asked_by(self) -> int:
        """Return the signal that makes the process write its stacks; 0 for none."""
        return int(self._header["stacks"])

    @property
    def has_wrapped(self) -> bool:
        """Return whether calls have been overwritten."""
        return bool((self._ring["number"] != 0).all())

    def is_alive(self) -> bool:
        """Return whether the process is there: it holds its lock, or is at least seen; True of one's own.

        A program that closes all its files, its record among them, has lost the lock and not its life.
        """
        return self._file < 0 or is_locked(self._file) or (self.is_near and bool(self.process))

    @property
    def process(self) -> str:
        """Return the kernel's letter for what the process does, as `T` where it is stopped; "" where it is not seen.

        It is seen where a process of this host with its number has a file of the record's name mapped, which one that
        is dead and waits for its parent has not.
        """
        try:
            if f"/{self.path.name}\n" not in Path(f"/proc/{self.pid}/maps").read_text(errors="replace"):
                return ""
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def is_lost(self) -> bool:
        """Return whether the process is gone and has not said how it ended: killed, or ended by `os._exit`."""
        # It may end in order between the two looks.
        return self.state == RUNNING and not self.is_alive() and self.state == RUNNING

    def text(self, number: int) -> str:
        """Return a text by its number."""
        if number not in self._texts:
            at = AT_TEXTS + number
            length = int.from_bytes(self._memory[at : at + 2], "little")
            self._texts[number] = bytes(self._memory[at + 2 : at + 2 + length]).decode(errors="replace")
        return self._texts[number]

    def groups(self) -> list[Group]:
        """Return the communicators that are open."""
        rows = self._groups[self._groups["uid"] != 0]
        return [
            Group(
                int(row["uid"]),
                int(row["rank"]),
                _members(self.text(int(row["members"]))),
                self.text(int(row["label"])),
            )
            for row in rows
        ]

    def calls(self) -> list[Call]:
        """Return the calls that are left in the ring, in their order."""
        return self._calls(np.flatnonzero(self._ring["number"]))

    def under_way(self) -> list[Call]:
        """Return the calls that are not over, in their order."""
        return self._calls(np.flatnonzero(self._ring["state"] == UNDER_WAY))

    def latest(self, uid: int | None = None) -> Call | None:
        """Return the last call that began, on a communicator or on any."""
        places = np.flatnonzero(self._ring["number"] if uid is None else self._ring["uid"] == uid)
        if not places.size:
            return None
        found = self._calls(places[[np.argmax(self._ring["number"][places])]])
        return found[0] if found else None

    def numbered(self, number: int) -> Call | None:
        """Return a call by its number among all of the rank; None where its place is another's."""
        found = self._calls(np.array([number % ENTRIES]))
        return found[0] if found and found[0].number == number else None

    def call(self, uid: int, sequence: int) -> Call | None:
        """Return a communicator's call by its number; None where the rank has not made it, or too long ago."""
        found = self._calls(np.flatnonzero((self._ring["uid"] == uid) & (self._ring["sequence"] == sequence)))
        return found[0] if found else None

    def _calls(self, places: np.ndarray[Any, Any]) -> list[Call]:
        rows = self._ring[places]
        rows = rows[(rows["number"] % ENTRIES == places) & (rows["state"] != 0)]  # the others are being written
        rows = rows[np.argsort(rows["number"], kind="stable")]
        return [
            Call(
                number=int(row["number"]),
                uid=int(row["uid"]),
                sequence=int(row["sequence"]),
                what=self.text(int(row["about"])),
                label=self.text(int(row["label"])),
                nbytes=int(row["nbytes"]),
                state=int(row["state"]),
                start=float(row["start"]),
                end=float(row["end"]),
            )
            for row in rows
        ]


def _members(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for run in filter(None, text.split(",")):
        low, _, high = run.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)
