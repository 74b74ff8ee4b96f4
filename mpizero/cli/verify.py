"""`mpizero verify`: trains a small model at every stage, and checks that all stages give the same bits."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.cli.compare import BOUNDS, Row, compare, read
from mpizero.cli.mzrun import TIMED_OUT
from mpizero.comm.launch import check_pair, find_launcher, vendor_of_library
from mpizero.errors import ArgumentError, MpiZeroError, must_be
from mpizero.plan import STAGES
from mpizero.tables import aligned

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["Failure", "configure", "run"]

SCHEMA = 1
PRECISIONS = ("fp32", "bf16")
WORKER = "mpizero.testing.parity"
"""The module that the ranks run."""

LINES = 60
"""Lines of a failed job's output that are shown."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what the command line asks for."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    precisions: tuple[str, ...]
    steps: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Say that the job of one number of ranks gave no results."""

    ranks: int
    reason: str
    output: str


@dataclass(kw_only=True)
class Outcome:
    """Collect what all jobs gave."""

    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether every job gave results, and every row passed."""
        return not self.failures and all(row.passed for row in self.rows)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "--ranks",
        metavar="N,...",
        default="1,2,4",
        help="numbers of ranks, each a job of its own (default: %(default)s)",
    )
    add("--stages", metavar="S,...", default="0,1,2,3", help="stages to train at (default: %(default)s)")
    add("--precision", metavar="P,...", default="fp32,bf16", help="fp32, bf16 or both (default: %(default)s)")
    add("--steps", metavar="N", default="20", help="optimizer steps (default: %(default)s)")
    add("--timeout", metavar="SECONDS", default="600", help="end a job that takes longer (default: %(default)s)")
    add("--json", action="store_true", help="print the rows as JSON")
    parser.epilog = (
        "It starts mpirun itself. The exit code is 0 if all is equal, 1 on any difference or failed job, 2 for a wrong "
        "command line."
    )


def run(options: argparse.Namespace) -> int:
    """Run one job for each number of ranks, compare, print; return 1 on a difference or a failed job.

    Raises:
        ArgumentError: for a wrong value; lists those that are known.
        MpiZeroError: where torch, MPI or its launcher is missing, or they do not fit.
    """
    plan = _plan(options)
    _check_installed()
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="mpizero-verify-") as folder:
        for ranks in plan.ranks:
            print(f"mpizero verify: training on {_ranks(ranks)} ...", file=sys.stderr)
            found = _job(plan, ranks, Path(folder) / f"{ranks}.npz")
            if isinstance(found, Failure):
                outcome.failures.append(found)
            else:
                outcome.rows += found
    print(_json(plan, outcome) if options.json else _text(plan, outcome))
    return 0 if outcome.passed else 1


def _plan(options: argparse.Namespace) -> Plan:
    stages = _list("--stages", options.stages, int, lambda stage: stage in STAGES, f"of {_listed(STAGES)}")
    precisions = _list(
        "--precision", options.precision, str, lambda name: name in PRECISIONS, f"of {_listed(PRECISIONS)}"
    )
    ranks = _list("--ranks", options.ranks, int, lambda number: number > 0, "of whole numbers, at least 1")
    (steps,) = _list("--steps", [options.steps], int, lambda number: number > 0, "a whole number, at least 1")
    rule = "a number of seconds above 0"
    (timeout,) = _list("--timeout", [options.timeout], float, lambda number: 0 < number < float("inf"), rule)
    return Plan(ranks=ranks, stages=stages, precisions=precisions, steps=steps, timeout=timeout)


def _list(
    what: str, value: str | list[str], kind: Callable[[str], Any], good: Callable[[Any], bool], rule: str
) -> tuple[Any, ...]:
    """Return the words of a list joined by commas, each once."""
    words = value.split(",") if isinstance(value, str) else value
    found = []
    for word in words:
        try:
            item = kind(word.strip())
        except ValueError:
            item = None
        if item is None or not good(item):
            full = f"a list {rule}, joined by commas" if isinstance(value, str) else rule
            raise ArgumentError(must_be(what, full, word))
        found.append(item)
    return tuple(dict.fromkeys(found))


def _listed(known: tuple[Any, ...]) -> str:
    return ", ".join(map(str, known))


def _check_installed() -> None:
    """Say what is missing before any job starts."""
    if importlib.util.find_spec("torch") is None:
        raise MpiZeroError(f"no torch was found by {sys.executable}: `pip install 'mpizero[torch]'`")
    check_pair(find_launcher(sys.executable), vendor_of_library(sys.executable))


def _job(plan: Plan, ranks: int, out: Path) -> list[Row] | Failure:
    """Train on so many ranks and return the rows, or what went wrong."""
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", str(ranks), "--timeout", str(plan.timeout), "-m", WORKER]
    line += ["--out", str(out), "--steps", str(plan.steps), "--precision", ",".join(plan.precisions)]
    line += ["--stages", ",".join(map(str, plan.stages))]
    code, output = _run(line)
    if code != 0 or not out.exists():
        late = f"took longer than --timeout {plan.timeout:g} s"
        reason = late if code == TIMED_OUT else f"ended with exit code {code}" + ("" if code else " and no results")
        return Failure(ranks=ranks, reason=reason, output="\n".join(output.splitlines()[-LINES:]))
    with np.load(out, allow_pickle=False) as entries:
        return compare(read(entries), ranks, plan.precisions, plan.stages)


def _run(line: list[str]) -> tuple[int, str]:
    """Run a job and return exit code and output; if this process is interrupted, so is the job."""
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as job:
        try:
            output, _ = job.communicate()
        except BaseException:
            # mzrun ends the ranks on this signal, and itself then; killed outright, it would leave them behind.
            with contextlib.suppress(ProcessLookupError):
                job.terminate()
            raise
    return job.returncode, output


def _text(plan: Plan, outcome: Outcome) -> str:
    base = outcome.rows[0].compared_to if outcome.rows else 0
    parts = []
    if outcome.rows:
        parts.append(aligned([_heading(base), *(_cells(row) for row in outcome.rows)], right=(0, 2)))
        parts.append(_legend(plan, base))
    parts += [
        f"The job on {_ranks(failure.ranks)} {failure.reason}. Its last output:\n{failure.output}"
        for failure in outcome.failures
    ]
    good = sum(row.passed for row in outcome.rows)
    parts.append(
        f"{'passed' if outcome.passed else 'FAILED'}: {good} of {len(outcome.rows)} rows pass"
        + (f", {len(outcome.failures)} of {len(plan.ranks)} jobs gave no results" if outcome.failures else "")
    )
    return "\n\n".join(parts)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _heading(base: int) -> tuple[str, ...]:
    against = (f"{optimizer} against one process" for optimizer in ("AdamW", "SGD"))
    return ("ranks", "precision", "stage", "same on all ranks", f"== stage {base}", *against, "result")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.ranks),
        row.precision,
        str(row.stage),
        f"no: {row.differs_on_ranks}" if row.differs_on_ranks else "yes",
        f"no: {row.differs_from_stage}" if row.differs_from_stage else "yes",
        _against(row, "AdamW"),
        _against(row, "SGD"),
        "pass" if row.passed else "FAIL",
    )


def _against(row: Row, optimizer: str) -> str:
    difference = row.one_process.get(optimizer)
    if difference is None:
        return "-"
    bound = "" if difference.bound is None else f" {'<=' if difference.passed else '>'} {difference.bound:.0e}"
    return f"{difference.relative:.1e}{bound} {difference.name}"


def _legend(plan: Plan, base: int) -> str:
    fp32 = ", ".join(f"{optimizer} {bound:.0e}" for (optimizer, _), bound in BOUNDS.items())
    return (
        f"After {plan.steps} steps of a small transformer, 2 micro-batches each, with clipping.\n"
        f"== stage {base}: the bytes of all parameters and all steps' gradient norms; else the first that differs.\n"
        "against one process: plain torch in fp32 on the ranks' joined batches. Norm of the difference over norm, of\n"
        f"the tensor where it is largest. Allowed in fp32: {fp32}. bf16 has no bound, and is not trained by SGD."
    )


def _json(plan: Plan, outcome: Outcome) -> str:
    failures = [vars(failure) for failure in outcome.failures]
    found = {"schema_version": SCHEMA, "passed": outcome.passed, "steps": plan.steps, "failures": failures}
    return json.dumps({**found, "rows": [row.as_json() for row in outcome.rows]}, indent=1)
