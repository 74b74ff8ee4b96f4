"""Start a job, and start it again when it fails: `mzrun --restarts N`.

MPI cannot go on without a rank, so a restart is a new job that loads the last whole checkpoint; what helps is to have
it at once, without waiting in the queue again, and without the hosts that are gone. A job that cannot run at all is not
started for ever: two failures within `QUICK` seconds are enough. The exit code is that of the last attempt.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpizero.cli.jobs import Ended, kill_group, watching
from mpizero.comm import sweep
from mpizero.comm.launch import FAMILIES, Launcher, command
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BAD_USAGE", "Launch", "Policy", "run_job"]

BAD_USAGE = 2
QUICK = 5.0
"""Seconds within which a job that fails has done nothing: mostly an error in its command line or its imports."""
ANSWER = 20.0
"""Seconds that a host has to run a trivial program."""
AT_ONCE = 16
"""Hosts that are tried at the same time."""
VARIABLE = "MPIZERO_RESTART"
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")
"""Variables by which mpirun finds hosts that nobody has named to it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Say what is started, and how."""

    launcher: Launcher
    ranks: int
    hosts: tuple[str, ...] = ()
    """Each `NAME` or `NAME:RANKS`; none leaves the place to the launcher."""
    program: tuple[str, ...]
    """The command of each rank."""
    mpi_args: tuple[str, ...] = ()
    """The user's flags for the launcher."""
    flags: tuple[str, ...] = ()
    """mzrun's own, ahead of them."""
    variables: dict[str, str]
    """The launcher's environment."""

    def line(self) -> list[str]:
        """Return the launcher's command line."""
        line = command(self.launcher, self.ranks, self.program, self.hosts)
        line[1:1] = [*self.flags, *self._exports(), *self.mpi_args]
        if "--bind-to" in self.mpi_args and line.count("--bind-to") > 1:
            at = len(line) - 1 - line[::-1].index("--bind-to")
            del line[at : at + 2]
        return line

    def may_lose_hosts(self) -> bool:
        """Return whether an exit code of 0 has to be doubted; see `lost`."""
        several = bool(self.hosts) or any(name in self.variables for name in ALLOCATIONS)
        return several and FAMILIES.get(self.launcher.vendor) == "openmpi"

    def _exports(self) -> list[str]:
        """Return flags that carry our variables to other hosts; only Open MPI leaves the environment behind."""
        if not self.hosts or FAMILIES.get(self.launcher.vendor) != "openmpi":
            return []
        return [word for name in sorted(self.variables) if name.startswith("MPIZERO_") for word in ("-x", name)]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Say whether and how a job that failed is started again."""

    restarts: int = 0
    """How often at most."""
    min_ranks: int = 1
    """With less ranks than these it is not."""
    rank_counts: tuple[int, ...] = ()
    """The numbers of ranks that will do when hosts are gone; none means any."""


def run_job(launch: Launch, policy: Policy, timeout: float | None) -> int:
    """Run a job, again where it fails, and return the exit code of the last attempt.

    Restarts have their number in the environment, `MPIZERO_RESTART`.
    It is not started again after exit code 2, which is bad usage, after `timeout`, after any signal that reached
    `mzrun`, and after two attempts in a row that failed within `QUICK` seconds. The processes that an attempt has left
    are killed before the next. With hosts, each has to run a trivial program first; those that do not are left out.

    Args:
        launch: what to start.
        policy: what to do when it fails.
        timeout: seconds for all attempts together.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    quick = 0
    now = launch
    with watching() as watch:
        for attempt in range(policy.restarts + 1):
            mark = uuid.uuid4().hex
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = watch.run(now.line(), _marked(now, mark, attempt), left, listen=now.may_lose_hosts())
            if ended.timed_out:
                _say(f"the job was ended: it took longer than --timeout {timeout:g} s")
                return ended.code
            if ended.code == 0 or watch.asked:
                return ended.code
            if not policy.restarts:
                if ended.lost_a_host:
                    _say(_cause(ended))
                return ended.code
            quick = quick + 1 if ended.seconds < QUICK else 0
            reason = _why_not(ended, quick, attempt, policy)
            if not reason:
                sweep.end(sweep.members(mark))
                now, reason = _what_is_left(launch, policy, mark)
            if reason or watch.asked:
                _say(f"{_cause(ended)}; not restarted: {reason or 'mzrun was asked to end'}")
                return ended.code
            _say(f"{_cause(ended)}; restart {attempt + 1} of {policy.restarts} on {_place(launch, now)}")
    raise AssertionError  # the last attempt has a reason not to be followed


def _marked(launch: Launch, mark: str, attempt: int) -> dict[str, str]:
    variables = {**launch.variables, sweep.MARK: mark}
    count = settings().restart + attempt  # a job that its scheduler has queued again may say so
    return {**variables, VARIABLE: str(count)} if count else variables


def _why_not(ended: Ended, quick: int, attempt: int, policy: Policy) -> str:
    if ended.code == BAD_USAGE:
        return "exit code 2 is for bad usage"
    if quick > 1:
        return f"it failed within {QUICK:g} s of its start twice in a row"
    return f"no restart of {policy.restarts} is left" if attempt == policy.restarts else ""


def _what_is_left(launch: Launch, policy: Policy, mark: str) -> tuple[Launch, str]:
    """Return what can be started on the hosts that answer, and why nothing can, "" where something can."""
    if not launch.hosts:
        return launch, ""
    names = sorted({_name(host) for host in launch.hosts})
    with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        silent = dict(zip(names, pool.map(lambda name: _failure(launch, name, mark), names), strict=True))
    hosts = tuple(host for host in launch.hosts if not silent[_name(host)])
    if not hosts:
        return launch, f"no host answers ({next(iter(silent.values()))})"
    ranks = launch.ranks * sum(map(_slots, hosts)) // sum(map(_slots, launch.hosts))
    if policy.rank_counts and ranks < launch.ranks:
        ranks = max((count for count in policy.rank_counts if count <= ranks), default=0)
    if ranks < policy.min_ranks:
        gone = ", ".join(name for name in names if silent[name])
        return launch, f"without {gone} there would be {ranks} ranks, less than --min-ranks {policy.min_ranks}"
    return replace(launch, hosts=hosts, ranks=ranks), ""


def _failure(launch: Launch, name: str, mark: str) -> str:
    """Return why a host cannot run a program, "" where it can: the program ends what the job has left there."""
    program = (sys.executable, "-I", sweep.__file__, mark)
    tried = replace(launch, ranks=1, hosts=(name,), program=program)
    # The mark must not be the tried program's own.
    variables = {key: value for key, value in launch.variables.items() if key != sweep.MARK}
    null = subprocess.DEVNULL
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            tried.line(), env=variables, stdin=null, stdout=null, stderr=errors, start_new_session=True
        ) as process:
            try:
                code = process.wait(ANSWER)
            except subprocess.TimeoutExpired:
                kill_group(process)
                return f"{name} ran nothing within {ANSWER:g} s"
        errors.seek(0)
        said = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
    first = next((line for line in said if any(map(str.isalnum, line))), f"exit code {code}")
    return f"{name}: {first}" if code else ""


def _name(host: str) -> str:
    return host.partition(":")[0]


def _slots(host: str) -> int:
    count = host.partition(":")[2]
    return int(count) if count.isdecimal() else 1


def _cause(ended: Ended) -> str:
    code = ended.code
    if ended.lost_a_host:
        return f"the job lost a host after {ended.seconds:.0f} s"
    with_name = {128 + number: number.name for number in signal.Signals}
    name = f" ({with_name[code]})" if code in with_name else ""
    return f"the job ended with exit code {code}{name} after {ended.seconds:.0f} s"


def _place(asked: Launch, now: Launch) -> str:
    ranks = f"{now.ranks} rank{'s' * (now.ranks > 1)}"
    gone = _missing(asked.hosts, now.hosts)
    return f"{ranks}, without {', '.join(gone)}" if gone else ranks


def _missing(asked: Sequence[str], now: Sequence[str]) -> list[str]:
    return [_name(host) for host in asked if host not in now]


def _say(text: str) -> None:
    print(f"mzrun: {text}", file=sys.stderr, flush=True)
