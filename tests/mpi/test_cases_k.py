"""Field cases K3 to K12 and K17, as they are written in the list of cases, over MPI."""

import itertools
import threading

import numpy as np
import pytest

import mpizero
from mpizero.collectives import algorithms_of, even_offsets
from mpizero.errors import ArgumentError, ArgumentTypeError, CollectiveError

pytestmark = pytest.mark.mpi


def names(operation="all_reduce"):
    return ["auto", *(entry.name for entry in algorithms_of(operation))]


def unsent(world, exceptions, call):
    """Check that a call raises on this rank before anything is sent; every rank does so by itself."""
    before = world.stats.copy()
    with pytest.raises(exceptions) as caught:
        call()
    assert world.stats.since(before).messages_sent == 0
    assert isinstance(caught.value, mpizero.MpiZeroError)
    assert len(set(world.mpi.allgather(str(caught.value)))) == 1
    return str(caught.value)


def test_k3_fortran_order_on_one_rank(world):
    """K3: Fortran-ordered on one rank, C-ordered on the others: by index, not by memory."""
    for name in names():
        x = np.arange(12.0).reshape(3, 4) * (world.rank + 1)
        x = np.asfortranarray(x) if world.rank == world.size - 1 else x
        mpizero.all_reduce(x, world, algorithm=name)
        assert np.array_equal(x, np.arange(12.0).reshape(3, 4) * sum(range(1, world.size + 1)))
        x = np.arange(12.0).reshape(3, 4) if world.rank == 0 else np.zeros((4, 3)).T
        mpizero.broadcast(x, world)
        assert np.array_equal(x, np.arange(12.0).reshape(3, 4))


def test_k4_strided_view(world):
    """K4: a strided view in, the result in the view, nothing beside it touched."""
    for name in names():
        base = np.full((6, 8), -1.0)
        view = base[::2, 1::3]
        view[:] = world.rank + 1
        assert mpizero.all_reduce(view, world, algorithm=name) is view
        assert np.all(view == sum(range(1, world.size + 1)))
        assert np.count_nonzero(base == -1) == base.size - view.size


def test_k5_partial_overlap(world):
    """K5: output overlaps input partly: an error before anything is sent; exact alias is in place."""
    base = np.ones(8 + world.size, np.float32)
    text = unsent(world, ArgumentError, lambda: mpizero.all_reduce(base[:8], world, out=base[1:9]))
    assert "out must be x itself or memory apart from x" in text
    square = np.ones((4, 4))
    unsent(world, ArgumentError, lambda: mpizero.all_reduce(square, world, out=square.T))
    count = 4 * world.size + 4
    x = np.ones(count)
    low = even_offsets(count, world.size)[world.rank]
    high = even_offsets(count, world.size)[world.rank + 1]
    unsent(
        world,
        ArgumentError,
        lambda: mpizero.reduce_scatter(x, world, out=x[low - 1 : high - 1] if low else x[1 : high + 1]),
    )
    alias = base[:8]
    mpizero.all_reduce(base[:8], world, out=alias)
    assert np.all(alias == world.size)


def test_k6_nothing(world):
    """K6: size 0 on all ranks."""
    before = world.stats.copy()
    for shape in ((0,), (3, 0)):
        for name in names():
            assert mpizero.all_reduce(np.empty(shape), world, algorithm=name).shape == shape
        assert mpizero.reduce_scatter(np.empty(shape), world).shape == (0,)
        assert mpizero.all_gather(np.empty(shape), world).shape == (shape[0] * world.size, *shape[1:])
        assert mpizero.broadcast(np.empty(shape), world).shape == shape
    assert world.stats.since(before).messages_sent == 0


def test_k7_awkward_sizes(world):
    """K7: fewer elements than ranks, sizes p - 1, p, p + 1 and primes."""
    for count in sorted({1, 2, world.size - 1, world.size, world.size + 1, 7, 13, 101, 7919}):
        for name in names():
            x = np.arange(count, dtype=np.float64) + world.rank
            mpizero.all_reduce(x, world, algorithm=name)
            assert np.array_equal(x, np.arange(count) * world.size + sum(range(world.size)))


def test_k8_same_bits_on_every_rank(world):
    """K8: random float32, every algorithm and MPI's own: result bytes are identical across ranks."""
    found = {}
    for count, op in itertools.product((1, 5, 1000, 3000, 100_003), ("sum", "mean", "prod")):
        mine = np.random.default_rng([world.rank, count]).standard_normal(count).astype(np.float32)
        for name in [*names(), "native"]:
            result = mpizero.all_reduce(mine.copy(), world, op=op, algorithm=name)
            everyone = world.mpi.allgather(result.tobytes())
            assert len(set(everyone)) == 1, f"{name} {op} {count}"
            found[name, op, count] = everyone[0]
    for entry in algorithms_of("all_reduce"):
        if entry.is_canonical(world.size, nodes=world.nodes):
            for (name, op, count), data in found.items():
                assert name != entry.name or data == found["direct", op, count], entry.name


def test_k9_nan(world):
    """K9: NaN on one rank, op max and min: NaN at that element on every rank."""
    for op, name, dtype in itertools.product(("max", "min"), names(), ("float32", "float16", "float64")):
        for guilty in range(world.size):
            x = np.arange(9, dtype=dtype) * (-1) ** world.rank
            if world.rank == guilty:
                x[[0, 4, 8]] = np.nan
            mpizero.all_reduce(x, world, op=op, algorithm=name)
            assert np.flatnonzero(np.isnan(x)).tolist() == [0, 4, 8]
            assert len(set(world.mpi.allgather(x.tobytes()))) == 1
    unsent(world, ArgumentError, lambda: mpizero.all_reduce(np.ones(3), world, op="max", algorithm="native"))


def test_k10_rounded_once(world):
    """K10, with as many ones as there are other ranks: fp16 of 2048 + 1 + 1 + 1 is 2052; a mean does not overflow."""
    for name in names():
        x = np.full(5, 2048 if world.rank == 0 else 1, np.float16)
        mpizero.all_reduce(x, world, algorithm=name)
        assert set(x.tolist()) == {float(np.float16(2047 + world.size))}
        x = np.full(5, 65000, np.float16)
        mpizero.all_reduce(x, world, op="mean", algorithm=name)
        assert set(x.tolist()) == {float(np.float16(65000))}


def test_k10_bfloat16(world):
    """K10: bf16 of 2048 + 8 + 8 + 8 is 2080."""
    torch = pytest.importorskip("torch")
    for name in names():
        x = torch.full((5,), 2048.0 if world.rank == 0 else 8.0, dtype=torch.bfloat16)
        mpizero.all_reduce(x, world, algorithm=name)
        wanted = torch.tensor(2048.0 + 8 * (world.size - 1)).bfloat16().item()
        assert set(x.tolist()) == {wanted}
        assert world.size != 4 or wanted == 2080


def test_k12_refused_before_anything_is_sent(world):
    """K12: bool with sum, complex with max, integers with mean, read-only output, big-endian array."""
    for name in names():
        for x, op in ((np.ones(3, bool), "sum"), (np.ones(3, np.complex64), "max"), (np.ones(3, np.int32), "mean")):
            text = unsent(
                world,
                ArgumentTypeError,
                lambda x=x, op=op, name=name: mpizero.all_reduce(x, world, op=op, algorithm=name),
            )
            assert text.startswith("op must be one of ")
    locked = np.ones(3)
    locked.flags.writeable = False
    assert "writable" in unsent(world, ArgumentError, lambda: mpizero.all_reduce(locked, world))
    assert "writable" in unsent(world, ArgumentError, lambda: mpizero.all_reduce(np.ones(3), world, out=locked))
    foreign = np.ones(3, np.dtype("f4").newbyteorder())
    assert "byte order" in unsent(world, ArgumentTypeError, lambda: mpizero.all_reduce(foreign, world))
    assert "byte order" in unsent(world, ArgumentTypeError, lambda: mpizero.broadcast(foreign, world))


def test_other_bad_arguments(world):
    """Every error has the one form, and lists what is known."""
    x = np.ones(4)
    bad = [
        (ArgumentError, r"op must be one of sum, .*got 'avg'", lambda: mpizero.all_reduce(x, world, op="avg")),
        (ArgumentError, "order must be one of any, canonical", lambda: mpizero.all_reduce(x, world, order="fixed")),
        (
            ArgumentError,
            "algorithm must be one of auto, native, loads, direct, .*ring",
            lambda: mpizero.all_reduce(x, world, algorithm="rng"),
        ),
        (ArgumentError, "algorithm must be one of", lambda: mpizero.all_reduce(x, world, algorithm="fallback")),
        (ArgumentError, "op must be one of sum", lambda: mpizero.all_reduce(x, world, op=["sum"])),
        (ArgumentError, "root must be a rank", lambda: mpizero.broadcast(x, world, root=world.size)),
        (ArgumentError, "root must be a rank", lambda: mpizero.reduce(x, world, root=-1)),
        (ArgumentError, "shape of out must be", lambda: mpizero.all_reduce(x, world, out=np.ones((2, 2)))),
        (ArgumentTypeError, "dtype of out must be", lambda: mpizero.all_reduce(x, world, out=np.ones(4, np.float32))),
        (ArgumentTypeError, "x must be a numpy array", lambda: mpizero.all_reduce([1.0], world)),
        (ArgumentTypeError, "out must be a numpy array", lambda: mpizero.all_reduce(x, world, out=[1.0])),
        (ArgumentTypeError, "comm must be an mpizero.Communicator", lambda: mpizero.all_reduce(x, world.mpi)),
        (
            ArgumentError,
            "elements of x must be",
            lambda: mpizero.all_gather(x, world, out=np.ones(4 * world.size + 9 * world.size)),
        ),
        (ArgumentError, "canonical order", lambda: mpizero.all_reduce(x, world, order="canonical", algorithm="ring")),
    ]
    for kind, text, call in bad:
        if world.size == 1 and "canonical" in text and "order must" not in text:
            continue
        with pytest.raises(kind, match=text):
            call()
    mpizero.barrier(world)


def test_k17_one_communicator_from_two_threads(world):
    """K17: an error for the second thread while the first is in a collective, and right results afterwards."""
    with world.exclusive("the first thread's collective"):
        caught = []

        def second():
            try:
                mpizero.all_reduce(np.ones(5000, np.float32), world)
            except CollectiveError as error:
                caught.append(str(error))

        thread = threading.Thread(target=second, name="second")
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "one thread at a time (got a second one, 'second')" in caught[0]
    assert mpizero.all_reduce(np.ones(5000, np.float32), world)[0] == world.size


def test_k17_two_threads_with_a_communicator_each(world):
    """K17: two threads, each with its own communicator, 200 collectives each: right."""
    comms = [mpizero.Communicator(world.mpi) for _ in range(2)]
    wrong = []

    def work(comm, scale):
        for turn in range(200):
            x = np.full(turn % 7 + 1, scale * (world.rank + 1), np.float32)
            mpizero.all_reduce(x, comm, algorithm="ring" if turn % 2 else "direct")
            if not np.all(x == scale * sum(range(1, world.size + 1))):
                wrong.append((scale, turn))

    threads = [threading.Thread(target=work, args=(comm, 10**index)) for index, comm in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    assert wrong == []


def test_k19_small_and_large(world):
    """K19: more ranks than cores, 4 B and 4 MiB: idle waits yield, so that it ends at all within the time-out."""
    for count in (1, 1 << 20):
        for name in names():
            assert mpizero.all_reduce(np.ones(count, np.float32), world, algorithm=name)[-1] == world.size
