"""`mzrun -n N script.py ...`: runs a script in N ranks with whichever MPI this environment has.

It is a convenience: `mpirun -n N python script.py` starts the same ranks, given the flags that `mzrun` adds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.comm.launch import check_pair, command, environment, find_launcher, vendor_of_library
from mpizero.comm.ucx import check_openmpi, cuda_aware_flags, cuda_aware_variables, ucx_folder
from mpizero.errors import ArgumentError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["TIMED_OUT", "main"]

USAGE = (
    "mzrun -n N [--timeout SECONDS] [--hosts A,B] [--mpi-args '...'] [--cuda-aware] [--] script.py ... | -m module ..."
)
TIMED_OUT = 124
BAD_USAGE = 2
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE = 5.0
"""Seconds that a job has to end by itself after it was asked to."""


@dataclass(kw_only=True)
class Job:
    """Be a launcher that runs, and what was asked of it."""

    process: subprocess.Popen[bytes]
    """The launcher, the leader of a session of its own."""

    asked_to_end: list[float] = field(default_factory=list)
    """When SIGINT or SIGTERM came (`time.monotonic`)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the job's exit code.

    124 says that the time-out ended it, 128 + N that signal N did, 2 that the command line was wrong.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    head, program = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(head)
    try:
        return _start(options, program)
    except MpiZeroError as error:
        print(f"mzrun: {error}", file=sys.stderr)
        return BAD_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mzrun", usage=USAGE, description=__doc__, allow_abbrev=False)
    parser.add_argument("-n", "--ranks", metavar="N", required=True, help="number of ranks, at least 1")
    parser.add_argument("--timeout", metavar="SECONDS", help="end the job after so long, with exit code 124")
    parser.add_argument("--hosts", metavar="A,B", help="where to run, each NAME or NAME:RANKS")
    parser.add_argument("--mpi-args", metavar="'...'", default="", help="more flags for the launcher, in one word")
    about = "let messages carry GPU memory, by Open MPI with the UCX of the wheel libucx-cu13 or -cu12; tried first"
    parser.add_argument("--cuda-aware", action="store_true", help=about)
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Part mzrun's own options from the program, which starts at the first word that is no option or at -m."""
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return argv[:at], argv[at + 1 :]
        if word == "-m" or not word.startswith("-"):
            break
        # Every option but these takes a value: the next word unless it is joined on.
        joined = "=" in word or word in {"-h", "--help", "--cuda-aware"} or (word.startswith("-n") and word != "-n")
        at += 1 if joined else 2
    return argv[:at], argv[at:]


def _start(options: argparse.Namespace, program: list[str]) -> int:
    ranks = _number("-n", options.ranks, int, "a whole number of ranks, at least 1")
    timeout = None
    if options.timeout is not None:
        timeout = _number("--timeout", options.timeout, float, "a number of seconds above 0")
    _check_program(program)
    launcher = find_launcher(sys.executable)
    check_pair(launcher, vendor_of_library(sys.executable))
    hosts = options.hosts.split(",") if options.hosts else None
    line = command(launcher, ranks, [sys.executable, *program], hosts)
    line[1:1] = shlex.split(options.mpi_args)
    if "--bind-to" in shlex.split(options.mpi_args) and line.count("--bind-to") > 1:
        at = len(line) - 1 - line[::-1].index("--bind-to")
        del line[at : at + 2]
    variables = _variables(environment(launcher, ranks))
    if options.cuda_aware:
        check_openmpi(launcher)
        variables = cuda_aware_variables(variables, ucx_folder())
        line[1:1] = cuda_aware_flags()
    return _run(line, variables, timeout)


def _number(what: str, text: str, kind: type[Any], rule: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise ArgumentError(must_be(what, rule, text))
    return value


def _check_program(program: list[str]) -> None:
    """Refuse a script or module that is not there: N ranks would each say so, in N tracebacks."""
    if not program or program == ["-m"]:
        raise ArgumentError(must_be("the program", "a script or -m MODULE", " ".join(program), f"usage: {USAGE}"))
    if program[0] == "-m":
        # As `python -m` does, from the folder that it is called in.
        if PathFinder.find_spec(program[1].partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            remedy = f"install it for {sys.executable}"
            raise ArgumentError(must_be("the module", "one that this Python finds", program[1], remedy))
    elif not Path(program[0]).exists():
        remedy = f"a relative path starts in {Path.cwd()}"
        if Path(program[0]).name.startswith("python"):
            remedy = "leave it out, mzrun starts the script with its own Python"
        raise ArgumentError(must_be("the script", "a file that exists", program[0], remedy))


def _variables(variables: dict[str, str]) -> dict[str, str]:
    # Ranks write into the launcher's pipe or pty, whatever its own output is, so they are told of the terminal here.
    if sys.stdout.isatty():
        variables["MPIZERO_TTY"] = "1"
        variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
    else:
        variables.pop("MPIZERO_TTY", None)
    # A pipe is block-buffered: without this a rank's lines come at its end, or never if it is killed.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    return variables


def _run(line: list[str], variables: dict[str, str], timeout: float | None) -> int:
    # A session of its own, so that a Ctrl-C reaches the ranks once, through the launcher, and the whole job can be
    # found again; it has no terminal to read from then.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    with subprocess.Popen(line, env=variables, stdin=stdin, start_new_session=True) as process:
        job = Job(process=process)
        with _forwarding(job):
            return _wait(job, timeout)


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[None]:
    def forward(number: int, _frame: object) -> None:
        if number in {signal.SIGINT, signal.SIGTERM}:
            job.asked_to_end.append(time.monotonic())
        job.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(job: Job, timeout: float | None) -> int:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = job.process.wait(0.2)
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        if deadline is not None and now > deadline:
            print(f"mzrun: the job was ended: it took longer than --timeout {timeout:g} s", file=sys.stderr)
            _end(job)
            return TIMED_OUT
        if job.asked_to_end and now > job.asked_to_end[0] + GRACE:
            _end(job)
            return 128 + signal.SIGTERM


def _end(job: Job) -> None:
    """End the launcher and all that it started: politely, then by force.

    Launchers put ranks into process groups of their own, and a killed launcher leaves them running; so the ranks are
    noted before the launcher is asked to end.
    """
    family = _family(job.process.pid)
    os.killpg(job.process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(GRACE)
    for pid, born in family.items():
        if _born(pid)[1] == born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)


def _family(root: int) -> dict[int, str]:
    """Return the processes of this host that descend from one, each with when it was born."""
    parents = {int(entry.name): _born(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    found = {root}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return {pid: parents[pid][1] for pid in found if pid in parents}


def _born(pid: int) -> tuple[int, str]:
    """Return a process's parent and its start time in clock ticks; (0, "") where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


if __name__ == "__main__":
    sys.exit(main())
