"""`mpizero doctor --disk PATH`: what a disk carries for state and parameters that are moved out of memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from mpizero.bench.disk import DiskSpeed, measure_disk
from mpizero.comm import world
from mpizero.errors import LaunchError, MpiNotFoundError, MpiZeroError
from mpizero.tables import aligned, ranges

__all__ = ["disk_report", "disk_text"]

MILLION = 100e6
"""Parameters of a rank's shard for which a step is reckoned."""
READ, WRITTEN = 12, 14
"""Bytes per parameter of a step of Adam over master values and two moments in fp32, and the bf16 copy of the former."""


def disk_report(path: str) -> int:
    """Measure on all ranks at once and print on rank 0; return 1 where some rank cannot use the path. Collective."""
    try:
        comm: Any = world()
    except (MpiNotFoundError, LaunchError):
        comm = None
    found: DiskSpeed | str
    try:
        if comm is not None:
            comm.mpi.Barrier()
        found = measure_disk(Path(os.path.expandvars(path)))  # each rank's own: a job's folder is not the login node's
    except MpiZeroError as error:
        found = str(error)
    host = socket.gethostname() if comm is None else comm.hosts[comm.rank]
    rows = [(host, found)] if comm is None else comm.mpi.gather((host, found))
    if rows is not None:
        print(disk_text(path, rows), flush=True)
    return int(any(isinstance(each, str) for _, each in (rows or [])))


def disk_text(path: str, rows: list[tuple[str, DiskSpeed | str]]) -> str:
    """Return what is printed.

    Args:
        path: the folder.
        rows: by rank, its host and what it measured, or why it could not.
    """
    by_host: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(rows):
        by_host.setdefault(host, []).append(rank)
    head = ("host", "ranks", "read", "write", "both at once, each", "optimizer's step, 100M parameters per rank")
    lines: list[tuple[str, ...]] = [head]
    failures = []
    for host, ranks in by_host.items():
        speeds = [each for rank in ranks if not isinstance(each := rows[rank][1], str)]
        failures += [f"rank {rank} on {host}: {rows[rank][1]}" for rank in ranks if isinstance(rows[rank][1], str)]
        if not speeds:
            continue
        slowest = min(speed.both for speed in speeds)
        rates = [sum(getattr(speed, name) for speed in speeds) for name in ("read", "write", "both")]
        step = MILLION * max(READ, WRITTEN) / slowest
        lines.append(
            (host, f"{len(ranks)} ({ranges(ranks)})", *(f"{rate / 1e9:.2f} GB/s" for rate in rates), f"{step:.1f} s")
        )
    if any(not isinstance(each, str) and each.in_memory for _, each in rows):
        failures.append(f"{path} is memory (tmpfs), not a disk: what is moved there still takes memory")
    buffered = any(not isinstance(each, str) and not each.unbuffered for _, each in rows)
    note = (
        "\nRates are those of all ranks of a host together; mpizero plan --disk-rate takes the third. Last the least\n"
        f"time of Adam in bf16, state and parameters on this disk: {READ} bytes read and {WRITTEN} written per\n"
        "parameter, where each rank has its part of that rate."
    )
    if buffered:
        note += "\nThe file system knows no unbuffered reads and writes: the page cache may flatter these figures."
    title = f"disk of {path}, all ranks of a host at once:"
    table = f"{title}\n{aligned(lines, right=(2, 3, 4, 5))}{note}" if len(lines) > 1 else ""
    return "\n".join(filter(None, [table, *failures]))
