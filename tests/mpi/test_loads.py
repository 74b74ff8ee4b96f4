"""Loads and stores on one host: every operation on symmetric, private and mixed buffers, in cells and in one phase."""

import itertools
import weakref

import numpy as np
import pytest

import mpizero
from mpizero.collectives import OPERATIONS, even_offsets, parts
from mpizero.comm import CELL, mappings
from mpizero.errors import CollectiveError

pytestmark = pytest.mark.mpi

KINDS = ("private", "symmetric", "mixed", "fallback")
COUNTS = (1, 7, 1000, 100_003)


def needs_peers(world):
    """Skip where no rank can load another's memory, by the nature of the job: a board that is missing is a failure."""
    if world.size == 1 or len(set(world.nodes)) > 1:
        pytest.skip("ranks of one host, two or more of them, load each other's memory")


@pytest.fixture
def alone(world):
    """A communicator of this test's own, whose board it may break."""
    needs_peers(world)
    comm = mpizero.Communicator(world.mpi)
    yield comm
    comm.close()


def buffer(world, kind, count, dtype="float32"):
    """Memory of a kind; `mixed` is symmetric on odd ranks alone."""
    shared = mpizero.empty(count, dtype, world)
    if kind == "symmetric" or (kind == "mixed" and world.rank % 2):
        return shared
    return np.empty(count, dtype)


def filled(world, kind, count, rank=None, dtype="float32"):
    x = buffer(world, kind, count, dtype)
    x[:] = values(count, world.rank if rank is None else rank)
    return x


def values(count, rank):
    return (np.arange(count) * 7 + rank * 3) % 11


def total(world, count):
    return sum(values(count, rank) for rank in range(world.size))


@pytest.fixture(params=KINDS)
def kind(request, world, monkeypatch):
    needs_peers(world)
    if request.param == "fallback":  # no reach into private memory: all ranks take messages, together
        monkeypatch.setattr(world.board, "reach", None)
        return "mixed"
    return request.param


@pytest.mark.parametrize("count", COUNTS)
def test_every_operation(world, kind, count):
    size, rank = world.size, world.rank
    low, high = even_offsets(count, size)[rank : rank + 2]
    root = count % size
    wanted = total(world, count)

    x = filled(world, kind, count)
    mpizero.all_reduce(x, world, algorithm="loads")
    assert np.array_equal(x, wanted)

    x, out = filled(world, kind, count), buffer(world, kind, count)
    mpizero.all_reduce(x, world, out=out, algorithm="loads")
    assert np.array_equal(out, wanted)
    assert np.array_equal(x, values(count, rank))

    out = buffer(world, kind, high - low)
    mpizero.reduce_scatter(x, world, out=out, algorithm="loads")
    assert np.array_equal(out, wanted[low:high])
    x = filled(world, kind, count)
    mpizero.reduce_scatter(x, world, out=x[low:high], algorithm="loads")
    assert np.array_equal(x[low:high], wanted[low:high])

    x = filled(world, kind, count)
    result = mpizero.reduce(x, world, root=root, algorithm="loads")
    assert np.array_equal(x, wanted if rank == root else values(count, rank))
    assert (result is x) == (rank == root)

    x = filled(world, kind, count)
    mpizero.broadcast(x, world, root=root, algorithm="loads")
    assert np.array_equal(x, values(count, root))

    whole = values(count, 5)
    out = buffer(world, kind, count)
    out[:] = -1
    out[low:high] = whole[low:high]
    mpizero.all_gather(out[low:high], world, out=out, algorithm="loads")
    assert np.array_equal(out, whole)

    every = np.concatenate([values(count, peer) for peer in range(size)])
    result = mpizero.gather(filled(world, kind, count), world, root=root, algorithm="loads")
    assert result is None if rank != root else np.array_equal(result, every)

    result = mpizero.scatter(filled(world, kind, count), world, root=root, algorithm="loads")
    assert np.array_equal(result, values(count, root)[low:high])

    x, out = filled(world, kind, count * size), buffer(world, kind, count * size)
    mpizero.all_to_all(x, world, out=out, algorithm="loads")
    wanted = [values(count * size, peer)[rank * count : (rank + 1) * count] for peer in range(size)]
    assert np.array_equal(out, np.concatenate(wanted))


@pytest.mark.parametrize("scale", [1, 9000])
def test_uneven_counts(world, kind, scale):
    size, rank = world.size, world.rank
    counts = [(3 * peer + 2) % 5 * scale for peer in range(size)]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    low, high = offsets[rank : rank + 2]
    count = int(offsets[-1])
    x = filled(world, kind, count)
    assert np.array_equal(mpizero.reduce_scatter(x, world, counts=counts), total(world, count)[low:high])
    mine = filled(world, kind, counts[rank])
    every = np.concatenate([values(counts[peer], peer) for peer in range(size)])
    assert np.array_equal(mpizero.all_gather(mine, world, counts=counts), every)
    gathered = mpizero.gather(mine, world, counts=counts, root=size - 1)
    assert gathered is None if rank < size - 1 else np.array_equal(gathered, every)
    assert np.array_equal(mpizero.scatter(x, world, counts=counts, root=1), values(count, 1)[low:high])
    out = buffer(world, kind, counts[rank])
    source = x if rank == 1 else None
    mpizero.scatter(source, world, counts=counts, root=1, out=out)
    assert np.array_equal(out, values(count, 1)[low:high])
    table = [[(source + 2 * target) % 4 * scale for target in range(size)] for source in range(size)]
    x = filled(world, kind, sum(table[rank]))
    parts = []
    for source in range(size):
        start = sum(table[source][:rank])
        parts.append(values(sum(table[source]), source)[start : start + table[source][rank]])
    for arriving in (None, [row[rank] for row in table]):
        result = mpizero.all_to_all(x, world, counts=table[rank], out_counts=arriving)
        assert np.array_equal(result, np.concatenate(parts))


def test_many_small_ones_in_a_row(world):
    """Cells are filled again two collectives later: no rank may read what is of another collective."""
    for turn in range(300):
        x = np.full(turn % 50 + 1, world.rank + turn, np.int64)
        assert mpizero.all_reduce(x, world)[-1] == turn * world.size + sum(range(world.size))
        x = np.full(3, turn * 10 + world.rank)
        assert mpizero.broadcast(x, world, root=turn % world.size)[0] == turn * 10 + turn % world.size


def test_cells_and_phase_give_the_same_bits(world):
    """K8: and both those of `direct` over messages."""
    needs_peers(world)
    for dtype, op in itertools.product(("float32", "float16", "float64"), ("sum", "mean", "prod", "max")):
        mine = np.random.default_rng(world.rank).standard_normal(3000).astype(dtype)
        small = mpizero.all_reduce(mine[:100].copy(), world, op=op)
        assert small.nbytes <= CELL
        many = np.tile(mine, 30)
        assert many.nbytes > CELL
        large = mpizero.all_reduce(many, world, op=op)
        exchanged = mpizero.all_reduce(mine.copy(), world, op=op, algorithm="direct")
        assert small.tobytes() == large[:100].tobytes() == exchanged[:100].tobytes()
        assert large.tobytes() == np.tile(exchanged, 30).tobytes()


@pytest.mark.parametrize("count", [600, 200_000])
def test_bfloat16(world, kind, count):
    """K10 too: one rounding, and NaN stays NaN."""
    torch = pytest.importorskip("torch")
    shared = mpizero.empty(count, torch.bfloat16, world)
    x = shared if kind == "symmetric" else torch.empty(count, dtype=torch.bfloat16)
    x.fill_(2048.0 if world.rank == 0 else 8.0)
    x[5] = float("nan") if world.rank == world.size - 1 else 1.0
    x[6] = 65000.0
    mpizero.all_reduce(x, world, algorithm="loads")
    assert x[0].item() == torch.tensor(2048.0 + 8 * (world.size - 1)).bfloat16().item()
    assert x[5].isnan()
    bits = x.view(torch.int16).numpy().tobytes()
    assert set(world.mpi.allgather(bits)) == {bits}


def test_what_is_moved_is_counted(world):
    """The bytes that a rank loads and stores beyond its own memory: 2 S (p-1)/p for an all-reduce."""
    needs_peers(world)
    count = 64_000 * world.size
    x = np.ones(count, np.float32)
    share = 4 * count * (world.size - 1) // world.size
    for operation, times in (("all_reduce", 2), ("reduce_scatter", 1), ("all_to_all", 1)):
        before = world.stats.copy()
        getattr(mpizero, operation)(x, world, algorithm="loads")
        moved = world.stats.since(before)
        assert (moved.messages_sent, moved.bytes_loaded, moved.bytes_moved) == (0, times * share, times * share)


def test_small_ones_are_counted_alike(world):
    """Through cells as verb, prepared and in the background: the bytes that come from other ranks' cells."""
    needs_peers(world)
    x, out = np.ones(8, np.float32), np.empty(8 * world.size, np.float32)
    calls = {
        "all_reduce": [
            lambda: mpizero.all_reduce(x, world),
            mpizero.prepare(mpizero.all_reduce, x, world),
            lambda: mpizero.all_reduce(x, world, async_op=True).wait(),
        ],
        "all_gather": [
            lambda: mpizero.all_gather(x, world, out=out),
            mpizero.prepare(mpizero.all_gather, x, world, out=out),
            lambda: mpizero.all_gather(x, world, out=out, async_op=True).wait(),
        ],
    }
    for ways in calls.values():
        for call in ways:
            before = world.stats.copy()
            call()
            assert world.stats.since(before).bytes_loaded == 32 * (world.size - 1)


def different(comm, call, texts):
    with pytest.raises(CollectiveError) as caught:
        call()
    message = str(caught.value)
    assert set(comm.mpi.allgather(message)) == {message}
    for text in texts:
        assert text in message


def test_k1_counts_differ(alone):
    """K1: 4 against 6 elements, and 100,000 against 60,000, and across the size at which the way changes."""
    different(
        alone,
        lambda: mpizero.all_reduce(np.ones(4 if alone.rank == 0 else 6), alone),
        ("rank 0: all_reduce(4 elements of float64, op sum)", "6 elements of float64"),
    )


@pytest.mark.parametrize("counts", [(100_000, 60_000), (4, 60_000)])
def test_k1_large_counts_differ(alone, counts):
    """K1."""
    count = counts[0] if alone.rank == 0 else counts[1]
    different(
        alone,
        lambda: mpizero.all_reduce(np.ones(count), alone),
        (f"rank 0: all_reduce({counts[0]} elements", f"{counts[1]} elements of float64"),
    )


def test_k2_dtypes_differ(alone):
    """K2: float32 on rank 0, int32 elsewhere."""
    dtype = "float32" if alone.rank == 0 else "int32"
    different(
        alone, lambda: mpizero.all_reduce(np.ones(9, dtype), alone), ("9 elements of float32", "9 elements of int32")
    )
    with pytest.raises(CollectiveError, match="got one that was given up"):
        mpizero.barrier(alone)


def test_k14_operations_differ(alone):
    """K14, on one host: rank 0 calls all_gather, the others reduce_scatter: both are named."""
    verb = mpizero.all_gather if alone.rank == 0 else mpizero.reduce_scatter
    different(alone, lambda: verb(np.ones(50_000), alone), ("rank 0: all_gather(", "reduce_scatter(50000"))


def test_uneven_counts_differ(alone):
    counts = [2] * alone.size if alone.rank else [3, 1, *[2] * (alone.size - 2)]
    different(
        alone,
        lambda: mpizero.reduce_scatter(np.ones(2 * alone.size), alone, counts=counts),
        ("with counts or unit #",),
    )


def test_every_operation_has_tasks():
    assert set(OPERATIONS) >= {"all_to_all", "gather", "scatter"}
    assert parts.BLOCK % 4096 == 0


def test_a_buffer_of_another_communicator(world):
    """A symmetric buffer is known by its memory: any communicator of those ranks reaches it, others its private way."""
    x = mpizero.empty(60_000, "float32", world)
    other = mpizero.Communicator(world.mpi)
    x[:] = world.rank
    mpizero.all_reduce(x, other)
    assert np.all(x == sum(range(world.size)))
    other.close()
    half = world.mpi.Split(world.rank % 2)
    part = mpizero.Communicator(half)
    half.Free()
    x[:] = 1
    mpizero.all_reduce(x, part)
    assert np.all(x == part.size)
    part.close()


def test_symmetric_buffers(world):
    """Shapes, dtypes, sizes of 0; memory is reused when all ranks have dropped it."""
    assert mpizero.empty((2, 3), "int16", world).shape == (2, 3)
    assert mpizero.empty(0, comm=world).size == 0
    needs_peers(world)
    first = mpizero.empty(1000, np.float64, world)
    place = mappings().find(first.ctypes.data, first.nbytes, world.board.pids)
    assert place is not None
    view = first[10:]
    del first
    second = mpizero.empty(1000, np.float64, world)
    assert second.ctypes.data != view.ctypes.data - 80  # a view keeps its memory
    del view, second
    world.mpi.Barrier()
    third = mpizero.empty(1000, np.float64, world)
    again = mappings().find(third.ctypes.data, third.nbytes, world.board.pids)
    assert again.key == place.key


def test_k16_more_than_there_is(world, capfd):
    """K16: a window larger than free /dev/shm: one message, the slower path, no SIGBUS."""
    needs_peers(world)
    from mpizero.comm import segment

    world.mpi.Barrier()
    patched = segment.free_bytes
    segment.free_bytes = lambda: 1 << 20
    try:
        x = mpizero.empty(40 << 20, "uint8", world)  # more than any gap that earlier buffers have left
    finally:
        segment.free_bytes = patched
    x[:] = 1
    assert mpizero.all_reduce(x, world)[-1] == world.size
    said = "".join(world.mpi.allgather(capfd.readouterr().err))
    assert said.count("private memory is used instead") == 1
    assert mappings().find(x.ctypes.data, x.nbytes, world.board.pids) is None


@pytest.mark.parametrize("count", [100, 100_000])
def test_no_buffer_is_kept(world, count):
    """Plans and their jobs are remembered, the arrays that they ran on are not."""
    for verb in (mpizero.all_reduce, mpizero.broadcast):
        x = np.ones(count, np.float32)
        gone = weakref.ref(x)
        verb(x, world)
        verb(x, world)
        del x
        assert gone() is None
    out = np.empty(count * world.size, np.float32)
    gone = weakref.ref(out)
    mpizero.all_gather(np.ones(count, np.float32), world, out=out)
    del out
    assert gone() is None


def test_scratch_is_bounded(world):
    """Private buffers of any size need a few MiB beside them, which later collectives use again."""
    for count in (1 << 20, 1 << 22):
        mpizero.all_reduce(np.ones(count, np.float32), world)
        mpizero.all_reduce(np.ones(count, np.float16), world)
    assert world.scratch(0).nbytes <= 9 << 20
