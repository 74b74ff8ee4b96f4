"""Strict mode: every collective is compared over all its ranks when it is issued, before anything is moved.

Each rank posts a hash of what it calls and waits for those of the others: on one host in memory that all map, else by a
gather of eight bytes per rank. A rank that calls something else is named with what it calls, on all ranks; one that
does not come is found by the time-out, whose text says where all ranks are. Issuing is a meeting of all ranks then, of
asynchronous collectives too: two that are issued in different orders on two communicators are an error, although they
could be carried out.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import DTYPES, View
from mpizero.comm.about import unlike
from mpizero.comm.board import make_board
from mpizero.comm.native import NativeCollectives
from mpizero.comm.stats import Stats
from mpizero.comm.waiting import drive
from mpizero.errors import CollectiveError

if TYPE_CHECKING:
    from mpizero.comm.about import About
    from mpizero.comm.health import Health

__all__ = ["Strict"]

REMEMBERED = 4096
"""Hashes that are kept."""
SHOWN = 12
"""Ranks in a list; the others are counted."""


class Strict:
    """Compare the calls of one communicator's ranks."""

    def __init__(self, mpi_comm: Any, *, timeout: float, health: Health, shares: bool) -> None:
        """Duplicate a communicator, which is collective over it.

        Args:
            mpi_comm: an mpi4py communicator of more than one rank.
            timeout: seconds that a rank waits for the others to make their call.
            health: the communicator's; a mismatch ends it.
            shares: whether all ranks are on one host and may share memory.
        """
        self._comm = mpi_comm.Dup()
        self._health = health
        self._board = make_board(self._comm, timeout, health) if shares else None
        self._native = NativeCollectives(self._comm, timeout, health)
        self._stats = Stats()
        self._digests: dict[tuple[About, str], int] = {}
        self._posted = np.empty(1, np.uint64)
        self._found = np.empty(mpi_comm.size, np.uint64)
        self._offsets = list(range(mpi_comm.size + 1))

    def check(self, what: About, label: str) -> None:
        """Return once all ranks are about to make the same call.

        Args:
            what: the call.
            label: what it is about, as a unit of a model; compared too.

        Raises:
            CollectiveError: on all ranks, where they differ; says what each calls.
            CollectiveTimeoutError: where a rank does not come.
        """
        digest = self._digests.get((what, label)) or self._digest(what, label)
        alike = self._gather(digest) if self._board is None else self._meet(digest, what)
        if not alike:
            self._health.sound = False
            calls: dict[str, list[int]] = {}
            for rank, call in enumerate(self._comm.allgather(what.plain + (f" ({label})" if label else ""))):
                calls.setdefault(call, []).append(rank)
            raise CollectiveError(unlike(calls, SHOWN))

    def close(self) -> None:
        """Free the communicator; collective."""
        self._board = None
        self._comm.Free()

    def _meet(self, digest: int, what: About) -> bool:
        board: Any = self._board
        board.number += 1
        words, records = board.words, board.records[board.number & 1]
        words[records[board.rank]] = digest
        board.arrive()
        board.await_all(board.arrived, what.name, self._stats)
        return all(words[at] == digest for at in records)

    def _gather(self, digest: int) -> bool:
        self._posted[0] = digest
        kind = DTYPES["uint64"]
        drive(iter((self._native.all_gather(View(self._posted, kind), View(self._found, kind), self._offsets),)))
        return bool((self._found == digest).all())

    def _digest(self, what: About, label: str) -> int:
        if len(self._digests) == REMEMBERED:
            self._digests.clear()
        text = blake2b(label.encode(), digest_size=8, key=what.digest.to_bytes(8, "little"))
        self._digests[what, label] = digest = int.from_bytes(text.digest(), "little")
        return digest
