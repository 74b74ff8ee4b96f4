"""The soak: very many collectives drawn at random, every value checked, and resident memory that must not grow.

Memory is what of a rank lies in anonymous and in shared pages, when no collective is under way, every cut is closed and
what was freed has been given back. Pages of mapped files, as libraries, are left out: which of them are resident, and
to whom they are charged, changes with what else runs on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.bench.flags import say_once
from mpizero.bench.mixed import Mix
from mpizero.bench.progress import mib
from mpizero.comm import world
from mpizero.errors import ArgumentError, MpiZeroError, must_be
from mpizero.settings import settings
from mpizero.tables import aligned
from mpizero.testing.recipes import libraries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

__all__ = ["main", "resident", "soak"]

CALLS = 100_000
SETTLED = 0.1
"""The part of the calls after which memory has reached its size: every cache has been filled and every buffer grown."""
GROWTH = 0.02
LINES = 20
"""Lines of progress where there is no terminal."""
FAILED, BAD_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return 0, 1 where a value was wrong or memory grew, or 2 for a wrong command line. Collective.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    try:
        options = _parser().parse_args(argv)
        if options.calls < 1:
            raise ArgumentError(must_be("--calls", "a number of collectives, 1 or more", options.calls))
        return soak(options.calls, options.seed, numpy_only=options.numpy)
    except MpiZeroError as error:
        say_once(f"soak: {error}")
        return BAD_USAGE if isinstance(error, ArgumentError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soak", description="Make many collectives at random, and check them all.")
    parser.add_argument("--calls", type=int, default=CALLS, help=f"collectives per rank ({CALLS:,})")
    parser.add_argument("--seed", type=int, help="of all that is drawn; another one in each run, and printed")
    parser.add_argument("--numpy", action="store_true", help="numpy arrays alone, without torch's")
    return parser


def soak(calls: int, seed: int | None = None, *, numpy_only: bool = False) -> int:
    """Make `calls` collectives on each rank and print, on rank 0, what came of it; return 0, or 1. Collective.

    Args:
        calls: collectives that each rank makes, about.
        seed: of all that is drawn; None takes one at random.
        numpy_only: whether to leave torch's arrays out.
    """
    comm = world()
    seed = int(comm.mpi.bcast(secrets.randbits(31) if seed is None else seed))
    if comm.rank == 0:
        print(f"soak: {calls:,} collectives on {comm.size} ranks, --seed {seed}", flush=True)
    mix = Mix(comm, seed, kinds=libraries()[:1] if numpy_only else libraries())
    settled, start = 0, time.monotonic()
    with _Progress(calls, live=comm.rank == 0) as progress:
        while mix.calls < calls:
            mix.turn()
            progress.show(mix)
            if not settled and mix.calls >= SETTLED * calls:
                settled = mix.at_rest(resident)
    after = mix.at_rest(resident)
    seconds = time.monotonic() - start
    everyone = comm.mpi.allgather((mix.calls, mix.cuts, mix.wrong, mix.examples, settled, after))
    mix.close()
    if comm.rank == 0:
        print(_report(everyone, seconds), flush=True)
    failed = any(wrong or _grown(before, after) for _, _, wrong, _, before, after in everyone)
    return FAILED if failed else 0


def resident() -> int:
    """Return the bytes of this process in anonymous and in shared memory, garbage apart; 0 where /proc is not Linux's.

    A page that several ranks share counts on each.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", text))
    return 0


def _grown(before: int, after: int) -> bool:
    return after > before * (1 + GROWTH)


def _report(everyone: list[tuple[int, int, int, list[str], int, int]], seconds: float) -> str:
    heading = ("rank", "collectives", "cuts", "calls/s", "#wrong", f"resident at {SETTLED:.0%}", "at the end", "growth")
    rows: list[tuple[Any, ...]] = [heading]
    for rank, (calls, cuts, wrong, _, before, after) in enumerate(everyone):
        growth = f"{after / before - 1:+.2%}" + (" too much" if _grown(before, after) else "") if before else "unknown"
        rows.append((rank, f"{calls:,}", cuts, f"{calls / seconds:,.0f}", wrong, mib(before), mib(after), growth))
    texts = [f"rank {rank}: {text}" for rank, row in enumerate(everyone) for text in row[3]]
    return "\n".join([aligned(rows, right=range(8)), *texts])


class _Progress:
    """Show how far the soak is: a bar on a terminal, else a line every so often."""

    def __init__(self, calls: int, *, live: bool) -> None:
        """Count to `calls`; says nothing unless `live`."""
        self.calls, self.live = calls, live
        self.start = time.monotonic()
        self.shown = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Open the bar, where there is a terminal."""
        if self.live and settings().terminal:  # Open MPI's ranks have one in any case; see `progress`
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(force_terminal=True))
            self._task = self._bar.add_task("soak", total=self.calls)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, mix: Mix) -> None:
        """Say how far it is, now and then."""
        if self._bar is not None:
            self._bar.update(self._task, completed=mix.calls)
        elif self.live and mix.calls * LINES // self.calls > self.shown:
            self.shown = mix.calls * LINES // self.calls
            rate = mix.calls / (time.monotonic() - self.start)
            print(f"{mix.calls:>9,} of {self.calls:,}  {rate:,.0f} calls/s  {mix.wrong} wrong", flush=True)
