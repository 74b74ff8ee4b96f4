"""Faults on purpose: a random rank of a job in the midst of mixed collectives fails, and the whole job has to end.

This starts the jobs, under the plain mpirun of each MPI, and judges them; `faulty` is what runs in their ranks. Every
process of a job carries a mark in its environment, by which all that it leaves behind is found and killed, also ranks
that are stopped, or whose launcher is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.bench.faulty import FAULTS, STOP
from mpizero.comm import sweep
from mpizero.comm.launch import NAMES, Launcher, command, environment, find_launcher
from mpizero.errors import ArgumentError, MpiZeroError, must_be
from mpizero.tables import aligned
from mpizero.testing.leftovers import remove_left, segments

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Trial", "main", "named_in", "signal_in"]

RANKS = 4
WITHIN = 5.0
"""Seconds in which a job has to end after a rank of it failed."""
TIMEOUT = 5.0
"""`MPIZERO_TIMEOUT` of jobs in which a rank is stopped: nothing else tells a stopped rank from a slow one."""
LATER = 3.0
"""Seconds in which such a job has to end after that."""
HARD = 20.0
"""Seconds after the fault at which a job is killed."""
START = 120.0
"""Seconds after the start at which a job is killed in which no fault has happened."""
LATEST = 60
"""The last collective, from 0, at which a fault may come."""
POLL = 0.02
SETTLE = 1.0
"""Seconds that the ranks have to be gone after their launcher."""
FAILED, BAD_USAGE = 1, 2
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Say how a job ended in which a rank failed."""

    fault: str
    """A key of FAULTS."""
    victim: int
    """The rank."""
    code: int | None
    """The launcher's exit code; None where it had to be killed."""
    seconds: float
    """From the fault to the launcher's end."""
    cause: str
    """The line of the output that names the rank, or else the launcher's that names the signal; "" where none does."""
    named: bool
    """Whether the rank is named. MPICH's launcher kills the others within the millisecond in which a signal ended one,
    before they can say which, and then names the process of any of them."""
    left: int
    """Processes of the job that were still there a second later."""
    output: str

    @property
    def ended_well(self) -> bool:
        """Return whether the job ended as it has to."""
        if self.fault == "delay":
            return self.code == 0 and not self.left
        limit = TIMEOUT + LATER if self.fault == STOP else WITHIN
        return self.code not in {0, None} and self.seconds <= limit and not self.left

    @property
    def passed(self) -> bool:
        """Return whether it also said why, where there is something to say."""
        return self.ended_well and (bool(self.cause) or self.fault == "delay")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and print a table; return 0, 1 where one did not end as it has to, 2 for a wrong command line.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    options = _parser().parse_args(argv)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    try:
        faults = _faults(options.faults)
        if options.trials < 1:
            raise ArgumentError(must_be("--trials", "1 or more", options.trials))
        launchers = {python: find_launcher(python) for python in options.python or [sys.executable]}
    except MpiZeroError as error:
        print(f"soak_faults: {error}", file=sys.stderr)
        return BAD_USAGE
    print(f"soak_faults: {options.trials} trials of each fault, {RANKS} ranks, --seed {seed}", flush=True)
    rng = random.Random(seed)  # noqa: S311  (no secrets)
    trials = []
    for python, launcher in launchers.items():
        for fault in faults:
            done = _some(python, launcher, fault, rng, options.trials)
            trials.append((NAMES.get(launcher.vendor, str(launcher)), fault, done))
            well = sum(trial.ended_well for trial in done)
            print(f"  {launcher.vendor} {fault}: {well} of {len(done)} ended as they have to", flush=True)
    print(_table(trials))
    return _show_failed([trial for _, _, done in trials for trial in done if not trial.passed])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soak_faults", description="Let ranks fail, and see whether their jobs end.")
    about = "an environment's Python, for each MPI to try; this one without it"
    parser.add_argument("--python", action="append", metavar="PATH", help=about)
    parser.add_argument("--trials", type=int, default=5, help="jobs for each MPI and fault (5)")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"which, of {','.join(FAULTS)}")
    parser.add_argument("--seed", type=int, help="of what fails when; another one in each run, and printed")
    return parser


def _faults(text: str) -> list[str]:
    for name in text.split(","):
        if name not in FAULTS:
            raise ArgumentError(must_be("--faults", f"some of {', '.join(FAULTS)}", name))
    return text.split(",")


def _some(python: str, launcher: Launcher, fault: str, rng: random.Random, number: int) -> list[Trial]:
    before = segments()
    done = []
    for _ in range(number):
        done.append(_try(python, launcher, fault, rng))
        remove_left(before)
    return done


def _try(python: str, launcher: Launcher, fault: str, rng: random.Random) -> Trial:
    """Run one job in which a random rank fails at a random collective."""
    victim, at, seed = rng.randrange(RANKS), rng.randrange(LATEST), rng.getrandbits(31)
    with tempfile.TemporaryDirectory(prefix="mpizero-soak-faults-") as folder:
        mark, output = Path(folder) / "mark", Path(folder) / "output"
        words = [python, "-m", "mpizero.bench.faulty", fault, str(victim), str(at), str(seed), str(mark)]
        line, variables = command(launcher, RANKS, words), _variables(launcher, fault, folder)
        with output.open("wb") as out:
            job = subprocess.Popen(
                line, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            ended = _wait(job, mark)
            left = _end(job, folder)
        text = output.read_text(errors="replace")
        failed = _time_in(mark)
    seconds, named = float("inf"), named_in(text, victim)
    if failed is None:
        text += f"\n(the fault did not happen: exit code {job.returncode})"
    elif ended is not None:
        seconds = ended - failed
    return Trial(
        fault=fault,
        victim=victim,
        code=None if ended is None else job.returncode,
        seconds=seconds,
        cause=named or signal_in(text),
        named=bool(named),
        left=left,
        output=f"$ {' '.join(line)}\n{text}",
    )


def _variables(launcher: Launcher, fault: str, folder: str) -> dict[str, str]:
    ours = {
        sweep.MARK: folder,
        "MPIZERO_RECORD": folder,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if fault == STOP:
        ours["MPIZERO_TIMEOUT"] = str(TIMEOUT)
    return environment(launcher, RANKS) | ours


def _wait(job: subprocess.Popen[bytes], mark: Path) -> float | None:
    """Wait for the launcher; return when it ended, or None where that took too long."""
    start = time.monotonic()
    while job.poll() is None:
        now, failed = time.monotonic(), _time_in(mark)
        if now > (start + START if failed is None else failed + HARD):
            return None
        time.sleep(POLL)
    return time.monotonic()


def _time_in(mark: Path) -> float | None:
    """Return when the fault happened, by the clock that all processes of a host share; None where it did not yet."""
    try:
        return float(mark.read_text())
    except (OSError, ValueError):
        return None


def _end(job: subprocess.Popen[bytes], folder: str) -> int:
    """Kill all that is left of a job; return how many processes that were, of a job whose launcher is gone."""
    over, late = job.returncode is not None, time.monotonic() + SETTLE
    while (left := sweep.members(folder)) and over and time.monotonic() < late:
        time.sleep(POLL)
    sweep.end(left)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    return len(left) if over else 0


def named_in(output: str, rank: int) -> str:
    """Return the first line of a job's output that names a rank, one of mpizero's own if there is any; else ""."""
    found = [line.strip() for line in output.splitlines() if re.search(rf"\brank {rank}\b", line, re.IGNORECASE)]
    return next((line for line in found if "mpizero" in line), found[0] if found else "")


def signal_in(output: str) -> str:
    """Return the launcher's line that says that SIGKILL ended a process; else ""."""
    found = re.search(r"^.*\(signal 9\).*$", output, re.MULTILINE)
    return found[0] if found else ""


def _table(trials: list[tuple[str, str, list[Trial]]]) -> str:
    rows = [("MPI", "fault", "trials", "ended well", "longest", "cause printed", "rank named", "exit codes")]
    lines = []
    for name, fault, done in trials:
        codes = sorted({"killed" if trial.code is None else str(trial.code) for trial in done})
        causes = [trial.cause for trial in done if trial.cause]
        rows.append(
            (
                name,
                fault,
                str(len(done)),
                str(sum(trial.ended_well for trial in done)),
                _seconds(max(trial.seconds for trial in done)),
                "-" if fault == "delay" else str(len(causes)),
                "-" if fault == "delay" else str(sum(trial.named for trial in done)),
                ", ".join(codes),
            )
        )
        if causes and fault != "delay":
            lines.append(f"  {name}, {fault}: {causes[0][:160]}")
    return "\n".join([aligned(rows, right=(2, 3, 4, 5, 6)), "", "for instance", *lines])


def _seconds(longest: float) -> str:
    return "killed" if longest == float("inf") else f"{longest:.1f} s"


def _show_failed(failed: list[Trial]) -> int:
    """Write what the jobs said that did not end as they have to; return the exit code."""
    if not failed:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mpizero-soak-faults-"))
    for number, trial in enumerate(failed):
        head = f"rank {trial.victim}: {trial.fault}; exit code {trial.code} after {trial.seconds:.1f} s"
        text = f"{head}, {trial.left} processes left\n{trial.output}"
        (folder / f"{number:03}-{trial.fault}.txt").write_text(text)
    print(f"{len(failed)} jobs did not end as they have to, or did not say why; their output is in {folder}")
    return FAILED
