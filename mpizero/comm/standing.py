"""Where a rank is, in words: seen from a call that another waits in, read from its record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from mpizero.comm.record import DONE, RUNNING, UNDER_WAY
from mpizero.comm.stacks import where
from mpizero.tables import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.comm.recorded import Call, Recorded

__all__ = ["Member", "Standing", "after", "died", "grouped", "has_done", "standing"]

SOME = 4
"""Calls of a rank that are told."""
SHOWN = 12
"""Ranks in a line; the others are counted."""
LINES = 24
"""Lines; the ranks of the others are counted."""


class Member(NamedTuple):
    """Say who a rank of a communicator is."""

    host: str
    rank: int
    """In the job."""
    record: str
    """Where its host has its record; "" where it keeps none."""
    node: int
    """The number of its host among the job's."""


class Standing(NamedTuple):
    """Say where a rank is, seen from a call that another waits in."""

    rank: int
    """In the job."""
    gone: bool
    """Whether it will not come any more."""
    text: str


def standing(rank: int, peer: Recorded | None, seen_from: Call | None, *, ask: bool = False) -> Standing:
    """Say where a rank is.

    Args:
        rank: in the job.
        peer: its record; None where that cannot be read, in another container perhaps.
        seen_from: the call in which another waits; None where it waits outside any.
        ask: whether a rank in code of its own is asked for its stack, which takes tens of milliseconds.
    """
    if peer is None:
        return Standing(rank, gone=False, text="its record cannot be read here")
    if peer.is_lost():
        return Standing(rank, gone=True, text=died(peer))
    if peer.state != RUNNING:
        gone = seen_from is None or not has_done(peer, seen_from)
        return Standing(rank, gone=gone, text=f"ended ({peer.cause}){after(peer)}")
    stopped = "stopped (by SIGSTOP, or a debugger), " if peer.is_near and peer.process in {"T", "t"} else ""
    ask = ask and not stopped  # it would not answer
    if seen_from is None:
        return Standing(rank, gone=False, text=stopped + _whereabouts(peer, None, ask=ask))
    return Standing(rank, gone=False, text=stopped + _stage(peer, seen_from, ask=ask))


def _stage(peer: Recorded, seen_from: Call, *, ask: bool) -> str:
    call = peer.call(seen_from.uid, seen_from.sequence)
    if call is None:
        return f"not in it yet: {_whereabouts(peer, seen_from, ask=ask)}"
    if call.state != UNDER_WAY:
        return "through it already" if call.state == DONE else "gave it up"
    return "waiting in it too" if call.plain == seen_from.plain else f"in {call.plain} in its place"


def _whereabouts(peer: Recorded, seen_from: Call | None, *, ask: bool) -> str:
    """Say what a rank does that has not come to a call."""
    now = time.monotonic()
    under_way = peer.under_way()
    if under_way:
        calls = []
        for call in under_way[:SOME]:
            elsewhere = f" on {call.place}" if seen_from is None or call.uid != seen_from.uid else ""
            calls.append(f"{call.title}{elsewhere}, {call.plain}, since {now - call.start:.1f} s")
        more = f", and in {len(under_way) - SOME} more" if len(under_way) > SOME else ""
        return f"in {', and in '.join(calls)}{more}"
    last = peer.latest()
    since = peer.began if last is None else last.end
    place = where(peer) if ask else ""
    return f"in code of its own since {now - since:.1f} s{after(peer)}" + (f", at {place}" if place else "")


def has_done(peer: Recorded, call: Call) -> bool:
    """Return whether a rank that has left did all that a call needs of it, as far as is known."""
    its = peer.call(call.uid, call.sequence)
    if its is not None:
        return its.state == DONE and its.name == call.name
    latest = peer.latest(call.uid)
    if latest is None:
        return peer.has_wrapped  # so many calls ago, if at all, that its record has no place for it any more
    return latest.sequence > call.sequence


def died(peer: Recorded) -> str:
    """Say of a rank whose process is gone without a word what it was in."""
    under_way = peer.under_way()
    place = f" in {under_way[-1].title}" if under_way else f" in code of its own{after(peer)}"
    return f"died{place} (killed, or by os._exit)"


def after(peer: Recorded) -> str:
    """Say which call a rank made last."""
    last = peer.latest()
    return f" after {last.title}" if last is not None else " before its first call"


def grouped(standings: Sequence[Standing]) -> str:
    """Return standings as lines, ranks with the same text in one; those that are missing first."""
    texts: dict[str, list[int]] = {}
    for one in standings:
        texts.setdefault(one.text, []).append(one.rank)
    last = ("waiting in it too", "through it already")
    lines = sorted(texts.items(), key=lambda item: (item[0].endswith(last), min(item[1])))
    shown = [f"  {ranks_in_words(sorted(ranks), SHOWN)}: {text}" for text, ranks in lines]
    left = sum(len(ranks) for _, ranks in lines[LINES:])
    return "\n".join([*shown[:LINES], *([f"  and {left} ranks more"] if left else [])])
