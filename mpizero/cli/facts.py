"""What one rank knows about where it runs."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
from dataclasses import dataclass

from mpizero import __version__
from mpizero.comm.gpus import Gpu, allocator, find_gpus, local_size, memory_warnings
from mpizero.comm.launch import cores, under_launcher
from mpizero.settings import settings

__all__ = ["Host", "RankFacts", "by_host", "rank_facts"]

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (looked at, never written to)


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Hold one rank's facts; sent to rank 0."""

    rank: int
    host: str
    bound_to: tuple[int, ...]
    """The numbers of the cores that this process may use."""

    host_cores: int
    """Cores that the host has, whoever may use them."""

    versions: tuple[str, str, str]
    """Of mpizero, Python and torch; torch's is "" where it is not installed, and says so where it fails to load."""

    threads: int | None
    """Threads that torch uses in this rank before `shard`; None without torch."""

    threads_chosen: bool
    """Whether the user set them (`OMP_NUM_THREADS`); else `shard` divides the host's cores by its ranks."""

    shm_free: int | None
    """Free bytes of /dev/shm; None where there is none."""

    shares: bool | None = None
    """Whether the ranks of its host map memory together; None for a rank that is alone on its host."""

    started: int | None = None
    """How many ranks its launcher says that it started on this host; None where it does not say."""

    joined: int = 1
    """How many ranks the MPI library says share this one's memory, itself among them."""

    claimed: int | None = None
    """How many ranks its launcher says that the job has; None outside of a job."""

    gpus: tuple[Gpu, ...] = ()
    """Those that this process sees."""

    no_gpu: str = ""
    """Why it sees none."""

    gpu_warnings: tuple[tuple[str, str], ...] = ()
    """What makes communication of GPU memory slow or unsafe in this process, each with its remedy."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Hold what the ranks of one host have in common."""

    name: str
    ranks: tuple[RankFacts, ...]

    @property
    def usable(self) -> int:
        """Return how many cores its ranks may use together."""
        return len({core for facts in self.ranks for core in facts.bound_to})


def rank_facts(rank: int, shares: bool | None = None, joined: int = 1) -> RankFacts:  # noqa: FBT001  (facts)
    """Return the facts of this process, which is `rank`; loads torch, and CuPy where there is a driver, if installed.

    Args:
        rank: its number.
        shares: whether it maps memory together with the other ranks of its host; None without such.
        joined: how many ranks the MPI library puts on its host.
    """
    version, threads = _torch()
    gpus, no_gpu = find_gpus()
    bound = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(cores())
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        bound_to=tuple(bound),
        host_cores=os.cpu_count() or 1,
        versions=(__version__, platform.python_version(), version),
        threads=threads,
        threads_chosen=settings().threads is not None,
        shm_free=_shm_free(),
        shares=shares,
        started=local_size(),
        joined=joined,
        claimed=under_launcher(),
        gpus=gpus,
        no_gpu=no_gpu,
        gpu_warnings=tuple(memory_warnings(pool=allocator())) if gpus else (),
    )


def by_host(facts: list[RankFacts]) -> list[Host]:
    """Return the hosts in the order of their first ranks."""
    names = list(dict.fromkeys(each.host for each in facts))
    return [Host(name=name, ranks=tuple(each for each in facts if each.host == name)) for name in names]


def _torch() -> tuple[str, int | None]:
    if importlib.util.find_spec("torch") is None:
        return "", None
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"fails to load ({error})", None
    return str(torch.__version__), torch.get_num_threads()


def _shm_free() -> int | None:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None
