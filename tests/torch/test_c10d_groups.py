"""Groups of the backend: their life, their order, their time-outs and errors, and what a `Work` tells."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
from helpers.c10d import job, old_names, same, value  # noqa: F401
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import mpizero.c10d
from mpizero.c10d.members import Place, await_members
from mpizero.c10d.store import Answering, addresses, agreed, calls, open_store
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, LaunchError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

SHORT = timedelta(milliseconds=300)
LONG = timedelta(seconds=30)


@pytest.fixture
def group(job):  # noqa: F811
    """A group of its own for a test that breaks it."""
    made = dist.new_group(timeout=SHORT)
    yield made
    dist.destroy_process_group(made)


def ring(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def everybody(world):
    return sum(range(1, world.size + 1))


# Starting and ending. First, while no job of the module's is up.


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
    assert x.item() == everybody(world)
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


# What follows shares one job.


def test_meshes_of_two_and_three_dimensions(world, job):  # noqa: F811
    half = max(1, world.size // 2)
    for shape in ((world.size // half, half), (half, 1, world.size // half)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
        for dim, extent in enumerate(shape):
            x = torch.ones(1)
            dist.all_reduce(x, group=mesh.get_group(dim))
            assert x.item() == extent
            ranks = dist.get_process_group_ranks(mesh.get_group(dim))
            gathered = [None] * extent
            dist.all_gather_object(gathered, world.rank, mesh.get_group(dim))
            assert gathered == ranks


def test_split_group(world, job):  # noqa: F811
    """dist.split_group asks for an accelerator; the method that it calls does not."""
    part = dist.group.WORLD.split_group(list(range(world.rank % 2, world.size, 2)), timeout=LONG)
    x = torch.ones(1)
    part.allreduce([x]).wait()
    assert x.item() == part.size()
    nobody = (
        dist.group.WORLD.split_group([(world.rank + 1) % world.size]) if world.size > 2 and world.rank == 3 else None
    )
    assert nobody is None
    part.shutdown()


def test_groups_do_not_wait_for_each_other(world, job):  # noqa: F811
    """Ranks start and finish collectives of two groups in different orders, with a message between."""
    first, second = dist.new_group(), dist.new_group()
    order = [first, second] if world.rank % 2 == 0 else [second, first]
    xs = {group: torch.full((1000,), 1.0 + world.rank) for group in order}
    works = [dist.all_reduce(xs[group], group=group, async_op=True) for group in order]
    if world.size > 1:
        following, before = ring(world)
        out = torch.empty(1)
        messages = [dist.isend(torch.ones(1), following), dist.irecv(out, before)]
        for message in messages:
            message.wait()
    for work in reversed(works):
        work.wait()
    assert all(x.eq(everybody(world)).all() for x in xs.values())
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def test_work_goes_on_while_the_caller_computes(world, job):  # noqa: F811
    x = torch.ones(100_000)
    work = dist.all_reduce(x, async_op=True)
    until = time.monotonic() + 20
    while not work.is_completed():  # nobody helps it along
        assert time.monotonic() < until
        time.sleep(0.001)
    assert x.eq(world.size).all()
    assert work.result()[0] is x
    with pytest.raises(CollectiveError, match="recv"):
        work.source_rank()


def test_calls_on_one_group_keep_their_order(world, job):  # noqa: F811
    x = torch.ones(10)
    works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
    dist.all_reduce(x)  # behind them
    assert x.eq(world.size**6).all()
    assert all(work.is_completed() for work in works)


def test_futures(world, job):  # noqa: F811
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: 2 * future.value()[0])
    assert doubled.wait().eq(2 * world.size).all()
    assert work.get_future() is work.get_future()
    assert work.get_future().wait()[0] is x
    done = dist.group.WORLD.broadcast([x]).get_future()
    assert done.wait()[0] is x
    if world.size > 1:
        following, before = ring(world)
        out = torch.empty(3)
        arrived = dist.irecv(out, before).get_future()
        dist.isend(x, following).get_future().wait()
        assert arrived.wait()[0] is out
        assert out.eq(world.size).all()


def test_a_callback_may_wait_for_another_collective(world, job):  # noqa: F811
    """As in torch's PowerSGD hook."""

    def again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    x = torch.ones(3)
    result = dist.all_reduce(x, async_op=True).get_future().then(again)
    assert result.wait().eq(world.size**2).all()


def test_functional_collectives(world, job):  # noqa: F811
    group, n = dist.group.WORLD, world.size
    x = torch.arange(2.0 * n) + world.rank
    total = functional.all_reduce(x, "sum", group)
    assert isinstance(total, functional.AsyncCollectiveTensor)
    assert total.eq(n * torch.arange(2.0 * n) + n * (n - 1) / 2).all()
    assert functional.all_reduce(x, "avg", group).eq(torch.arange(2.0 * n) + (n - 1) / 2).all()
    with old_names():
        parts = functional.reduce_scatter_tensor(x, "sum", 0, group)
    assert parts.eq((n * torch.arange(2.0 * n) + n * (n - 1) / 2)[2 * world.rank : 2 * world.rank + 2]).all()
    with old_names():
        gathered = functional.all_gather_tensor(x[:1], 0, group)
    assert gathered.tolist() == list(range(n))
    crossed = functional.all_to_all_single(x, None, None, group)
    assert crossed.tolist() == [2.0 * world.rank + source + at for source in range(n) for at in range(2)]
    told = functional.broadcast(x.clone(), 0, group)
    assert told.eq(torch.arange(2.0 * n)).all()
    several = functional.all_reduce_coalesced([x, x], "max", group)
    assert all(one.eq(torch.arange(2.0 * n) + n - 1).all() for one in several)


def test_gathers_and_reductions_agree_with_gloo(world, job):  # noqa: F811
    gloo = dist.new_group(backend="gloo")
    x, n = value(world.rank, 12, torch.float32), world.size
    results = []
    for group in (dist.group.WORLD, gloo):
        total, outs = x.clone(), [torch.empty(12) for _ in range(n)]
        dist.all_reduce(total, group=group)
        dist.all_gather(outs, x, group)
        whole, swapped = torch.empty(12 * n), torch.empty(12 * n)
        with old_names():
            dist.all_gather_into_tensor(whole, x, group)
        dist.all_to_all_single(swapped, x.repeat(n), group=group)
        told = x.clone()
        dist.broadcast(told, n - 1, group)
        results.append([total, *outs, whole, swapped, told])
    assert all(map(same, *results))
    dist.destroy_process_group(gloo)


def test_coalescing_of_what_torch_does_not_record(world, job):  # noqa: F811
    group, xs = dist.group.WORLD, [torch.ones(2), torch.ones(3)]
    group._start_coalescing(torch.device("cpu"))
    for x in xs:
        group.broadcast([x])
        group.allreduce([x])
    work = group._end_coalescing(torch.device("cpu"))
    work.wait()
    assert work.is_success()
    assert all(x.eq(world.size).all() for x in xs)
    assert len(work.get_future().wait()) == 4


def test_coalesced_reductions_of_large_and_small_tensors(world, job):  # noqa: F811
    xs = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.ones(200_000)]
    xs += [torch.ones(2, 2).t(), torch.ones(4)[::2]]
    dist.group.WORLD.allreduce_coalesced(xs).wait()
    assert all(x.eq(world.size).all() for x in xs)


def test_a_missing_rank_is_found_by_the_groups_timeout(world, group):
    if world.size > 1 and world.rank:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match="rank 0"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveTimeoutError)
        with pytest.raises(RuntimeError, match="CollectiveTimeoutError"):
            work.get_future().wait()
        with pytest.raises(CollectiveError, match="must have finished"):
            dist.all_reduce(torch.ones(3), group=group)


def test_an_error_reaches_a_future_that_nobody_helps(world, group):
    if world.size > 1 and world.rank:
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        with pytest.raises(RuntimeError, match="CollectiveTimeoutError"):
            future.wait()


def test_the_time_of_one_wait(world, job):  # noqa: F811
    x = torch.ones(3)
    if world.rank == 0 and world.size > 1:
        dist.recv(torch.empty(1), 1)
    work = dist.all_reduce(x, async_op=True)
    if world.rank == 1:
        with pytest.raises(CollectiveTimeoutError, match=r"0\.02 s"):
            work.wait(timedelta(milliseconds=20))
        dist.send(torch.ones(1), 0)
    work.wait()
    assert x.eq(world.size).all()


def test_a_barriers_own_timeout_and_a_changed_one(world, job):  # noqa: F811
    group = dist.new_group(timeout=LONG)
    if world.size > 1 and world.rank == 1:
        with pytest.raises(CollectiveTimeoutError, match=r"0\.05 s"):
            group.barrier(timeout=timedelta(milliseconds=50)).wait()
    group.set_timeout(timedelta(milliseconds=50))
    if world.size > 1 and world.rank > 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 0"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


def test_mismatches_are_told_by_wait(world, group):
    if world.size == 1:
        return
    work = dist.all_reduce(torch.ones(3 + world.rank % 2), group=group, async_op=True)
    with pytest.raises(CollectiveError, match="must be the same on all ranks"):
        work.wait()
    assert isinstance(work.exception(), CollectiveError)


def test_messages_that_do_not_fit(world, group):
    if world.size == 1 or world.rank > 1:
        return
    for sent, wanted in ((2, 3), (3, 2)):
        if world.rank == 0:
            dist.send(torch.ones(sent), 1, group)
        else:
            with pytest.raises(CollectiveError, match="as many bytes"):
                dist.recv(torch.empty(wanted), 0, group)
    if world.rank == 1:
        with pytest.raises(CollectiveTimeoutError, match="recv from rank 0, tag 4"):
            dist.recv(torch.empty(1), 0, group, tag=4)
    with pytest.raises(ArgumentError, match="tag must be"):
        dist.isend(torch.ones(1), 0, group, tag=-1)


def test_long_messages_move_without_being_waited_for(world, job):  # noqa: F811
    if world.size == 1:
        return
    x, out = torch.full((300_000,), float(world.rank)), torch.empty(300_000)
    following, before = ring(world)
    works = [dist.irecv(out, before), dist.isend(x, following)]
    until = time.monotonic() + 20
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert out.eq(before).all()
    assert works[0].source_rank() == before


def test_monitored_barrier_names_the_missing(world, group):
    group.monitored_barrier(LONG)
    if world.size == 1 or world.rank == world.size - 1:
        return
    missing = "monitored_barrier: waited 0.1 s for rank" if world.rank == 0 else "recv from rank 0"
    with pytest.raises(CollectiveTimeoutError, match=missing):
        group.monitored_barrier(timedelta(milliseconds=100), wait_all_ranks=True)


def test_what_is_not_supported_says_so(world, job):  # noqa: F811
    group = dist.group.WORLD
    with pytest.raises(ArgumentError, match="one device"):
        group.allreduce([torch.ones(1), torch.ones(1)])
    with pytest.raises(TypeError, match="dense"):
        dist.broadcast(torch.eye(2).to_sparse(), 0)
    with pytest.raises(TypeError, match="dense"):
        dist.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(ArgumentError, match="one per rank"):
        group.allgather([[torch.ones(1)] * (world.size + 1)], [torch.ones(1)])
    with pytest.raises(ArgumentError, match="add up"):
        group.all_to_all_single(torch.ones(world.size), torch.ones(world.size), [], [2] * world.size)
    with pytest.raises(CollectiveError, match="new_group"):
        group.merge_remote_group(None, 3, LONG)
    dist.barrier()
