"""Time-outs and errors of the backend's groups: a missing rank, calls that differ, what is not supported."""

from datetime import timedelta

import pytest
import torch
from helpers.c10d import job  # noqa: F401
from torch import distributed as dist
from torch.distributed import ReduceOp

from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

SHORT = timedelta(milliseconds=300)
LONG = timedelta(seconds=30)


@pytest.fixture
def group(job):  # noqa: F811
    """A group of its own for a test that breaks it."""
    made = dist.new_group(timeout=SHORT)
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def patient(job):  # noqa: F811
    """A group for a test that breaks it, none of whose ranks may be late for another reason."""
    made = dist.new_group(timeout=LONG)
    yield made
    dist.destroy_process_group(made)


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
    assert {group.comm.transport.timeout, group.comm.native.timeout, group.members.link.seconds} == {0.05}
    if world.size > 1 and world.rank > 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 0"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


DIFFERENT = {
    "number": lambda one, group: group.allreduce([torch.ones(3 + one)]),
    "dtype": lambda one, group: group.allreduce([torch.ones(3, dtype=(torch.float32, torch.float64)[one])]),
    "reduction": lambda one, group: dist.all_reduce(
        torch.ones(3), (ReduceOp.SUM, ReduceOp.MAX)[one], group, async_op=True
    ),
    "root": lambda one, group: dist.broadcast(torch.ones(3), one, group, async_op=True),
    "operation": lambda one, group: (
        group.barrier() if one else dist.all_gather([torch.ones(3)] * group.size(), torch.ones(3), group, async_op=True)
    ),
}


def test_the_time_of_each_operation(world, job):  # noqa: F811
    """Options have a time-out that counts in the place of the group's, in every operation."""
    group, n = dist.new_group(timeout=LONG), world.size
    if world.rank:
        one, all_of = torch.ones(1), torch.ones(n)
        calls = {
            "allreduce": ([one], within("AllreduceOptions")),
            "allreduce_coalesced": ([one, one], within("AllreduceCoalescedOptions")),
            "broadcast": ([one], within("BroadcastOptions")),
            "reduce": ([one], within("ReduceOptions")),
            "allgather": ([[one.clone() for _ in range(n)]], [one], within("AllgatherOptions")),
            "all_gather_single": (all_of, one, within("AllgatherOptions")),
            "gather": ([], [one], within("GatherOptions")),
            "scatter": ([one], [], within("ScatterOptions")),
            "reduce_scatter": ([one], [list(all_of.split(1))], within("ReduceScatterOptions")),
            "reduce_scatter_single": (one, all_of, within("ReduceScatterOptions")),
            "alltoall": (list(all_of.split(1)), list(torch.ones(n).split(1)), within("AllToAllOptions")),
            "all_to_all_single": (all_of, torch.ones(n), [], [], within("AllToAllOptions")),
            "barrier": (within("BarrierOptions"),),
        }
        for name, args in calls.items():
            with pytest.raises(CollectiveTimeoutError, match=r"0\.005 s"):
                getattr(group, name)(*args).wait()
        group.set_timeout(timedelta(milliseconds=20))  # of what is under way, too
    dist.destroy_process_group(group)


def within(options):
    made = getattr(dist.distributed_c10d, options)()
    made.timeout = timedelta(milliseconds=5)
    return made


@pytest.mark.parametrize("what", DIFFERENT)
def test_mismatches_are_told_by_wait(what, world, patient):
    if world.size == 1:
        return
    work = DIFFERENT[what](world.rank % 2, patient)
    with pytest.raises(CollectiveError, match="must be the same on all ranks"):
        work.wait()
    assert work.is_completed()
    assert isinstance(work.exception(), CollectiveError)


def test_a_mismatch_is_told_by_a_call_that_waits(world, patient):
    if world.size > 1:
        with pytest.raises(CollectiveError, match="float64"):
            dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.float64)[world.rank % 2]), group=patient)


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
