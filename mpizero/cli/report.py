"""`mpizero report`: says from the ranks' flight records what a job died of, or what it does now; needs no MPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.cli.dump_trace import trace_of
from mpizero.cli.dumps import find, read_all
from mpizero.cli.report_text import as_json, as_line, as_text
from mpizero.cli.runs import runs_of
from mpizero.comm.record import folder
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    import argparse

    from mpizero.cli.dumps import Dump, Unread
    from mpizero.cli.runs import Run

__all__ = ["configure", "run"]

NOTHING = 1
"""The exit code where there is no record to report."""
LISTED = 10
"""Other runs that are listed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    where = "folders of records, or single ones (default: MPIZERO_RECORD, or this user's folder on this host)"
    add("places", metavar="FOLDER|FILE", nargs="*", help=where)
    add("--all", action="store_true", help="report every run that is found, not the newest alone")
    add("--trace", metavar="OUT.json", help="write the newest run's calls for https://ui.perfetto.dev")
    add("--json", action="store_true", help="print JSON instead of text")
    parser.epilog = (
        "Works on what a job left behind and on a job that runs; disturbs neither. Of several hosts, copy the folders "
        "together. Exit code: 0 if a run was reported, 1 if there was no record, 2 for a wrong command line."
    )


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; what cannot be read is said in a line each, on stderr.

    Raises:
        ArgumentError: for a trace of several runs, or into a file that cannot be written, and for a default folder
            where none is kept.
    """
    dumps, unread = _read([Path(place) for place in options.places] or [_default()])
    for path, reason in unread:
        print(f"mpizero report: {path}: {reason}; left out", file=sys.stderr)
    if not dumps:
        places = ", ".join(options.places) or str(_default())
        print(f"mpizero report: no flight record in {places}", file=sys.stderr)
        return NOTHING
    runs = runs_of(dumps)
    chosen = runs if options.all else runs[:1]
    if options.trace:
        _write(options.trace, chosen)
    if options.json:
        left_out = [{"path": str(path), "reason": reason} for path, reason in unread]
        print(json.dumps(as_json(chosen, runs[len(chosen) :], left_out), indent=2))
    else:
        print("\n\n\n".join(map(as_text, chosen)))
        _others(runs[len(chosen) :])
    return 0


def _read(places: list[Path]) -> tuple[list[Dump], list[Unread]]:
    paths, unlisted = find(places)
    dumps, unread = read_all(paths)
    return dumps, unlisted + unread


def _default() -> Path:
    place = folder()
    if place is None:
        remedy = "name a folder of records, or unset it"
        raise ArgumentError(must_be("MPIZERO_RECORD", "a folder", "0", remedy))
    return place


def _others(runs: list[Run]) -> None:
    if runs:
        print(f"\n{len(runs)} older run{'s' if len(runs) > 1 else ''}, which --all reports too:")
    for each in runs[:LISTED]:
        print(as_line(each))
    if len(runs) > LISTED:
        print(f"and {len(runs) - LISTED} more")


def _write(name: str, runs: list[Run]) -> None:
    """Write the trace.

    Raises:
        ArgumentError: as of `run`.
    """
    if len(runs) > 1:
        raise ArgumentError(must_be("--trace", "of one run", f"{len(runs)} runs", "leave out --all, or name the files"))
    try:
        Path(name).write_text(json.dumps(trace_of(runs[0]), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(must_be("--trace", f"a file that can be written ({error.strerror})", name)) from None
