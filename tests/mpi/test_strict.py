"""Strict mode: whatever the ranks call differently is told on all of them, before anything is moved."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.raw import mpi
from mpizero.errors import CollectiveError, CollectiveTimeoutError
from mpizero.testing.host_runtime import HostRuntime, stand_in

pytestmark = pytest.mark.mpi

WAIT = "0.3"
"""Seconds of time-out where a rank is missed; the others come at once."""


@pytest.fixture(autouse=True)
def _several(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")


@pytest.fixture(params=["board", "gather"])
def comm(request, world, monkeypatch):
    """A communicator in strict mode, that compares by memory of the host or, as between hosts, by messages."""
    if request.param == "gather":
        monkeypatch.setattr("mpizero.comm.strict.make_board", lambda *_: None)
    made = mz.Communicator(world.mpi, strict=True)
    yield made
    made.close()


@pytest.fixture
def pair(world, monkeypatch):
    """Two communicators in strict mode that do not wait for long."""
    monkeypatch.setenv("MPIZERO_STRICT_TIMEOUT", WAIT)
    made = [mz.Communicator(world.mpi, strict=True) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def of(count, dtype=np.float32):
    return np.ones(count, dtype)


def by(world, odd, usual):
    """Return `odd` on the last rank, `usual` on the others."""
    return odd if world.rank == world.size - 1 else usual


def uneven(comm, *, swap):
    """Reduce and scatter with counts 1, 2, 3 and so on, the first two of them swapped if so."""
    counts = list(range(1, comm.size + 1))
    counts[:2] = counts[1::-1] if swap else counts[:2]
    return mz.reduce_scatter(of(sum(counts)), comm, counts=counts)


def spoken(comm, label):
    with comm.channel(3, label):
        return mz.all_reduce(of(4), comm)


CALLS = {
    "operation": (
        lambda comm: mz.all_reduce(of(4), comm),
        lambda comm: mz.broadcast(of(4), comm),
        "all_reduce(4 elements of float32, op sum)",
        "broadcast(4 elements of float32, root 0)",
    ),
    "barrier": (mz.barrier, lambda comm: mz.all_reduce(of(4), comm), "barrier()", "all_reduce("),
    "dtype": (
        lambda comm: mz.all_reduce(of(4), comm),
        lambda comm: mz.all_reduce(of(4, np.int32), comm),
        "4 elements of float32",
        "4 elements of int32",
    ),
    "count": (
        lambda comm: mz.all_reduce(of(4), comm),
        lambda comm: mz.all_reduce(of(5), comm),
        "4 elements",
        "5 elements",
    ),
    "root": (
        lambda comm: mz.broadcast(of(4), comm),
        lambda comm: mz.broadcast(of(4), comm, root=1),
        "root 0",
        "root 1",
    ),
    "op": (
        lambda comm: mz.all_reduce(of(4), comm, op="max"),
        lambda comm: mz.all_reduce(of(4), comm, op="min"),
        "op max",
        "op min",
    ),
    "counts": (
        lambda comm: uneven(comm, swap=False),
        lambda comm: uneven(comm, swap=True),
        "with counts #",
        "with counts #",
    ),
    "empty": (
        lambda comm: mz.all_reduce(of(4), comm),
        lambda comm: mz.all_reduce(of(0), comm),
        "4 elements",
        "0 elements",
    ),
    "label": (lambda comm: spoken(comm, "blocks.0"), lambda comm: spoken(comm, "blocks.1"), "(blocks.0)", "(blocks.1)"),
    "async": (
        lambda comm: mz.all_reduce(of(4), comm, async_op=True).wait(),
        lambda comm: mz.all_gather(of(4), comm, async_op=True).wait(),
        "all_reduce(",
        "all_gather(",
    ),
    "prepared": (
        lambda comm: mz.prepare(mz.all_reduce, of(4), comm)(),
        lambda comm: mz.prepare(mz.all_reduce, of(9), comm)(),
        "4 elements",
        "9 elements",
    ),
    "prepared, empty": (
        lambda comm: mz.prepare(mz.all_reduce, of(4), comm)(),
        lambda comm: mz.prepare(mz.all_reduce, of(0), comm)(),
        "4 elements",
        "0 elements",
    ),
    "large": (
        lambda comm: mz.all_reduce(of(300_000), comm, algorithm="direct"),
        lambda comm: mz.all_reduce(of(300_001), comm, algorithm="direct"),
        "300000 elements",
        "300001 elements",
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_ranks_that_call_different_things_are_told_on_all(world, comm, kind):
    """K1, K2 and K14 in strict mode."""
    usual, odd, first, second = CALLS[kind]
    mz.all_reduce(of(4), comm)
    with pytest.raises(CollectiveError) as caught:
        by(world, odd, usual)(comm)
    text = str(caught.value)

    assert not isinstance(caught.value, CollectiveTimeoutError)
    assert len(set(world.mpi.allgather(text))) == 1
    assert "a collective must be the same on all ranks" in text
    others = ", ".join(map(str, range(world.size - 1)))
    told = dict(part.split(": ", 1) for part in text.partition("(got ")[2].split("; "))
    assert first in told[f"rank{'s' * (world.size > 2)} {others}"]
    assert second in told[f"rank {world.size - 1}"]
    with pytest.raises(CollectiveError, match="must have finished its earlier collectives"):
        mz.all_reduce(of(4), comm)


def test_memory_of_a_gpu_on_one_rank(world, comm):
    """It is told before the ranks make together what they keep on a device."""
    torch = pytest.importorskip("torch")
    with stand_in(HostRuntime(seed=world.rank)), pytest.raises(CollectiveError) as caught:
        mz.all_reduce(by(world, torch.ones(4), of(4)), comm)  # a CPU tensor is taken for one on a device here
    assert f"rank {world.size - 1}: all_reduce(4 elements of float32 on a GPU, op sum)" in str(caught.value)
    assert "4 elements of float32, op sum" in str(caught.value)


def test_all_calls_are_carried_out_as_without(world, comm):
    plain = mz.Communicator(world.mpi, strict=False)
    counts = list(range(world.size))

    def results(on):
        rng = np.random.default_rng(world.rank)
        x = rng.standard_normal(2 * world.size)
        again = mz.prepare(mz.all_reduce, x.copy(), on)
        works = [mz.all_reduce(x * turn, on, async_op=True) for turn in range(3)]
        return [
            *(work.wait() for work in works),
            mz.all_reduce(x.astype(np.float16), on, op="mean", order="canonical"),
            mz.all_reduce(rng.standard_normal(30_000), on),
            mz.reduce_scatter(x, on),
            mz.all_gather(x[: world.rank], on, counts=counts),
            mz.all_to_all(x, on),
            mz.broadcast(x.copy(), on, root=1),
            again(),
            again(),
        ]

    for one, other in zip(results(comm), results(plain), strict=True):
        assert one.tobytes() == other.tobytes()
    plain.close()


def test_parts_inherit_and_a_switch_ends_it(world, comm):
    part = comm.split(world.rank % 2)
    assert (part.strict is None) == (part.size == 1)
    assert comm.private.strict is not None
    part.close()
    comm.compare(on=False)
    assert comm.strict is None
    mz.all_reduce(of(4), comm)
    comm.compare(on=True)
    with pytest.raises(CollectiveError, match="must be the same"):
        mz.all_reduce(of(by(world, 3, 4)), comm)


def test_the_world_can_be_switched(world):
    assert world.strict is None
    assert mz.world(strict=True) is world
    try:
        assert mz.world().strict is not None
        assert np.all(mz.all_reduce(of(3)) == world.size)
    finally:
        mz.world(strict=False)
    assert world.strict is None


def test_a_rank_that_does_not_come_is_missed(world, pair):
    comm, last = pair[0], world.size - 1
    mz.barrier(comm)
    if world.rank == last:
        world.mpi.Barrier()
        return
    with pytest.raises(CollectiveTimeoutError) as caught:
        mz.all_reduce(of(4), comm)
    world.mpi.Barrier()
    text = str(caught.value)
    assert f"waited {WAIT} s for rank {last}" in text
    assert "seen from all_reduce #2, all_reduce" in text  # its arguments too, where the record has room for more texts
    assert f"rank {last}: not in it yet: in code of its own" in text
    assert "in test_a_rank_that_does_not_come_is_missed" in text


@pytest.mark.parametrize("async_op", [False, True])
def test_crossed_communicators(world, pair, async_op):
    """Rank 0 in A and the others in B: told, although asynchronous calls could be carried out."""
    first, second = pair if world.rank == 0 else reversed(pair)
    with pytest.raises(CollectiveTimeoutError) as caught:
        mz.all_reduce(of(4), first, async_op=async_op)
    world.mpi.Barrier()
    text, number = str(caught.value), f"{second.uid & 0xFFFF:04x}"
    assert f"on communicator {first.uid & 0xFFFF:04x}:" in text
    # A rank that was quicker to give up is in code of its own by then.
    assert f"in all_reduce #1 on communicator {number}" in text or "after all_reduce #1" in text


def test_what_mpi_itself_refuses_is_told_with_the_others_calls(world):
    """K1 in normal mode, where MPI notices it: a message for a collective of its own that is too long."""
    comm = mz.Communicator(world.mpi, strict=False)

    class Refused:
        def Test(self):  # noqa: N802  (mpi4py's name)
            raise mpi().Exception(15)

    with pytest.raises(CollectiveError) as caught:
        comm.perform("all_reduce", iter((comm.native._wait("all_reduce", Refused()),)))
    text = str(caught.value)
    assert f"all_reduce (native): rank {world.rank} of {world.size} failed in the MPI library" in text
    assert "where the other ranks are, seen from all_reduce #1" in text
    world.mpi.Barrier()
    comm.close()


def draw(rng, size):
    """Return a random call, as its text and what makes it."""
    count, dtype = rng.choice([0, 1, 7, 4000]), rng.choice(["float32", "float64", "int64"])
    op, root, label = rng.choice(["sum", "max", "prod"]), rng.randrange(size), rng.choice(["", "blocks.1", "blocks.2"])
    verb = rng.choice([mz.all_reduce, mz.broadcast, mz.all_gather, mz.reduce, mz.barrier, mz.all_to_all])
    words = {mz.all_reduce: {"op": op}, mz.broadcast: {"root": root}, mz.reduce: {"op": op, "root": root}}.get(verb, {})
    if rng.random() < 0.5:
        words |= {"async_op": True}
    if verb is mz.barrier:
        return (verb, label), (), words, label
    count *= size if verb is mz.all_to_all else 1
    return (verb, count, dtype, words.get("op"), words.get("root"), label), (count, dtype), words, label


@pytest.mark.parametrize(
    "trials", [20, pytest.param(200, marks=pytest.mark.slow)], ids=lambda trials: f"{trials} trials"
)
def test_random_mismatches_are_all_named(world, comm, trials):
    """Random pairs of calls on random ranks: none hangs, all are told on every rank, who called which."""
    rng = random.Random(world.size)
    done = 0
    while done < trials:
        calls = draw(rng, world.size), draw(rng, world.size)
        odd = set(rng.sample(range(world.size), rng.randrange(1, world.size)))
        if calls[0][0] == calls[1][0]:
            continue
        done += 1
        key, array, words, label = calls[world.rank in odd]
        operands = (of(*array),) if array else ()
        with pytest.raises(CollectiveError) as caught, comm.channel(1, label) if label else nullcontext():
            key[0](*operands, comm, **words)
        text = str(caught.value)
        assert not isinstance(caught.value, CollectiveTimeoutError), text
        assert len(set(world.mpi.allgather(text))) == 1
        groups = [sorted(set(range(world.size)) - odd), sorted(odd)]
        for ranks, call in zip(groups, calls, strict=True):
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {call[0][0].__name__}("
            assert who in text, text
            assert not call[3] or f"({call[3]})" in text
        comm.health.sound = True  # nothing was moved
    assert np.all(mz.all_reduce(of(5), comm) == world.size)
