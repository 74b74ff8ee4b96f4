"""Start torch.distributed under an MPI launcher: registration, and the first store that all ranks reach."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from mpizero.c10d.group import NAME, create
from mpizero.c10d.store import open_store
from mpizero.comm import world

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["init", "register"]

SCHEME = "mpi"
DEVICES = ["cpu", "cuda"]
STORE_SECONDS = 300.0


def init(backend: str = NAME, **named: Any) -> None:
    """Start torch.distributed with all ranks of the MPI job, and no address or port given by anybody.

    Collective over the job. Rank 0 opens a `TCPStore` on a free port, on 127.0.0.1 where all ranks are on its host,
    else at the first of its names and addresses that a rank of every host reaches, which MPI tells the others. Sets
    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment where they are not set, for programs that read
    what torchrun gives.

    Args:
        backend: another backend can be started in the same way, "gloo" to compare with, or "cpu:mpizero,cuda:nccl".
        named: passed on to `dist.init_process_group`: `timeout`, `device_id`, and so on.

    Raises:
        LaunchError: where the ranks do not see each other, or some host reaches no address of rank 0.
        CollectiveTimeoutError: where a rank does not come.
    """
    whole = world()
    here = {
        "RANK": whole.rank,
        "WORLD_SIZE": whole.size,
        "LOCAL_RANK": whole.node.rank,
        "LOCAL_WORLD_SIZE": whole.node.size,
    }
    for name, value in here.items():
        os.environ.setdefault(name, str(value))
    if "store" not in named:
        timeout = named.get("timeout") or timedelta(seconds=STORE_SECONDS)
        named["store"] = open_store(whole, timeout)
    dist.init_process_group(backend, rank=whole.rank, world_size=whole.size, **named)


def rendezvous(_: str, timeout: timedelta = timedelta(seconds=STORE_SECONDS), **__: Any) -> Iterator[Any]:
    """Give `init_method="mpi://"` its store, rank and number of ranks."""
    whole = world()
    yield open_store(whole, timeout), whole.rank, whole.size


def register() -> None:
    """Tell torch of the backend "mpizero" and of `mpi://`; again it does nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
        torchs: Any = dist
        torchs.register_rendezvous_handler(SCHEME, rendezvous)
