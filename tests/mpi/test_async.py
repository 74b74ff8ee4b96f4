"""Asynchronous and prepared collectives: in order per communicator, interleaved between them, errors in `wait`."""

import time

import numpy as np
import pytest

import mpizero
from mpizero.collectives import algorithms_of
from mpizero.errors import ArgumentError, ArgumentTypeError, CollectiveError, CollectiveTimeoutError

pytestmark = pytest.mark.mpi


@pytest.fixture
def pair(world):
    comms = [mpizero.Communicator(world.mpi) for _ in range(2)]
    yield comms
    for comm in comms:
        comm.close()


def expected(world, scale):
    return scale * sum(range(1, world.size + 1))


@pytest.mark.parametrize("count", [5, 100_000])
@pytest.mark.parametrize("name", ["auto", "native", *(entry.name for entry in algorithms_of("all_reduce"))])
def test_several_in_flight(world, count, name):
    arrays = [np.full(count, (world.rank + 1) * (turn + 1), np.float32) for turn in range(6)]
    works = [mpizero.all_reduce(x, world, algorithm=name, async_op=True) for x in arrays]
    after = mpizero.all_reduce(np.full(3, world.rank + 1), world)  # a synchronous call queues behind
    assert all(work.done() for work in works)
    assert np.all(after == expected(world, 1))
    for turn, work in enumerate(works):
        assert work.wait() is arrays[turn]
        assert np.all(arrays[turn] == expected(world, turn + 1))


def test_every_verb(world):
    size, rank = world.size, world.rank
    x = np.arange(4.0 * size) + rank
    works = {
        "reduce_scatter": mpizero.reduce_scatter(x.copy(), world, async_op=True),
        "all_gather": mpizero.all_gather(np.full(2, rank), world, async_op=True),
        "all_to_all": mpizero.all_to_all(np.full(size, rank), world, async_op=True),
        "broadcast": mpizero.broadcast(np.full(3, rank), world, root=size - 1, async_op=True),
        "reduce": mpizero.reduce(np.full(3, 1), world, async_op=True),
        "gather": mpizero.gather(np.full(1, rank), world, async_op=True),
        "scatter": mpizero.scatter(np.arange(size), world, async_op=True),
        "barrier": mpizero.barrier(world, async_op=True),
    }
    results = {name: work.wait() for name, work in works.items()}
    total = np.arange(4.0 * size) * size + sum(range(size))
    assert np.array_equal(results["reduce_scatter"], total[4 * rank : 4 * rank + 4])
    assert np.array_equal(results["all_gather"], np.repeat(np.arange(size), 2))
    assert np.array_equal(results["all_to_all"], np.arange(size))
    assert np.all(results["broadcast"] == size - 1)
    assert results["reduce"] is None if rank else np.all(results["reduce"] == size)
    assert results["gather"] is None if rank else np.array_equal(results["gather"], np.arange(size))
    assert np.array_equal(results["scatter"], [rank])
    assert results["barrier"] is None


@pytest.mark.parametrize("name", ["auto", "ring", "native"])
def test_two_communicators_in_opposite_orders(world, pair, name):
    """A then B on even ranks, B then A on odd ones: neither waits for the other."""
    order = pair if world.rank % 2 == 0 else pair[::-1]
    for _ in range(20):
        arrays = [np.full(3000, 10.0 ** pair.index(comm), np.float64) for comm in order]
        works = [
            mpizero.all_reduce(x, comm, algorithm=name, async_op=True) for x, comm in zip(arrays, order, strict=True)
        ]
        for work in works:
            work.wait()
        for x, comm in zip(arrays, order, strict=True):
            assert np.all(x == world.size * 10.0 ** pair.index(comm))


def test_packed_results_come_back(world):
    base = np.zeros((6, 8))
    view = base[::2, 1::3]
    view[:] = 1
    assert mpizero.all_reduce(view, world, async_op=True).wait() is view
    assert np.all(view == world.size)


def test_progress_without_the_caller(world):
    """The thread finishes a collective while the caller does something else: it never calls into mpizero."""
    work = mpizero.all_reduce(np.ones(300_000), world, algorithm="ring", async_op=True)
    for _ in range(3000):
        if work.done():
            break
        time.sleep(0.01)
    assert work.done()
    work.wait()


@pytest.mark.parametrize("name", ["auto", "ring"])
def test_an_error_surfaces_in_wait(world, name):
    """A time-out on the thread is raised where the caller waits; the communicator is broken afterwards."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    comm = mpizero.Communicator(world.mpi, timeout=0.3)
    if world.rank == 0:
        work = mpizero.all_reduce(np.ones(100_000), comm, algorithm=name, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"waited 0.3 s for"):
            work.wait()
        assert work.done()
        with pytest.raises(CollectiveError, match="given up"):
            mpizero.barrier(comm)
    world.mpi.Barrier()
    # not closed: its messages are still under way


def test_arguments_are_checked_before(world):
    with pytest.raises(ArgumentError):
        mpizero.all_reduce(np.ones(3), world, op="avg", async_op=True)


@pytest.mark.parametrize("count", [1, 4096, 100_000])
def test_prepared(world, count):
    size, rank = world.size, world.rank
    for name in ("auto", "native", "ring"):
        x = np.empty(count, np.float32)
        call = mpizero.prepare(mpizero.all_reduce, x, world, algorithm=name)
        for turn in range(1, 5):
            x[:] = (rank + 1) * turn
            assert call() is x
            assert np.all(x == expected(world, turn))
    out = np.empty(count * size)
    call = mpizero.prepare(mpizero.all_gather, np.full(count, rank, np.float64), world, out=out)
    assert call() is out
    assert np.array_equal(out, np.repeat(np.arange(size), count))
    barrier = mpizero.prepare(mpizero.barrier, comm=world)
    assert barrier() is None


def test_prepared_behind_an_asynchronous_one(world):
    x, y = np.ones(10), np.ones(200_000)
    call = mpizero.prepare(mpizero.all_reduce, x, world)
    work = mpizero.all_reduce(y, world, async_op=True)
    call()
    assert work.done()
    assert x[0] == y[0] == world.size


def test_prepared_misuse(world):
    with pytest.raises(ArgumentTypeError, match="verb must be one of mpizero's collectives"):
        mpizero.prepare(print, np.ones(3), world)
    with pytest.raises(ArgumentTypeError, match="contiguous"):
        mpizero.prepare(mpizero.all_reduce, np.ones((4, 4)).T[1:], world)
    with pytest.raises(ArgumentError, match="op must be"):
        mpizero.prepare(mpizero.all_reduce, np.ones(3), world, op="avg")
    with pytest.raises(ArgumentTypeError, match="async_op"):
        mpizero.prepare(mpizero.all_reduce, np.ones(3), world, async_op=True)


def test_work_that_nobody_waits_for(world):
    """Left alone it is finished all the same, and what comes after on its communicator waits for it."""
    mpizero.all_reduce(np.ones(50_000), world, async_op=True)
    assert mpizero.all_reduce(np.ones(3), world)[0] == world.size


def test_a_split_in_the_midst(world):
    """MPI pairs its own collectives with the making of a communicator, unless what is under way is waited for first."""
    for turn in range(6):
        long, short = np.ones(200_000), np.full(3, world.rank + 1.0)
        works = [mpizero.all_reduce(long, world, algorithm="ring" if world.size > 1 else "native", async_op=True)]
        works += [mpizero.all_reduce(short, world, algorithm="native", async_op=True)]
        time.sleep(0.002 * (turn % 3) * (world.rank > 0))
        part = world.split(0, world.rank)
        for work in works:
            work.wait()
        assert short[0] == expected(world, 1)
        assert part.size == world.size
        part.close()
