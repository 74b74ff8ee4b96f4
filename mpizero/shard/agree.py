"""Ranks tell each other what they are about to do, before they do it together.

A forward that only rank 0 runs, or a backward that one rank leaves out, would otherwise pair its gathers with other
ranks' gathers of other things: wrong numbers or a hang, in silence. One record per rank and root-level event (a few
dozen bytes) makes it an error on every rank that names what each one called (cases S9, S23). A rank that makes no call
at all is named by the transport's time-out.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from mpizero.collectives import all_gather
from mpizero.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveTimeoutError,
    MpiZeroError,
    ShardError,
    must_be,
)
from mpizero.tables import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "EVENTS",
    "Agreement",
    "Event",
    "agree",
    "agreements",
    "check_same",
    "gather_texts",
    "listed",
    "naming",
    "raise_together",
    "said_by",
]

EVENTS = (
    *("forward", "backward", "end of backward", "unsharded", "full_parameters", "clip_grad_norm_", "full_parameter"),
    *("save", "load", "watch_nonfinite", "check_replicas", "offloaded step"),
)


COUNT = "agreements"
SHOWN = 12
"""Names in an error, and ranks with words of their own."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Say what a rank is about to do with a sharded model."""

    kind: str
    unit: int = 0
    """The number of the outermost unit that a forward concerns; of a backward, a checksum of which parameters are
    trained."""
    training: bool = True
    grad: bool = True
    """Whether a forward is taken with grad, or a backward outside `no_sync`."""
    flags: int = 0
    """What this rank has found, as bits; the one field in which ranks may differ."""

    def code(self) -> list[int]:
        """Return the event as small numbers."""
        return [EVENTS.index(self.kind), self.unit, int(self.training), int(self.grad)]


def agreements(comm: Any) -> int:
    """Return how many agreements this rank has come to: the same number on all ranks, whatever they agreed on."""
    return int(comm.notes.get(COUNT, 0))


class Agreement:
    """Be an exchange of events that is under way: 20 bytes per rank."""

    def __init__(self, comm: Any, event: Event, names: list[str]) -> None:
        """Send this rank's event; see `agree`."""
        self._comm, self._names = comm, names
        self._event = event
        comm.notes[COUNT] = agreements(comm) + 1
        self._mine = np.array([*event.code(), event.flags], np.int32).view(np.uint8)
        self._work = all_gather(self._mine, comm, algorithm=_way(comm), async_op=True)

    def check(self) -> np.ndarray[Any, Any]:
        """Wait for all ranks' events; return their flags, and raise as `agree` does."""
        try:
            table = self._work.wait().reshape(self._comm.size, -1)
        except CollectiveTimeoutError as error:  # a rank with fewer batches, or that left the call out (case S7)
            here = _describe(self._event.code(), self._names)
            raise CollectiveTimeoutError(f"{here}: not all ranks came to it: {error}") from error
        heads = np.ascontiguousarray(table).view(np.int32)
        if (heads[:, :-1] != heads[0, :-1]).any():
            calls = "; ".join(f"rank {rank}: {_describe(row, self._names)}" for rank, row in enumerate(heads.tolist()))
            raise ShardError(
                f"all ranks must make the same call on a sharded model (got {calls}): to run the model on some ranks "
                "only, do it inside `with mpizero.unsharded(model):`, entered by all ranks"
            )
        return heads[:, -1:].astype(np.uint8)


def agree(comm: Any, event: Event, names: list[str], extra: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
    """Exchange events; return every rank's `extra` bytes, its `flags` first, as an array of shape (ranks, 1 + n).

    Args:
        comm: the model's communicator.
        event: what this rank is about to do.
        names: the units' names, for the error.
        extra: n bytes (uint8) to send along, equally many on all ranks.

    Raises:
        ShardError: on every rank, if the ranks are not about to do the same.
        CollectiveTimeoutError: if a rank does not come; says to what, and which.
    """
    flags = Agreement(comm, event, names).check()
    if extra is None:
        return flags
    # Apart from the events, which are of one size, so that ranks of different minds can be told what each one called.
    return np.concatenate([flags, all_gather(extra, comm, algorithm=_way(comm)).reshape(comm.size, -1)], axis=1)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in errors of collectives what they were about, where they do not (case S8)."""
    try:
        yield
    except CollectiveError as error:
        if what in str(error):
            raise
        raise type(error)(f"{what}: {error}") from error


def _way(comm: Any) -> str:
    return "direct" if comm.board is None else "loads"


def check_same(comm: Any, lines: list[str], what: str = "model and options") -> None:
    """Raise ArgumentError on every rank unless all ranks describe the same model, before anything of it is sent.

    Args:
        comm: the ranks.
        lines: this rank's description; only checksums travel, and a rank that differs says from which line on.
        what: what the lines are about, for the error.
    """
    sums = np.zeros(len(lines) + 1, np.int64)
    for index, line in enumerate(lines):
        sums[index + 1] = crc32(line.encode(), int(sums[index]))
    ends = all_gather(np.array([len(lines), sums[-1]], np.int64), comm, algorithm="direct").reshape(comm.size, 2)
    if (ends == ends[0]).all():
        return
    shortest = int(ends[:, 0].min())
    table = all_gather(sums[: shortest + 1], comm, algorithm="direct").reshape(comm.size, -1)
    equal = (table == table[0]).all(axis=0)
    first = int(equal.argmin()) - 1 if not equal.all() else shortest
    got = lines[first] if first < len(lines) else "nothing more"
    raise ArgumentError(must_be(what, "the same on all ranks", f"{got} on rank {comm.rank}"))


def gather_texts(comm: Any, text: str) -> list[str]:
    """Return every rank's text, in the order of ranks, by two all-gathers (one where all are empty). Collective."""
    mine = np.frombuffer(text.encode(), np.uint8).copy()
    lengths = all_gather(np.array([mine.size], np.int64), comm, algorithm="direct").tolist()
    if not any(lengths):
        return [""] * comm.size
    joined = all_gather(mine, comm, counts=lengths, algorithm="direct")
    return [part.tobytes().decode() for part in np.split(joined, np.cumsum(lengths)[:-1])]


def raise_together(comm: Any, found: MpiZeroError | str, kind: type[MpiZeroError]) -> None:
    """Raise an error with one and the same text on all ranks if any of them has something to say.

    Args:
        comm: the ranks.
        found: what is wrong on this rank; "" for nothing. Where all ranks say the same, an error is raised as it is,
            else it is one of `kind`.
        kind: of error.

    Collective: two all-gathers, one of 8 bytes per rank where nothing is wrong anywhere, none on one rank.
    """
    text = str(found)
    texts = gather_texts(comm, text) if comm.size > 1 else [text]
    if not any(texts):
        return
    if isinstance(found, MpiZeroError) and len(set(texts)) == 1:
        raise found
    raise kind(said_by(texts))


def said_by(texts: list[str]) -> str:
    """Return in one text what the ranks say; a rank's number stands before its words unless all say the same."""
    if len(set(texts)) == 1:
        return texts[0]
    who: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            who.setdefault(text, []).append(rank)
    lines = [f"{ranks_in_words(ranks, SHOWN)}: {text}" for text, ranks in who.items()]
    return listed(lines, "; ")


def listed(items: Any, between: str = ", ") -> str:
    """Return things in a row, a dozen at most, and how many there are beyond."""
    items = list(items)
    more = f"{between}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return between.join(str(item) for item in items[:SHOWN]) + more


def _describe(row: list[int], names: list[str]) -> str:
    kind, unit, training, grad = row[:4]
    if 0 <= kind < len(EVENTS) and EVENTS[kind] == "backward":
        return f"backward {'outside' if grad else 'inside'} no_sync" + (
            f", trained parameters #{unit:x}" if unit else ""
        )
    if not (0 <= kind < len(EVENTS) and 0 <= unit < len(names)):
        return "another collective"
    if EVENTS[kind] != "forward":
        return EVENTS[kind]
    return f"forward of {names[unit]!r} in {'train' if training else 'eval'} mode, {'with' if grad else 'no'} grad"
