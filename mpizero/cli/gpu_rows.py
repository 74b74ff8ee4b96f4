"""What `mpizero doctor` says of GPUs: which there are, whether MPI takes their memory, and over which wire it goes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mpizero.cli.facts import Host, RankFacts, by_host
from mpizero.comm.describe import MpiFacts, takes_device_memory
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["gpu_rows", "messages", "on_the_node"]

HOW_TO_TRY = "MPIZERO_CANARY=1 tries it in child processes, MPIZERO_CUDA_AWARE=1 takes it on trust"


def gpu_rows(ranks: list[RankFacts], mpi: MpiFacts | None) -> Iterator[tuple[str, str]]:
    """Yield rows of what and its value; without any GPU in the job, one for that and one for the MPI library.

    Args:
        ranks: the facts of all ranks; of one rank alone, what a job on its host would find.
        mpi: those of the MPI library, None where none loads.
    """
    hosts = by_host(ranks)
    found = any(each.gpus for each in ranks)
    yield "GPUs", _listed(hosts)
    if mpi is None:
        return
    aware = {True: "yes", False: "no", None: "unknown"}[mpi.gpu_aware]
    yield "takes GPU memory", f"{aware}: {mpi.gpu_source}"
    if mpi.ucx and (found or "/libucx/" in mpi.ucx):
        yield "UCX", mpi.ucx
    if not found:
        return
    alone = len(ranks) == 1
    if alone or len(ranks) > len(hosts):
        yield "GPU data on a host", on_the_node(hosts, mpi)
    if alone or len(hosts) > 1:
        yield "GPU data between hosts", messages(mpi)


def on_the_node(hosts: list[Host], mpi: MpiFacts) -> str:
    """Say how GPU data go between ranks of one host, and why."""
    hidden = [host.name for host in hosts if len({frozenset(gpu.bus for gpu in each.gpus) for each in host.ranks}) > 1]
    if not settings().loads:
        return f"{messages(mpi)}; no loads on the node: MPIZERO_LOADS=0"
    if hidden:
        return f"{messages(mpi)}; no loads on the node: ranks of {', '.join(hidden)} see different GPUs"
    return "loads on the node: each rank sees the GPUs of its host's others"


def messages(mpi: MpiFacts) -> str:
    """Say how GPU data go in messages, and why."""
    if takes_device_memory(mpi):
        return f"CUDA-aware messages: {mpi.gpu_source}"
    if mpi.gpu_aware is False and mpi.gpu_sure:
        return "staged through host memory: the MPI library does not take GPU memory"
    return f"staged through host memory, since nothing has shown that messages may carry GPU memory; {HOW_TO_TRY}"


def _listed(hosts: list[Host]) -> str:
    """Say what the ranks of each host see together; hosts that see the same are named together."""
    alike: dict[str, list[str]] = {}
    for host in hosts:
        alike.setdefault(_seen(host), []).append(host.name)
    if len(alike) == 1:
        every = f" on each of {len(hosts)} hosts" if len(hosts) > 1 and hosts[0].ranks[0].gpus else ""
        return next(iter(alike)) + every
    return "; ".join(f"{', '.join(names)}: {seen}" for seen, names in alike.items())


def _seen(host: Host) -> str:
    seen = {gpu.bus: gpu.name for each in host.ranks for gpu in each.gpus}
    if not seen:
        return f"none found: {host.ranks[0].no_gpu}"
    return ", ".join(f"{count} x {name}" for name, count in Counter(seen.values()).items())
