"""A job over the hosts of bin/cluster: where its ranks go, the mpirun that starts them, its end.

[Note: placement] Ranks are placed by `--map-by seq` from a file with one line per rank. Open MPI's other mappings count
slots: with 3, 2 and 1 ranks per host, `--map-by node` would level them, and `ppr` knows equal numbers alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _cluster_net import INTERFACE, end
from _cluster_state import Cluster, ClusterError, folder, locked, read

from mpizero.errors import must_be

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
TIMED_OUT = 124
GRACE = 5.0
"""Seconds that mpirun has to end its ranks after it was asked to."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MARK = "MPIZERO_CLUSTER_JOB"
"""Variable by which the processes of a job are found again: daemons leave their parents."""
OUTER_JOB = ("OMPI_COMM_WORLD_", "PMIX_", "PRTE_", "PMI_")

# What may be replaced by the user's own environment: plain TCP between hosts, as the rates are TCP's business, and no
# one-sided UCX, whose errors Open MPI's wheel prints while it stands back for another component.
DEFAULTS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a job over a cluster."""

    ranks: list[int]
    """The host of each rank."""
    program: list[str]
    """The command of each rank."""
    timeout: float | None
    """Seconds after which the job is ended."""


class _StoppedError(Exception):
    """Say that a signal asks for the end of the job; holds its number."""


def place(counts: list[int], order: str) -> list[int]:
    """Return the host of each rank, for `counts[i]` ranks on host i.

    Args:
        counts: ranks per host.
        order: block (fill host after host) or round-robin (one rank per host and turn, while it has room).
    """
    if order == "block":
        return [host for host, count in enumerate(counts) for _ in range(count)]
    return [host for turn in range(max(counts, default=0)) for host, count in enumerate(counts) if turn < count]


def spread(hosts: int, ranks: int | None, per_host: list[int] | None) -> list[int]:
    """Return the number of ranks of each host.

    Args:
        hosts: how many there are.
        ranks: how many in all; None for as many as `per_host` gives.
        per_host: one number for at most so many on every host, hosts filled in order, or one per host; None spreads the
            ranks evenly, the first hosts having one more.

    Raises:
        ClusterError: where the numbers do not go together.
    """
    if per_host is None:
        if ranks is None:
            raise ClusterError("the number of ranks must be given: add -n N, or --per-host")
        return [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
    if len(per_host) > hosts:
        raise ClusterError(must_be("--per-host", f"one number, or one for each of {hosts} hosts", per_host))
    if len(per_host) == 1:
        room = per_host[0] * hosts
        wanted = room if ranks is None else ranks
        if wanted > room:
            remedy = "give less ranks, or more per host"
            raise ClusterError(must_be("-n", f"at most {room}, {per_host[0]} on each of {hosts} hosts", wanted, remedy))
        return [min(per_host[0], max(0, wanted - per_host[0] * host)) for host in range(hosts)]
    if ranks not in {None, sum(per_host)}:
        raise ClusterError(must_be("-n", f"{sum(per_host)}, the sum of --per-host", ranks, "leave -n out"))
    return [*per_host, *[0] * (hosts - len(per_host))]


def find_mpirun() -> Path:
    """Return the mpirun beside this Python, on PATH or in the checkout's .venv, the first of Open MPI 5 or newer.

    Raises:
        ClusterError: where there is none.
    """
    seen = []
    for path in _candidates():
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        title = (done.stdout.strip().splitlines() or ["no version"])[0]
        version = title.rpartition(" ")[2].partition(".")[0]
        if "Open MPI" in title and version.isdecimal() and int(version) >= 5:
            return path
        seen.append(f"{title} in {path.parent}")
    remedy = "`bin/quickstart` makes .venv with one; under sudo PATH may be another than yours"
    raise ClusterError(must_be("mpirun", "Open MPI's, version 5 or newer", ", ".join(seen) or "none", remedy))


def run(cluster: Cluster, job: Job) -> int:
    """Run a job and return its exit code, 124 where the time-out ended it, 128 + N where signal N did.

    mpirun runs in the first host, so that all traffic between hosts goes over their links.

    Raises:
        ClusterError: where there is no mpirun, or no such program for it.
    """
    mpirun = find_mpirun()
    variables = environment(os.environ, mpirun)
    if shutil.which(job.program[0], path=variables["PATH"]) is None:
        raise ClusterError(must_be("the program", "a command that is found", job.program[0]))
    agent = folder(cluster.name) / "agent"
    with tempfile.NamedTemporaryFile("w", dir=agent.parent, prefix="ranks-", delete=False) as file:
        file.writelines(f"{cluster.host(host)}\n" for host in job.ranks)
    try:
        line = [str(mpirun), "--prtemca", "plm_ssh_agent", str(agent), "--allow-run-as-root", "--bind-to", "none"]
        line += ["--hostfile", file.name, "--map-by", "seq:OVERSUBSCRIBE", "-n", str(len(job.ranks)), *job.program]
        first = cluster.host(job.ranks[0])
        code = _watch([str(agent), first, f"exec {shlex.join(line)}"], variables, job.timeout)
    finally:
        Path(file.name).unlink(missing_ok=True)
    return _code_of(code, cluster)


def _code_of(code: int, cluster: Cluster) -> int:
    """Return a job's exit code; 1 where mpirun says 0 because its hosts were taken away under it."""
    if code == 0:
        with locked(cluster.name):  # whoever removes them holds it until they are gone
            gone = read(cluster.name) is None
        if gone:
            print(f"bin/cluster run: the hosts of {cluster.name} were removed while the job ran", file=sys.stderr)
            return 1
    return code


def environment(variables: Mapping[str, str], mpirun: Path) -> dict[str, str]:
    """Return the environment of a job: this one, less what an outer job said about itself, and Open MPI's settings."""
    kept = {key: value for key, value in variables.items() if not key.startswith(OUTER_JOB)}
    kept["PATH"] = os.pathsep.join([str(mpirun.parent), kept.get("PATH", os.defpath)])
    # Loopback would do between ranks of one host, but never between hosts: all have the same address on it.
    kept["OMPI_MCA_btl_tcp_if_include"] = INTERFACE
    kept[MARK] = uuid.uuid4().hex
    kept.pop("MPIZERO_TTY", None)
    if sys.stdout.isatty():
        kept["MPIZERO_TTY"] = "1"
        kept["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return {**DEFAULTS, **kept}


def _candidates() -> Iterator[Path]:
    folders = [Path(entry) for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry]
    if sys.prefix != sys.base_prefix:
        folders.insert(0, Path(sys.prefix) / "bin")
    for place in [*folders, ROOT / ".venv" / "bin"]:
        if os.access(place / "mpirun", os.X_OK):
            yield place.absolute() / "mpirun"


def _watch(line: list[str], variables: dict[str, str], timeout: float | None) -> int:
    for number in STOPS:
        signal.signal(number, _stop)
    # A session of its own: a Ctrl-C reaches the job once, through this process. It has no terminal to read from then.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    with subprocess.Popen(line, env=variables, stdin=stdin, start_new_session=True) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"bin/cluster: the job was ended: it took longer than --timeout {timeout:g} s", file=sys.stderr)
            code = TIMED_OUT
        except _StoppedError as stop:
            code = 128 + int(str(stop))
        if process.poll() is None or process.returncode < 0:
            _end(process, variables[MARK])
    return code if code >= 0 else 128 - code


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _StoppedError(number)


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """Ask mpirun to end, then end what carries the job's mark: a killed mpirun leaves its ranks running."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    mark = f"{MARK}={token}".encode()
    end([int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _environment_of(path)])


def _environment_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []
