"""What is wrong with a job, judged from its facts, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.tables import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.cli.facts import Host, RankFacts
    from mpizero.comm.describe import MpiFacts

__all__ = [
    "Problem",
    "gpu_problems",
    "host_problems",
    "job_problems",
    "library_problems",
    "problem_of",
    "rank_problems",
]

SMALL_SHM = 64 << 20
"""Bytes of /dev/shm that a container has by default, too few for the buffers that ranks of a host share."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Say what is wrong, and the remedy."""

    text: str
    remedy: str
    fails: bool
    """Whether a job will fail by it, rather than be slower or smaller than it could be."""


def problem_of(error: Exception, *, fails: bool = True) -> Problem:
    """Return what an error says, up to what was got, and what it says to do."""
    text, _, remedy = str(error).partition("): ")
    return Problem(text=f"{text})" if remedy else text, remedy=remedy, fails=fails)


def host_problems(host: Host) -> Iterator[Problem]:
    """Find what is wrong with how one host's ranks share it."""
    count, first = len(host.ranks), host.ranks[0]
    if host.usable < min(count, first.host_cores):
        yield Problem(
            text=f"{host.name}: {count} ranks may use {host.usable} of its {first.host_cores} cores",
            remedy="bind each rank to cores of its own, or not at all (Open MPI: --bind-to none; MPICH: -bind-to none; "
            "Intel MPI: I_MPI_PIN=0), or ask the batch system for more cores per task",
            fails=False,
        )
    elif count > host.usable:
        yield Problem(
            text=f"{host.name}: {count} ranks share {host.usable} cores, so that they run in turns: good for trying "
            "things out, too slow for measurements",
            remedy=f"start at most {host.usable} ranks on it",
            fails=False,
        )
    threads = sum(facts.threads or 0 for facts in host.ranks if facts.threads_chosen)
    if count <= host.usable < threads:
        yield Problem(
            text=f"{host.name}: {count} ranks have {threads} torch threads on {host.usable} cores",
            remedy=f"set OMP_NUM_THREADS={host.usable // count}, or unset it: mpizero.shard then divides the cores",
            fails=False,
        )
    if first.shm_free is not None and first.shm_free <= SMALL_SHM:
        yield Problem(
            text=f"{host.name}: /dev/shm has {first.shm_free >> 20} MiB free, which its ranks may outgrow",
            remedy="in a container start it with --shm-size=1g (Docker, Podman) or bind the host's /dev/shm; else "
            "remove what other jobs left there",
            fails=False,
        )


def job_problems(facts: list[RankFacts], hosts: list[Host]) -> Iterator[Problem]:
    """Find where the launcher, the MPI library and the hosts' names tell different stories of who is where.

    Args:
        facts: those of all ranks.
        hosts: the same ranks by the names of their hosts.
    """
    first = facts[0]
    if len(facts) > 1 and first.claimed is not None and len(facts) < first.claimed:
        yield Problem(
            text=f"the launcher says that the job has {first.claimed} ranks, the MPI library {len(facts)}: it is "
            "several jobs, each of which would train alone",
            remedy="start one mpirun for all hosts, not one per host (not `srun mpirun`), or srun itself",
            fails=True,
        )
    apart = [each.rank for each in facts if each.started is not None and each.joined < each.started]
    if apart:
        each = facts[apart[0]]
        yield Problem(
            text=f"{each.host}: the launcher started {each.started} ranks on it, of which the MPI library shows rank "
            f"{each.rank} only {each.joined} (so on rank {ranges(apart)}): they are hidden from each other, and share "
            "neither memory nor copies of the parameters",
            remedy="let containers of a host share it: one container for all its ranks, or --ipc=host --pid=host "
            "--uts=host (Docker, Podman); Apptainer without --containall, --ipc, --pid and --uts",
            fails=False,
        )
    named = [host for host in hosts if max(each.joined for each in host.ranks) > len(host.ranks)]
    if named and not apart:
        yield Problem(
            text="ranks that share memory say that they are on different hosts: "
            f"{', '.join(host.name for host in named)}",
            remedy="give containers of one host its name (Docker, Podman: --uts=host): cores and GPUs are divided by "
            "names",
            fails=False,
        )


def rank_problems(facts: list[RankFacts]) -> Iterator[Problem]:
    """Find in what the ranks differ that have to be alike, and what they lack."""
    for index, name in enumerate(("mpizero", "Python", "torch")):
        found: dict[str, list[int]] = {}
        for each in facts:
            found.setdefault(each.versions[index] or "none", []).append(each.rank)
        if len(found) > 1:
            listed = "; ".join(f"{version} on rank {ranges(ranks)}" for version, ranks in found.items())
            remedy = "start all ranks with the same Python environment, on a file system that all hosts see"
            yield Problem(text=f"ranks have different versions of {name}: {listed}", remedy=remedy, fails=True)
    version = facts[0].versions[2]
    if facts[0].threads is None:
        broken = bool(version)
        yield Problem(
            text=f"torch {version}"
            if broken
            else "torch is not installed: the collectives work, mpizero.shard does not",
            remedy="reinstall it with `pip install 'mpizero[torch]'`" if broken else "`pip install 'mpizero[torch]'`",
            fails=broken,
        )


def gpu_problems(facts: list[RankFacts], hosts: list[Host] | None = None) -> Iterator[Problem]:
    """Find what makes communication of GPU memory slow or unsafe; a text that several ranks have is said once.

    Args:
        facts: those of all ranks.
        hosts: the same ranks by host, for whether there is a GPU for each.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for each in facts:
        for warning in each.gpu_warnings:
            found.setdefault(warning, []).append(each.rank)
    for (text, remedy), ranks in found.items():
        where = "" if len(ranks) == len(facts) else f" (on rank {ranges(ranks)})"
        yield Problem(text=f"{text}{where}", remedy=remedy, fails=False)
    if any(each.gpus for each in facts):
        for host in hosts or ():
            yield from _too_few_gpus(host)


def _too_few_gpus(host: Host) -> Iterator[Problem]:
    count = len(host.ranks)
    seen = len({gpu.bus for each in host.ranks for gpu in each.gpus})
    without = [each.rank for each in host.ranks if not each.gpus]
    ask = (
        f"ask for {count} GPUs per node (Slurm: --gpus-per-node={count} --gpu-bind=none; PBS: ngpus={count}; LSF: -gpu "
    )
    ask += f"num={count})"
    if without:
        why = next(each.no_gpu for each in host.ranks if not each.gpus)
        text = f"{host.name}: rank {ranges(without)} sees no GPU, while others do ({why}): it cannot train on one"
        yield Problem(text=text, remedy=ask, fails=True)
    elif seen < count:
        text = f"{host.name}: {count} ranks have {seen} GPU{'s' * (seen > 1)}, so that several compute on one in turns"
        yield Problem(text=text, remedy=f"{ask}, or start {seen} rank{'s' * (seen > 1)} on it", fails=False)


def library_problems(mpi: MpiFacts) -> Iterator[Problem]:
    """Find what the MPI library lacks."""
    if mpi.thread_level != "MULTIPLE":
        yield Problem(
            text=f"{mpi.name} grants MPI_THREAD_{mpi.thread_level}, not MPI_THREAD_MULTIPLE: threads of a rank may not "
            "communicate at the same time",
            remedy="unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL, or use an MPI built with full thread support; "
            "leave all communication to the main thread until then",
            fails=False,
        )
