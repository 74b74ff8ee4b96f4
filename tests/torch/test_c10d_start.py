"""A job of the backend: ways to start it, its store, its end, and ranks that do not come."""

import os
import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

import mpizero.c10d
from mpizero.c10d.members import Place, await_members
from mpizero.c10d.store import Answering, addresses, agreed, calls, open_store
from mpizero.errors import CollectiveTimeoutError, LaunchError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

LONG = timedelta(seconds=30)


@pytest.mark.parametrize("method", ["init", "mpi://", "env://"])
def test_a_job_starts_and_ends_time_and_again(world, method, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if method == "init":
        mpizero.c10d.init()
        assert os.environ["RANK"] == str(world.rank)
        assert os.environ["LOCAL_WORLD_SIZE"] == str(world.node.size)
        assert dist.get_node_local_rank() == world.node.rank
    elif method == "mpi://":
        dist.init_process_group("mpizero", init_method="mpi://")
    else:
        environment = {
            "RANK": world.rank,
            "WORLD_SIZE": world.size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port(world),
        }
        for name, text in environment.items():
            monkeypatch.setenv(name, str(text))
        dist.init_process_group("mpizero")
    assert dist.get_backend() == "mpizero"
    assert dist.group.WORLD.name() == "mpizero"
    x = torch.tensor([world.rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == sum(range(1, world.size + 1))
    dist.barrier()
    comm = dist.group.WORLD.comm
    dist.destroy_process_group()
    if hasattr(dist.ProcessGroup, "shutdown"):
        assert comm.closed or world.size == 1


def port(world):
    """Return a free port, the same on all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return world.mpi.bcast(taken.getsockname()[1])


def test_torchs_ranks_may_be_in_another_order_than_mpis(world):
    store = open_store(world, LONG)
    dist.init_process_group("mpizero", store=store, rank=(world.rank + 1) % world.size, world_size=world.size)
    ranks = [None] * world.size
    dist.all_gather_object(ranks, world.rank)
    assert ranks == [(rank - 1) % world.size for rank in range(world.size)]
    some = dist.new_group([0])  # made by MPI's last
    assert dist.get_rank() or some.members.ranks == (world.size - 1,)
    dist.destroy_process_group()


def test_a_job_of_fewer_ranks_than_mpis(world):
    store = open_store(world, LONG)
    if world.rank < max(1, world.size - 1):
        size = max(1, world.size - 1)
        dist.init_process_group("mpizero", store=store, rank=world.rank, world_size=size)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.eq(size).all()
        dist.destroy_process_group()


def test_a_job_of_more_ranks_than_mpis_is_refused(world):
    with pytest.raises(LaunchError, match="torchrun"):
        dist.init_process_group("mpizero", store=dist.HashStore(), rank=0, world_size=world.size + 1)
    assert not dist.is_initialized()


def test_addresses_are_tried_before_they_are_told():
    listening = Answering()
    try:
        assert calls("127.0.0.1", listening.port, listening.token)
        assert not calls("127.0.0.1", listening.port, b"another rank 0's")
    finally:
        listening.close()
    assert not calls("127.0.0.1", listening.port, listening.token)
    assert agreed(["a", "b", "c"], [["a", "c"], ["b", "c"]]) == "c"
    with pytest.raises(LaunchError, match="a, b"):
        agreed(["a", "b"], [["a"], ["b"]])
    assert not any(host.startswith("127.") for host in addresses())


def test_a_member_that_does_not_come_is_named(world):
    store = dist.PrefixStore(f"met{world.rank}/", dist.HashStore())
    place = Place(store=store, rank=1, size=3, name="g", seconds=0.05)
    with pytest.raises(CollectiveTimeoutError, match="rank 0, 2 of it"):
        await_members(place)


def test_a_rank_that_does_not_start_is_named(world):
    comm = mpizero.Communicator(world.mpi)
    if world.rank < world.size - 1:
        missing = f"for rank {world.size - 1}; every rank of the MPI job" if world.rank == 0 else "recv from rank 0"
        with pytest.raises(CollectiveTimeoutError, match=missing):
            open_store(comm, timedelta(milliseconds=50))
