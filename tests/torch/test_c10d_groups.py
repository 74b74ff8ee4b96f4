"""Groups of the backend: their order, their independence, and what a `Work` and its future tell."""

import time
from datetime import timedelta

import pytest
import torch
from helpers.c10d import job, old_names, same, value  # noqa: F401
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from mpizero.errors import CollectiveError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

LONG = timedelta(seconds=30)


def ring(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def everybody(world):
    return sum(range(1, world.size + 1))


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
