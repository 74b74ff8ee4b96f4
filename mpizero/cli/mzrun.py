"""`mzrun -n N script.py ...`: runs a script in N ranks with whichever MPI this environment has.

It is a convenience: `mpirun -n N python script.py` starts the same ranks, given the flags that `mzrun` adds.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.cli.jobs import TIMED_OUT
from mpizero.cli.restarts import BAD_USAGE, Launch, Policy, run_job
from mpizero.comm.launch import check_pair, environment, find_launcher, vendor_of_library
from mpizero.comm.ucx import check_openmpi, cuda_aware_flags, cuda_aware_variables, ucx_folder
from mpizero.errors import ArgumentError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TIMED_OUT", "main"]

USAGE = (
    "mzrun -n N [--timeout SECONDS] [--hosts A,B] [--restarts N [--min-ranks M] [--restart-ranks N,M]] "
    "[--mpi-args '...'] [--cuda-aware] [--] script.py ... | -m module ..."
)


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
    parser.add_argument("--restarts", metavar="N", help="start a job that fails again, at most so often")
    about = "with --restarts and --hosts: stop where the hosts that are left would have less ranks (1)"
    parser.add_argument("--min-ranks", metavar="M", help=about)
    about = "with --restarts and --hosts: the numbers of ranks that will do when hosts are gone; any by default"
    parser.add_argument("--restart-ranks", metavar="N,M", help=about)
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
    policy = _policy(options, ranks)
    _check_program(program)
    launcher = find_launcher(sys.executable)
    check_pair(launcher, vendor_of_library(sys.executable))
    variables, flags = _variables(environment(launcher, ranks)), []
    if options.cuda_aware:
        check_openmpi(launcher)
        variables, flags = cuda_aware_variables(variables, ucx_folder()), cuda_aware_flags()
    launch = Launch(
        launcher=launcher,
        ranks=ranks,
        hosts=tuple(options.hosts.split(",")) if options.hosts else (),
        program=(sys.executable, *program),
        mpi_args=tuple(shlex.split(options.mpi_args)),
        flags=tuple(flags),
        variables=variables,
    )
    return run_job(launch, policy, timeout)


def _policy(options: argparse.Namespace, ranks: int) -> Policy:
    if options.restarts is None:
        for name, value in (("--min-ranks", options.min_ranks), ("--restart-ranks", options.restart_ranks)):
            if value is not None:
                raise ArgumentError(must_be(name, "given with --restarts", value))
        return Policy()
    few = 1
    if options.min_ranks is not None:
        rule = f"a whole number of ranks from 1 to {ranks}"
        few = _number("--min-ranks", options.min_ranks, int, rule, most=ranks)
    words = options.restart_ranks.split(",") if options.restart_ranks is not None else []
    counts = [_number("--restart-ranks", word, int, "whole numbers of ranks, such as 4,2,1") for word in words]
    restarts = _number("--restarts", options.restarts, int, "a whole number of restarts, at least 1")
    return Policy(restarts=restarts, min_ranks=few, rank_counts=tuple(counts))


def _number(what: str, text: str, kind: type[Any], rule: str, *, most: float = sys.maxsize) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value <= most:
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


if __name__ == "__main__":
    sys.exit(main())
