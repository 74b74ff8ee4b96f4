"""What is wrong with a run, in sentences, the cause first."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING

from mpizero.comm.record import DIED, FAILED, LEFT, STOPPED
from mpizero.tables import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpizero.cli.dumps import Dump
    from mpizero.cli.runs import Mismatch, Run, Wait
    from mpizero.comm.recorded import Call

__all__ = ["clock", "doing", "ending", "spell", "verdict"]

HANGS = 1.0
"""Seconds that a rank which is alive waits before it is said to."""
PEERS = ("CollectiveTimeoutError", "CollectiveError")
"""Errors by which a rank says what others do: consequences, where there is another cause."""
SPOKEN = 300
"""Characters of a cause that are said."""
MOST = 4
"""Lines of one kind."""


def verdict(run: Run) -> list[str]:
    """Return the sentences, the cause first."""
    lines = [_mismatch(run, mismatch) for mismatch in run.mismatches[:MOST]]
    lines += _blames(run, _raised(run) or _silent(run, run.roots) or _left(run))
    if not lines:
        lines = _circle(run) or [*_blames(run, _gone(run)), *_held_up(run)]
    lines += _waiters(run)
    return lines or [_fine(run)]


def _blames(run: Run, dumps: list[Dump]) -> list[str]:
    lines = [_blame(run, dump) for dump in dumps[:MOST]]
    return [*lines, f"So did {len(dumps) - MOST} ranks more."] if len(dumps) > MOST else lines


def ending(dump: Dump) -> str:
    """Return how a rank ended, or that it did not, in a few words."""
    if dump.is_silent:
        return "no word"
    if dump.recorded.state in {DIED, STOPPED, LEFT}:
        return {DIED: "raised", STOPPED: "was ended", LEFT: "left"}[dump.recorded.state]
    return "is stopped" if dump.process in {"T", "t"} else "is alive"


def doing(run: Run, dump: Dump) -> str:
    """Return the call that a rank is in, or was in when it ended, or the last one that it has left."""
    wait = run.first_waits.get(dump.rank)
    if wait is not None:
        return wait.call.title
    return f"own code after {dump.calls[-1].title}" if dump.calls else "own code, no call yet"


def spell(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 0.1:
        return f"{max(0.0, seconds) * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"


def clock(moment: float, *, day: bool = False) -> str:
    """Return a time of day in this host's time zone to tenths of a second, or with the date to seconds."""
    if day:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    tenths = int(moment * 10)
    return time.strftime("%H:%M:%S", time.localtime(tenths / 10)) + f".{tenths % 10}"


def _mismatch(run: Run, mismatch: Mismatch) -> str:
    made: dict[tuple[str, str], list[int]] = {}
    for rank, call in mismatch.calls.items():
        made.setdefault((call.plain, call.label), []).append(rank)
    by_label = len({what for what, _ in made}) == 1
    parts = [
        f"{_ranks(ranks)} called {what}" + (f" for {label or 'nothing named'}" if label or by_label else "")
        for (what, label), ranks in list(made.items())[:MOST]
    ]
    more = f", and {len(made) - MOST} calls more" if len(made) > MOST else ""
    where = run.place(mismatch.uid) or f" on the communicator of ranks {ranges(run.members[mismatch.uid])}"
    return f"The ranks differ in call {mismatch.sequence}{where}: {', '.join(parts)}{more}."


def _raised(run: Run) -> list[Dump]:
    """Return the rank that raised first, those left out that raised because others did not come."""
    raised = [dump for dump in run.ranks if dump.recorded.state == DIED and not _gave_up(run, dump)]
    return sorted(raised, key=lambda dump: dump.ended)[:1]


def _gave_up(run: Run, dump: Dump) -> bool:
    """Return whether a rank ended by a collective that raised: a consequence, not a cause."""
    wait = run.first_waits.get(dump.rank)
    start = dump.recorded.cause[:SPOKEN]
    said = dump.recorded.state == DIED and any(peer in start for peer in PEERS)
    return wait is not None and (said or (dump.is_silent and wait.call.state == FAILED))


def _silent(run: Run, among: Iterable[int]) -> list[Dump]:
    """Return the ranks that went without a word."""
    return [dump for dump in run.ranks if dump.rank in among and dump.is_silent]


def _gone(run: Run) -> list[Dump]:
    """Return the ranks that went without a word while others waited for nobody; where all did, none is the first."""
    silent = _silent(run, run.by_rank)
    if len(silent) == len(run.ranks):
        return []
    with_the_job = {wait.rank for wait in run.waits if wait.missing} if _anyone_gave_up(run) else set()
    return [dump for dump in silent if dump.rank not in with_the_job]


def _anyone_gave_up(run: Run) -> bool:
    return any(_gave_up(run, dump) for dump in run.ranks)


def _left(run: Run) -> list[Dump]:
    """Return the ranks that ended by themselves while others waited for them."""
    return [dump for dump in run.ranks if dump.recorded.state == LEFT and dump.rank in run.roots]


def _blame(run: Run, dump: Dump) -> str:
    who = f"Rank {dump.rank} on {dump.host}"
    said = _said(dump)
    where = f"it was {_where(run, dump)}."
    if dump.recorded.state == DIED:
        return f"{who} raised {said or 'an exception'}; {where}"
    if dump.recorded.state == LEFT:
        return f"{who} left{f' ({said})' if said else ''}; {where}"
    if _anyone_gave_up(run):
        return f"{who} did not come, and ended without a word, before the job did or with it; {where}"
    if all(other.is_silent for other in run.ranks):
        likely = f"rank {dump.rank} on {dump.host} was likely the first (killed, or os._exit)"
        return f"No rank said why it ended; {likely}: {where}"
    return f"{who} ended without a word (killed, or os._exit); {where}"


def _said(dump: Dump) -> str:
    """Return the cause of an end in a line."""
    lines = dump.recorded.cause.strip().splitlines()
    return textwrap.shorten(lines[0], SPOKEN, placeholder=" ...") if lines else ""


def _where(run: Run, dump: Dump) -> str:
    """Return where a rank was at its end or is now: ` in CALL since`, or in its own code since another."""
    wait = run.first_waits.get(dump.rank)
    if wait is not None:
        return f"in {_call(run, wait.call)} since {_since(run, wait.call.start)}"
    if not dump.calls:
        return "in its own code and had called nothing"
    last = dump.calls[-1]
    until = dump.ended or (run.now if dump.alive else 0.0)
    how_long = f", {spell(until - last.end)} after" if until else " after"
    return f"in its own code{how_long} {_call(run, last)} at {clock(last.end)}"


def _circle(run: Run) -> list[str]:
    circle = run.circle
    if not circle or not _lasts(run, circle):
        return []
    after = circle[1:] + circle[:1]
    parts = [f"rank {one.rank} in {_call(run, one.call)} for rank {other.rank}" for one, other in zip(circle, after)]  # noqa: B905  (as long)
    return [f"Ranks wait for each other in a circle: {', '.join(parts)}."]


def _held_up(run: Run) -> list[str]:
    """Return what the ranks do that are waited for, none of which has ended."""
    if not _lasts(run, [wait for wait in run.waits if wait.missing]):
        return []
    lines = []
    absent = [rank for rank in run.roots if rank not in run.by_rank]
    for rank in [rank for rank in run.roots if rank in run.by_rank][:MOST]:
        dump = run.by_rank[rank]
        call = next(wait.call for wait in run.waits if rank in wait.missing)
        how = {"is stopped": " and is stopped (SIGSTOP)", "was ended": " and was ended"}.get(ending(dump), "")
        cause = f" ({_said(dump)})" if dump.recorded.cause and how else ""
        verb = "was" if ending(dump) == "was ended" else "is"
        lines.append(
            f"Rank {rank} on {dump.host} has not entered {_call(run, call)}{how}{cause}; it {verb} {_where(run, dump)}."
        )
    if absent:
        lines.append(f"{_ranks(absent).capitalize()} of which no record is here had not entered what others wait in.")
    return lines


def _waiters(run: Run) -> list[str]:
    """Return who waits in what, the calls in which most wait first."""
    together: dict[tuple[int, int], list[Wait]] = {}
    for wait in run.first_waits.values():
        together.setdefault((wait.call.uid, wait.call.sequence), []).append(wait)
    lines = []
    for waits in sorted(together.values(), key=len, reverse=True)[:MOST]:
        if not _lasts(run, waits):
            continue
        first = min(waits, key=lambda wait: wait.call.start)
        missing = sorted({rank for wait in waits for rank in wait.missing})
        whom = f" for {_ranks(missing)}" if missing else ", which all its ranks had entered,"
        alive = any(run.by_rank[wait.rank].alive for wait in waits)
        verb = ("waits" if len(waits) == 1 else "wait") if alive else "waited"
        who = _ranks([wait.rank for wait in waits]).capitalize()
        since = _since(run, first.call.start)
        lines.append(f"{who} {verb} in {_call(run, first.call)}{whom} since {since}.")
    return lines


def _lasts(run: Run, waits: Sequence[Wait]) -> bool:
    """Return whether a rank waits that will not go on, or has waited for long."""
    return any(not run.by_rank[wait.rank].alive or run.now - wait.call.start > HANGS for wait in waits)


def _fine(run: Run) -> str:
    count = {word: [d.rank for d in run.ranks if ending(d) == word] for word in map(ending, run.ranks)}
    if set(count) == {"left"}:
        return f"{_all(run)} left by their own exit."
    if set(count) == {"is alive"}:
        return f"{_all(run)} are at work; none waits for long."
    if set(count) == {"no word"}:
        return "No rank said why it ended, and none waited for another: all were killed, or left by os._exit."
    parts = [f"{_ranks(ranks)}: {word}" for word, ranks in count.items()]
    causes = dict.fromkeys(dump.recorded.cause for dump in run.ranks if dump.recorded.cause)
    return "; ".join([*parts, *causes]) + "."


def _all(run: Run) -> str:
    return f"All {run.size} ranks" if not run.missing else f"The {len(run.ranks)} ranks that have records here"


def _call(run: Run, call: Call) -> str:
    return f"{call.title}{run.place(call.uid)}"


def _since(run: Run, moment: float) -> str:
    alive = any(dump.alive for dump in run.ranks)
    return f"{clock(moment)} ({spell(run.now - moment)})" if alive else clock(moment)


def _ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 0-2,4`."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {ranges(listed)}"
