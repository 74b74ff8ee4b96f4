"""`mpizero doctor`: shows what mpizero finds here. Alone it looks at this machine, under mpirun at the whole job."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpizero.bench.timing import bus_bandwidth, time_all_reduce
from mpizero.cli.disk import disk_report
from mpizero.cli.facts import RankFacts, by_host, rank_facts
from mpizero.cli.gpu_rows import gpu_rows
from mpizero.cli.launchers import launcher_problems
from mpizero.cli.problems import (
    Problem,
    gpu_problems,
    host_problems,
    job_problems,
    library_problems,
    problem_of,
    rank_problems,
)
from mpizero.comm import world
from mpizero.comm.canary import verdict_of_all
from mpizero.comm.describe import MpiFacts, describe, launcher_rank
from mpizero.comm.launch import Launcher, check_pair, command, find_launcher, under_launcher
from mpizero.errors import LaunchError, MpiNotFoundError
from mpizero.settings import settings
from mpizero.tables import aligned, ranges

if TYPE_CHECKING:
    import argparse

__all__ = ["Report", "configure", "node_shared", "run"]

SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
ALGORITHMS = ("auto", "native")


@dataclass(kw_only=True)
class Report:
    """Hold what is printed."""

    ranks: list[RankFacts]
    mpi: MpiFacts | None = None
    mpi_error: MpiNotFoundError | LaunchError | None = None
    launcher: Launcher | None = None
    launcher_says: str = "none found"
    timings: list[tuple[str, ...]] = field(default_factory=list)
    """Rows of the bandwidth table; none with one rank."""

    problems: list[Problem] = field(default_factory=list)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument, and say how to run it."""
    about = "look at this alone: does the command start ranks of the MPI library that mpi4py loads? For job scripts"
    parser.add_argument("--launcher", metavar="'srun --mpi=pmix'", help=about)
    about = "measure this alone: what the disk under a folder carries, and what a step with mpizero.Offload takes there"
    parser.add_argument("--disk", metavar="PATH", help=about)
    parser.epilog = (
        "Run it as `mpizero doctor` on one machine, or as `mpirun -n N mpizero doctor` to look at a job as it will be. "
        "The exit code is 1 if jobs would fail."
    )


def run(options: argparse.Namespace) -> int:
    """Gather the facts of all ranks, time a few all-reduces, print on rank 0; return 1 if jobs would fail."""
    if options.launcher is not None:
        return _before_a_job(options.launcher)
    if options.disk is not None:
        return disk_report(options.disk)
    try:
        comm = world()
    except (MpiNotFoundError, LaunchError) as error:
        return _alone(error)
    shares = comm.node.board is not None if comm.node.size > 1 else None
    facts = comm.mpi.gather(rank_facts(comm.rank, shares, comm.node.size))
    wanted = settings().canary and any(each.gpus for each in facts or ())
    canary = verdict_of_all(comm, wanted=wanted)
    timings = _timings(comm) if comm.size > 1 else []
    code = 0
    if comm.rank == 0:
        report = Report(ranks=facts, mpi=describe(canary), timings=timings)
        _examine(report)
        code = _print(report)
    return int(comm.mpi.bcast(code))


def _before_a_job(launcher: str) -> int:
    """Say whether a launcher fits the MPI library, and start neither; return 1 if jobs would fail."""
    fits, problems = launcher_problems(launcher)
    print(f"mpizero doctor: {_problems(problems) if problems else fits}", flush=True)
    return int(any(problem.fails for problem in problems))


def _alone(error: MpiNotFoundError | LaunchError) -> int:
    """Report without MPI; of ranks that do not find each other, the launcher's first one does."""
    if (launcher_rank() or 0) > 0:
        return 1
    report = Report(ranks=[rank_facts(0)], mpi_error=error)
    if isinstance(error, LaunchError):
        report.mpi = describe()
    _examine(report)
    return _print(report)


def _timings(comm: Any) -> list[tuple[str, ...]]:
    """Return rows of size, microseconds and GB/s by each algorithm. Collective."""
    rows = []
    for name, nbytes in SIZES.items():
        seconds = [time_all_reduce(nbytes, comm, algorithm) for algorithm in ALGORITHMS]
        speeds = [bus_bandwidth("all_reduce", nbytes, each, comm.size) for each in seconds]
        rows.append((name, *(f"{each * 1e6:,.1f}" for each in seconds), *(f"{each:.3f}" for each in speeds)))
    return rows


def _examine(report: Report) -> None:
    """Fill in the launcher and the problems."""
    if report.mpi_error is not None:
        report.problems.append(problem_of(report.mpi_error))
    _find_launcher(report)
    if report.mpi is not None:
        report.problems += library_problems(report.mpi)
    report.problems += rank_problems(report.ranks)
    hosts = by_host(report.ranks)
    if report.mpi_error is None:
        report.problems += job_problems(report.ranks, hosts)
    report.problems += gpu_problems(report.ranks, hosts)
    for host in hosts:
        report.problems += host_problems(host)


def _find_launcher(report: Report) -> None:
    try:
        report.launcher = find_launcher(sys.executable)
    except MpiNotFoundError as error:
        # Under a launcher, or where srun is the launcher, mpirun is not needed.
        needed = under_launcher() is None and shutil.which("srun") is None
        text, _, remedy = str(error).partition(": ")
        report.problems.append(Problem(text=text, remedy=remedy, fails=needed))
        return
    report.launcher_says = str(report.launcher)
    if report.mpi is None:
        return
    try:
        check_pair(report.launcher, (report.mpi.vendor, report.mpi.text))
    except LaunchError as error:
        report.launcher_says += ": does not fit the library"
        # What was found is not what started this job, if the job has found itself.
        works = report.mpi_error is None and len(report.ranks) > 1
        report.problems.append(problem_of(error, fails=not works))
    else:
        known = "unknown" not in {report.launcher.vendor, report.mpi.vendor}
        report.launcher_says += ": fits the library" if known else ": may fit the library"


def _print(report: Report) -> int:
    hosts = by_host(report.ranks)
    parts = [
        f"mpizero doctor: {_count(len(report.ranks), 'rank')} on {_count(len(hosts), 'host')}",
        aligned(_facts(report)),
        aligned(_host_rows(report), right=(2, 3, 4)),
        aligned(_rank_rows(report.ranks)),
        _bandwidth(report),
        _problems(report.problems),
    ]
    print("\n\n".join(parts), flush=True)
    return int(any(problem.fails for problem in report.problems))


def _facts(report: Report) -> list[tuple[str, str]]:
    first, mpi = report.ranks[0], report.mpi
    rows = [
        ("MPI library", "none that loads" if mpi is None else f"{mpi.name} {mpi.version} (standard {mpi.standard})")
    ]
    rows.append(("MPI launcher", report.launcher_says))
    if mpi is not None:
        rows.append(("thread level", f"MPI_THREAD_{mpi.thread_level}"))
    rows += gpu_rows(report.ranks, mpi)
    names = ("mpizero", "Python", "torch")
    rows += [(name, version or "not installed") for name, version in zip(names, first.versions, strict=True)]
    if first.threads is not None:
        who = "set by OMP_NUM_THREADS" if first.threads_chosen else "until mpizero.shard divides the cores by the ranks"
        rows.append(("torch threads", f"{first.threads} per rank, {who}"))
    rows.append(("node-shared parameters", node_shared(report.ranks)))
    return rows


def node_shared(facts: list[RankFacts]) -> str:
    """Say whether the ranks of a host can hold one copy of a model's parameters together, or why not.

    Args:
        facts: those of all ranks; of one rank alone, what a job on its host would find.
    """
    hosts = by_host(facts)
    without = [host.name for host in hosts if host.ranks[0].shm_free is None]
    apart = [host.name for host in hosts if host.ranks[0].shares is False]
    if not settings().loads:
        return "no: MPIZERO_LOADS=0"
    if without:
        return f"no: there is no /dev/shm on {', '.join(without)}"
    if apart:
        return f"no: ranks on {', '.join(apart)} cannot map memory together, perhaps for want of room in /dev/shm"
    least = min(host.ranks[0].shm_free or 0 for host in hosts)
    room = f"{least >> 20:,} MiB of free /dev/shm for them and for gradients on their way"
    if any(each.gpus for each in facts):
        room += "; of models in host memory alone, not of those on a GPU"
    if len(hosts) > 1:
        return f"within a host, as with HYBRID_SHARD, not over {len(hosts)} hosts; {room}"
    return f"yes, at stages 1 to 3; {room}" if facts[0].shares else f"with 2 or more ranks on a host; {room}"


def _host_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("host", "ranks", "cores", "usable by ranks", "free /dev/shm")]
    for host in by_host(report.ranks):
        free = host.ranks[0].shm_free
        shown = "none" if free is None else f"{free / (1 << 20):,.0f} MiB"
        numbers = ranges([facts.rank for facts in host.ranks])
        rows.append((host.name, numbers, str(host.ranks[0].host_cores), str(host.usable), shown))
    return rows


def _rank_rows(facts: list[RankFacts]) -> list[tuple[str, ...]]:
    """Return a row for each set of ranks that are bound alike."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for each in facts:
        threads = "-" if each.threads is None else str(each.threads)
        alike.setdefault((ranges(each.bound_to), threads, each.host), []).append(each.rank)
    rows = [(ranges(numbers), *key) for key, numbers in alike.items()]
    return [("ranks", "bound to cores", "torch threads", "host"), *rows]


def _bandwidth(report: Report) -> str:
    if not report.timings:
        if report.launcher is None:
            return "A table of bandwidths needs at least 2 ranks."
        line = command(report.launcher, 2, [sys.executable, "-m", "mpizero", "doctor"])
        return f"A table of bandwidths needs at least 2 ranks:\n  {shlex.join(line)}"
    count = len(report.ranks)
    title = f"all_reduce of float32 over {count} ranks, by mpizero's own choice (auto) and the MPI library's (native):"
    note = (
        "Times are medians over repeats, of the slowest rank. GB/s are bus bandwidths: bytes x 2(ranks-1)/ranks over\n"
        "time, which is what the busiest link carries and can be compared between numbers of ranks."
    )
    head = ("size", "auto us", "native us", "auto GB/s", "native GB/s")
    return f"{title}\n{aligned([head, *report.timings], right=range(5))}\n{note}"


def _problems(problems: list[Problem]) -> str:
    if not problems:
        return "Problems: none"
    lines = ["Problems:"]
    for problem in sorted(problems, key=lambda problem: not problem.fails):
        effect = "jobs will fail" if problem.fails else "jobs will run"
        lines += [f"- {problem.text} ({effect})", f"  remedy: {problem.remedy}"]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
