"""A run's diagnosis as text of at most 100 columns, in one line, and as JSON."""

from __future__ import annotations

import socket
import textwrap
from typing import TYPE_CHECKING, Any

from mpizero.cli.arrivals import latecomers, operations
from mpizero.cli.quantities import show_bytes
from mpizero.cli.verdict import clock, doing, ending, spell, verdict
from mpizero.tables import aligned, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.cli.dumps import Dump
    from mpizero.cli.runs import Run

__all__ = ["as_json", "as_line", "as_text"]

WIDTH = 98
SCHEMA_VERSION = 1
EACH = 16
"""Ranks up to which each has a line of its own; beyond, those that are alike share one."""
TOP = 8
"""Rows of the tables of latecomers and of operations."""


def as_text(run: Run) -> str:
    """Return the diagnosis: what is wrong, then the ranks, what they ended with, latecomers and times."""
    parts = [_head(run), "\n".join(_wrapped(line) for line in verdict(run)), _ranks(run)]
    parts += filter(None, (_causes(run), _notes(run), _latecomers(run), _operations(run)))
    return "\n\n".join(parts)


def as_line(run: Run) -> str:
    """Return a run in a line."""
    start = f"  {clock(run.began, day=True)}  {len(run.ranks)} of {run.size} ranks"
    return _short(f"{start}  {_short(run.command, 40)}: {verdict(run)[0]}", WIDTH)


def as_json(runs: Sequence[Run], others: Sequence[Run], left_out: list[dict[str, str]]) -> dict[str, Any]:
    """Return runs as what `json.dumps` takes; times are seconds since 1970, durations seconds, sizes bytes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [_run_json(run) for run in runs],
        "older_runs": [_short_json(run) for run in others],
        "left_out": left_out,
    }


def _short_json(run: Run) -> dict[str, Any]:
    return {
        "command": run.command,
        "began": run.began,
        "size": run.size,
        "missing": run.missing,
        "hosts": run.hosts,
        "files": [str(dump.path) for dump in run.ranks],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        **_short_json(run),
        "until": run.now,
        "verdict": verdict(run),
        "ranks": [_rank_json(run, dump) for dump in run.ranks],
        "communicators": [
            {"number": number, "ranks": run.members[uid], "label": run.label(uid)}
            for uid, number in run.numbers.items()
        ],
        "mismatches": [
            {
                "communicator": run.numbers[each.uid],
                "number": each.sequence,
                "calls": {str(rank): {"call": call.what, "label": call.label} for rank, call in each.calls.items()},
            }
            for each in run.mismatches
        ],
        "latecomers": [each._asdict() for each in latecomers(run)],
        "operations": [each._asdict() for each in operations(run)],
    }


def _rank_json(run: Run, dump: Dump) -> dict[str, Any]:
    return {
        "rank": dump.rank,
        "host": dump.host,
        "pid": dump.recorded.pid,
        "state": ending(dump),
        "alive": dump.alive,
        "cause": dump.recorded.cause,
        "ended": dump.ended or None,
        "last_sign": dump.last_sign,
        "calls": dump.calls[-1].number if dump.calls else 0,
        "behind": run.behind[dump.rank],
        "stacks": str(dump.stacks) if dump.stacks else None,
        "waits": [
            {
                "communicator": run.numbers[wait.call.uid],
                "number": wait.call.sequence,
                "call": wait.call.what,
                "label": wait.call.label,
                "since": wait.call.start,
                "missing": wait.missing,
            }
            for wait in run.waits
            if wait.rank == dump.rank
        ],
    }


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _head(run: Run) -> str:
    hosts = run.hosts
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"
    count = f"{run.size} ranks" if not run.missing else f"{len(run.ranks)} of {run.size} ranks"
    until = "now" if any(dump.alive for dump in run.ranks) else clock(run.now)
    lines = [f"{count} {where}, {clock(run.began, day=True)} to {until}: {run.command}"]
    if run.missing:
        missing = ranges(run.missing)
        lines.append(f"No record here of rank {missing}: copy the folders of all hosts together, and name that folder.")
    return "\n".join(map(_wrapped, lines))


def _ranks(run: Run) -> str:
    """Return the table of the ranks; of many, those that are alike in a row."""
    alike: dict[tuple[object, ...], list[Dump]] = {}
    for dump in run.ranks:
        key: tuple[object, ...] = (ending(dump), run.behind[dump.rank], doing(run, dump))
        alike.setdefault(key if len(run.ranks) > EACH else (dump.rank, *key), []).append(dump)
    rows: list[tuple[object, ...]] = [("rank", "host", "process", "", "calls", "behind", "since", "in")]
    for key, dumps in alike.items():
        first = dumps[0]
        hosts = dict.fromkeys(dump.host for dump in dumps)
        host = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
        pid = first.recorded.pid if len(dumps) == 1 else ""
        calls = first.calls[-1].number if first.calls else 0
        since = min(_since(run, dump) for dump in dumps)
        rows.append(
            (_short(ranges([dump.rank for dump in dumps]), 16), host, pid, key[-3], calls, key[-2], since, key[-1])
        )
    return _table(rows, right=(0, 2, 4, 5))


def _table(rows: Sequence[Sequence[object]], right: Sequence[int]) -> str:
    return "\n".join(_short(line, WIDTH) for line in aligned(rows, right=right).splitlines())


def _since(run: Run, dump: Dump) -> str:
    wait = run.first_waits.get(dump.rank)
    if wait is not None:
        return clock(wait.call.start)
    return clock(dump.calls[-1].end if dump.calls else dump.began)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _causes(run: Run) -> str:
    """Return what the ranks said when they ended, and where their stacks are."""
    said: dict[str, list[int]] = {}
    for dump in run.ranks:
        if dump.recorded.cause:
            said.setdefault(dump.recorded.cause, []).append(dump.rank)
    lines = [f"rank {ranges(ranks)} at its end: {' '.join(cause.split())}" for cause, ranks in list(said.items())[:TOP]]
    lines += [f"stacks of rank {dump.rank}: {dump.stacks}" for dump in run.ranks if dump.stacks]
    return "\n".join(map(_wrapped, lines))


def _notes(run: Run) -> str:
    lines = []
    if len(run.hosts) > 1:
        lines.append("Times on several hosts are compared by the hosts' wall clocks, and are as good as those agree.")
    if any(dump.is_silent and not _is_here(dump) for dump in run.ranks):
        lines.append('Of ranks on other hosts the files alone are seen: "no word" may be a job that still runs there.')
    return "\n".join(map(_wrapped, lines))


def _is_here(dump: Dump) -> bool:
    return dump.host == socket.gethostname()


def _latecomers(run: Run) -> str:
    found = latecomers(run)[:TOP]
    if not found:
        return ""
    rows: list[tuple[object, ...]] = [("last to a call", "times", "of", "median lag", "longest", "others waited")]
    rows += [
        (f"rank {each.rank}", each.times, each.of, spell(each.middle), spell(each.longest), spell(each.waited))
        for each in found
    ]
    return _table(rows, right=range(1, 6))


def _operations(run: Run) -> str:
    found = operations(run)[:TOP]
    if not found:
        return ""
    rows: list[tuple[object, ...]] = [
        ("calls that are over", "by", "times", "bytes each", "median", "longest", "time per rank")
    ]
    rows += [
        (
            each.name,
            each.algorithm or "-",
            each.calls,
            show_bytes(each.nbytes / each.calls),
            spell(each.middle),
            spell(each.longest),
            spell(each.per_rank),
        )
        for each in found
    ]
    return _table(rows, right=range(2, 7))
