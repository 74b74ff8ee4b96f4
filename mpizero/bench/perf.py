"""The microbenchmarks `bin/*_perf`: measure one operation's algorithms over sizes, with results checked.

[Note: errors on all ranks] The command line is read on every rank before MPI is started, and every rank ends with the
same exit code. What depends on the number of ranks is found after that from what all know, or agreed on; rank 0 speaks.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.bench.calls import CopyJob, Job, arrays_of, verb
from mpizero.bench.cases import COPY, CPU, PEERS, Case, Plan, cases_of, shuffled
from mpizero.bench.flags import parse_plan, say_once
from mpizero.bench.place import HostPlace, place_of
from mpizero.bench.report import report
from mpizero.bench.results import Row, results_of, row_of, write_csv, write_json
from mpizero.bench.summary import summarise
from mpizero.bench.timing import Loop, Measured, bus_bandwidth, measure
from mpizero.bench.versus import open_peers
from mpizero.bench.wires import Wires
from mpizero.comm import world
from mpizero.errors import ArgumentError, ArgumentTypeError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

WRONG = 1
BAD_USAGE = 2
PATIENCE = 10.0
"""Seconds between two lines that say how far the run is."""


def main(operation: str, argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit code: 1 for wrong results, 2 for a wrong command line. Collective.

    Args:
        operation: the collective to measure.
        argv: the arguments, `sys.argv[1:]` by default.
    """
    try:
        plan = parse_plan(operation, sys.argv[1:] if argv is None else argv)
        with place_of(plan.device) as place:
            return _Run(plan, world(), place).run()
    except MpiZeroError as error:
        say_once(f"{operation}_perf: {error}")
        return BAD_USAGE if isinstance(error, ArgumentError | ArgumentTypeError) else WRONG


class _Run:
    """Measure a plan's cases on the ranks of one communicator."""

    def __init__(self, plan: Plan, comm: Any, place: HostPlace) -> None:
        """Check the plan against the job. Collective."""
        self.plan, self.comm, self.place = plan, comm, place
        self.left_out: dict[str, str] = {}
        self.measured: dict[Case, Measured] = {}
        self.start = self.told = time.monotonic()
        _agree(plan, comm)
        if plan.root >= comm.size:
            raise ArgumentError(must_be("-r", f"a rank, 0 to {comm.size - 1}", plan.root))
        self.wires = Wires(comm, place.device, () if plan.device == CPU else self._wanted())
        self._leave_out_wires()
        self._try_algorithms()
        self.peers = open_peers(plan, comm, place)

    def run(self) -> int:
        """Measure all cases and report."""
        cases = cases_of(self.plan, self.comm.size, limit=len(set(self.comm.hosts)) == 1)
        cases = [case for case in cases if self._is_in(case)]
        order = shuffled(cases, self.plan.seed)
        for done, case in enumerate(order):
            self._tell(done, len(order))
            self._measure(case)
        for peer in self.peers.values():
            peer.close()
        self.wires.close()
        rows = self._rows(cases)
        if self.comm.rank == 0:
            self._report(rows)
        return WRONG if any(row.wrong for row in rows) else 0

    def _try_algorithms(self) -> None:
        """Make each algorithm's call once on a few elements, so that one that cannot do it is known before the rest.

        The verbs raise alike on all ranks, before they send anything.
        """
        small = replace(self.plan, sizes=(1,))
        for case in cases_of(small, self.comm.size, limit=False):
            if case.algorithm in PEERS or not self._is_in(case):
                continue
            try:
                self._job(case).call()
            except (ArgumentError, ArgumentTypeError) as error:
                self._leave_out(case, error)

    def _wanted(self) -> list[str]:
        """Return the wires of all cases."""
        cases = cases_of(replace(self.plan, sizes=(1,), versus=()), self.comm.size, limit=False)
        return list(dict.fromkeys(case.wire for case in cases))

    def _leave_out_wires(self) -> None:
        """Note the wires that there are not here; without `--wire all` one is an error."""
        for wire, reason in self.wires.refused.items():
            if not self.plan.every_wire:
                raise ArgumentError(must_be("--wire", "one that there is here", wire, reason))
            self.left_out[f"@{wire} ({self.plan.device})"] = reason

    def _is_in(self, case: Case) -> bool:
        return _key(case) not in self.left_out and case.wire not in self.wires.refused

    def _leave_out(self, case: Case, error: ArgumentError | ArgumentTypeError) -> None:
        """Note that an algorithm cannot do what is asked; without `--algorithm all` that is an error."""
        if not self.plan.every:
            raise error
        self.left_out[_key(case)] = str(error)

    def _job(self, case: Case) -> Job:
        comm = self.wires.comm(case.wire)
        arrays = arrays_of(case, comm, self.place)
        job = Job(case, self.plan, arrays, comm, place=self.place)
        if case.algorithm in PEERS:
            job.call = self.peers[case.algorithm].call(case, self.plan, arrays)
        else:
            job.call = self.place.settled(verb(case, self.plan, arrays, comm))
        return job

    def _measure(self, case: Case) -> None:
        plan = self.plan
        loop = Loop(warm_up=plan.warm_up, iterations=plan.iterations, check=plan.check, budget=plan.budget)
        try:
            job = CopyJob(case, self.place) if case.algorithm == COPY else self._job(case)
            self.measured[case] = measure(job, loop, self.comm)
        except (ArgumentError, ArgumentTypeError) as error:
            self._leave_out(case, error)

    def _rows(self, cases: list[Case]) -> list[Row]:
        ranks = self.comm.size
        limits = {
            case.nbytes: bus_bandwidth(case.operation, case.nbytes, summarise(self.measured[case].times).median, ranks)
            for case in cases
            if case.algorithm == COPY
        }
        rows = []
        for case in cases:
            if case.algorithm != COPY and case in self.measured:
                row = row_of(case, self.measured[case], order=self.plan.order, ranks=ranks, device=self.plan.device)
                rows.append(replace(row, limit_GBs=limits.get(case.nbytes)))
        return rows

    def _report(self, rows: list[Row]) -> None:
        results = results_of(self.plan, self.comm.hosts, rows, self.left_out)
        print(report(results, rows), flush=True)
        if self.plan.json is not None:
            write_json(results, self.plan.json)
        if self.plan.csv is not None:
            write_csv(rows, self.plan.csv)

    def _tell(self, done: int, total: int) -> None:
        """Say on stderr how far the run is, where it is long."""
        now = time.monotonic()
        if self.comm.rank == 0 and now > self.told + PATIENCE:
            self.told = now
            print(f"# {done} of {total} cases after {now - self.start:.0f} s", file=sys.stderr, flush=True)


def _key(case: Case) -> str:
    """Return how a thing that is left out is named: by all that may be the reason but the size."""
    kind = "prepared, " if case.prepared else ""
    wire = f"{case.wire}, " if case.wire else ""
    return f"{case.algorithm} ({kind}{wire}{case.buffer}, {case.dtype}, {case.op})"


def _agree(plan: Plan, comm: Any) -> None:
    """Refuse, on all ranks, a job whose ranks were given different command lines, or whose files cannot be written."""
    plans = comm.mpi.allgather(repr(plan))
    odd = [rank for rank, text in enumerate(plans) if text != plans[0]]
    if odd:
        rule = "the same on all ranks"
        raise ArgumentError(must_be("the command line", rule, f"another on rank {odd[0]} than on rank 0"))
    for flag, path in (("--json", plan.json), ("--csv", plan.csv)):
        reason = comm.mpi.bcast(_why_unwritable(path) if comm.rank == 0 and path is not None else "")
        if reason:
            raise ArgumentError(must_be(flag, "a file that can be written", path, reason))


def _why_unwritable(path: str) -> str:
    """Return why no file can be written at `path`, "" if one can."""
    target = Path(path)
    if target.is_dir():
        return "it is a folder"
    return "" if os.access(target.resolve().parent, os.W_OK) else "its folder is read-only"
