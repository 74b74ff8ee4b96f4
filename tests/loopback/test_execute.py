"""Schedules on real bytes: ranks are threads, results are compared with numpy and with the declared trees."""

import functools
import itertools
import random

import numpy as np
import pytest

import mpizero
from mpizero.collectives import algorithm, algorithms_of, build, even_offsets, select
from mpizero.comm import run_loopback
from mpizero.errors import CollectiveError, CollectiveTimeoutError

SIZES = (1, 2, 3, 5, 7, 8)
UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = {
    **dict.fromkeys(("float32", "float64", "float16", "bfloat16"), ("sum", "mean", "prod", "max", "min")),
    **dict.fromkeys(("int32", "int8", "uint16"), ("sum", "prod", "max", "min")),
    "complex64": ("sum", "mean", "prod"),
    "bool": ("max", "min"),
}
CASES = [*itertools.product(OPS, ["numpy"]), *itertools.product(("float32", "bfloat16", "int32", "bool"), ["torch"])]
CASES.remove(("bfloat16", "numpy"))
each_dtype = pytest.mark.parametrize(("dtype", "library"), CASES, ids=[f"{a}-{b}" for a, b in CASES])


def names_of(operation):
    return [entry.name for entry in algorithms_of(operation)]


def counts_of(size):
    return sorted({0, 1, size - 1, size, size + 1, 13, 31})


@pytest.fixture
def some(pytestconfig):
    """Thin a product of options out to a sixth, another one for each label; `--all` keeps it whole."""

    def thin(jobs, *label):
        jobs = list(jobs)
        return jobs if pytestconfig.getoption("--all") else random.Random(str(label)).sample(jobs, -(-len(jobs) // 6))

    return thin


def wide(dtype):
    """The type in which a reduction is reckoned."""
    return np.float32 if dtype in {"float16", "bfloat16"} else np.dtype(dtype)


def exact_values(dtype, rank, count, op):
    """Values whose sums and products are exact in every type, whatever the order."""
    rng = np.random.default_rng([rank, count, len(op)])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    pool = {"prod": [1, 2, 1, 1], "mean": [-4, 0, 3, 7]}.get(op, [-3, -1, 0, 1, 2, 5])
    values = rng.choice(pool, count)
    if dtype == "uint16":
        values = np.abs(values)
    if dtype == "complex64":
        return rng.choice([1, 1j, -1, 1 + 1j], count).astype(dtype)
    return values.astype(wide(dtype))


def to_array(values, dtype, library):
    if library == "numpy":
        return values.astype(dtype)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype))


def to_bytes(x):
    if isinstance(x, np.ndarray):
        return (x + 0 if x.dtype.kind == "c" else x).tobytes()  # complex products have zeros of either sign
    torch = pytest.importorskip("torch")
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy().tobytes()


def finish(total, dtype, library, size, op):
    """Divide and round as a result is."""
    if op == "mean":
        parts = total.view(total.real.dtype)
        total = (parts / parts.dtype.type(size)).view(total.dtype)
    return to_bytes(to_array(total, dtype, library))


def expected(dtype, library, size, count, op):
    parts = [exact_values(dtype, rank, count, op) for rank in range(size)]
    return finish(functools.reduce(UFUNCS[op], parts), dtype, library, size, op)


def cut(data, count, size):
    """The bytes of each rank's chunk."""
    width = len(data) // count if count else 1
    return [data[start * width : stop * width] for start, stop in itertools.pairwise(even_offsets(count, size))]


@each_dtype
@pytest.mark.parametrize("name", names_of("all_reduce"))
def test_all_reduce(dtype, library, name, some):
    for size in SIZES:
        jobs = some(itertools.product(OPS[dtype], counts_of(size), (False, True)), dtype, name, size)

        def body(comm, jobs=jobs):
            found = []
            for op, count, apart in jobs:
                x = to_array(exact_values(dtype, comm.rank, count, op), dtype, library)
                before = to_bytes(x)
                out = to_array(np.zeros(count), dtype, library) if apart else None
                result = mpizero.all_reduce(x, comm, op=op, out=out, algorithm=name)
                assert result is (out if apart else x)
                assert not apart or to_bytes(x) == before
                found.append(to_bytes(result))
            return found

        wanted = [expected(dtype, library, size, count, op) for op, count, _ in jobs]
        assert run_loopback(size, body) == [wanted] * size


@each_dtype
@pytest.mark.parametrize("name", names_of("reduce_scatter"))
def test_reduce_scatter(dtype, library, name, some):
    for size in SIZES:
        jobs = some(itertools.product(OPS[dtype], counts_of(size), ("new", "out", "in place")), dtype, name, size)

        def body(comm, jobs=jobs):
            found = []
            for op, count, form in jobs:
                x = to_array(exact_values(dtype, comm.rank, count, op), dtype, library)
                low, high = even_offsets(count, comm.size)[comm.rank : comm.rank + 2]
                out = {"new": None, "out": to_array(np.zeros(high - low), dtype, library), "in place": x[low:high]}[
                    form
                ]
                before = to_bytes(x)
                result = mpizero.reduce_scatter(x, comm, op=op, out=out, algorithm=name)
                assert form == "new" or result is out
                assert form == "in place" or to_bytes(x) == before
                found.append(to_bytes(result))
            return found

        whole = [expected(dtype, library, size, count, op) for op, count, _ in jobs]
        cuts = [cut(data, count, size) for data, (_, count, _) in zip(whole, jobs, strict=True)]
        assert run_loopback(size, body) == [[chunks[rank] for chunks in cuts] for rank in range(size)]


@each_dtype
@pytest.mark.parametrize("name", names_of("reduce"))
def test_reduce(dtype, library, name, some):
    for size in SIZES:
        roots = sorted({0, size // 2, size - 1})
        jobs = some(itertools.product(OPS[dtype], (1, size + 1, 13), roots, (False, True)), dtype, name, size)

        def body(comm, jobs=jobs):
            found = []
            for op, count, root, apart in jobs:
                x = to_array(exact_values(dtype, comm.rank, count, op), dtype, library)
                before = to_bytes(x)
                out = to_array(np.zeros(count), dtype, library) if apart else None
                result = mpizero.reduce(x, comm, op=op, root=root, out=out, algorithm=name)
                if comm.rank != root:
                    assert result is None
                    assert to_bytes(x) == before
                    continue
                assert result is (out if apart else x)
                assert to_bytes(result) == expected(dtype, library, comm.size, count, op)
                found.append(root)
            return found

        found = run_loopback(size, body)
        assert sorted(itertools.chain(*found)) == sorted(root for _, _, root, _ in jobs)


@each_dtype
@pytest.mark.parametrize("name", names_of("all_gather"))
def test_all_gather(dtype, library, name, some):
    for size in SIZES:
        counts = some(counts_of(size), dtype, name, size)

        def body(comm, counts=counts):
            for count in counts:
                everything = [to_array(exact_values(dtype, r, count, "sum"), dtype, library) for r in range(comm.size)]
                wanted = b"".join(map(to_bytes, everything))
                result = mpizero.all_gather(everything[comm.rank], comm, algorithm=name)
                assert to_bytes(result) == wanted
                # Of n elements, rank r brings chunk r, apart from the result or in it.
                whole = to_array(exact_values(dtype, 0, count, "sum"), dtype, library)
                low, high = even_offsets(count, comm.size)[comm.rank : comm.rank + 2]
                out = to_array(np.zeros(count), dtype, library)
                assert mpizero.all_gather(whole[low:high], comm, out=out, algorithm=name) is out
                assert to_bytes(out) == to_bytes(whole)
                out = to_array(np.zeros(count), dtype, library)
                out[low:high] = whole[low:high]
                mpizero.all_gather(out[low:high], comm, out=out, algorithm=name)
                assert to_bytes(out) == to_bytes(whole)
            return True

        assert all(run_loopback(size, body))


@each_dtype
def test_broadcast(dtype, library, some):
    for size in SIZES:
        jobs = some(itertools.product(counts_of(size), range(size)), dtype, size)

        def body(comm, jobs=jobs):
            for count, root in jobs:
                x = to_array(exact_values(dtype, comm.rank, count, "sum"), dtype, library)
                assert mpizero.broadcast(x, comm, root=root) is x
                assert to_bytes(x) == to_bytes(to_array(exact_values(dtype, root, count, "sum"), dtype, library))
            return True

        assert all(run_loopback(size, body))


def test_broadcast_from_read_only_memory():
    """Only the receivers are written."""

    def body(comm):
        x = np.arange(5.0) if comm.rank == 1 else np.zeros(5)
        x.flags.writeable = comm.rank != 1
        return mpizero.broadcast(x, comm, root=1).tolist()

    assert run_loopback(3, body) == [[0, 1, 2, 3, 4]] * 3


def test_all_gather_shapes():
    def body(comm):
        rows = mpizero.all_gather(np.full((2, 3), comm.rank), comm)
        scalars = mpizero.all_gather(np.array(comm.rank), comm)
        return rows.shape, rows[:, 0].tolist(), scalars.tolist()

    assert run_loopback(3, body) == [((6, 3), [0, 0, 1, 1, 2, 2], [0, 1, 2])] * 3


def evaluate(tree, parts, op):
    if isinstance(tree, int):
        return parts[tree]
    return UFUNCS[op](evaluate(tree[0], parts, op), evaluate(tree[1], parts, op))


def random_parts(dtype, size, count):
    """Random values that the type can hold, as the type in which they are reckoned."""
    rng = np.random.default_rng(size)
    values = [rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count) for _ in range(size)]
    if dtype == "complex64":
        return [(value + 1j * rng.standard_normal(count)).astype(dtype) for value in values]
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(value).bfloat16().float().numpy() for value in values]
    return [value.astype(dtype).astype(wide(dtype)) for value in values]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_result_is_the_declared_tree(dtype, op):
    """Random values, so that any other order of summation shows (K8)."""
    library = "torch" if dtype == "bfloat16" else "numpy"
    count = 101
    told_apart = set()
    for size, entry in itertools.product(range(2, 9), algorithms_of("all_reduce")):
        parts = random_parts(dtype, size, count)

        def body(comm, parts=parts, name=entry.name):
            x = to_array(parts[comm.rank], dtype, library)
            return to_bytes(mpizero.all_reduce(x, comm, op=op, algorithm=name))

        chunks = build("all_reduce", entry.name, size, 0).chunks
        wanted = b""
        for chunk, (start, stop) in enumerate(itertools.pairwise(even_offsets(count, chunks))):
            total = evaluate(entry.tree(size, chunk, 0), [part[start:stop] for part in parts], op)
            wanted += finish(total, dtype, library, size, op)
        results = run_loopback(size, body)
        assert results == [wanted] * size
        told_apart.add((size, wanted))
    assert dtype in {"float16", "bfloat16"} or len(told_apart) > len(range(2, 9))  # else the values prove nothing


@pytest.mark.parametrize("size", range(2, 9))
def test_same_bits_on_every_rank_and_in_every_canonical_algorithm(size):
    """K8."""
    parts = random_parts("float32", size, 1009)

    def body(comm, name):
        return mpizero.all_reduce(parts[comm.rank].copy(), comm, algorithm=name).tobytes()

    found = {}
    for entry in algorithms_of("all_reduce"):
        results = set(run_loopback(size, functools.partial(body, name=entry.name)))
        assert len(results) == 1
        found[entry.name] = results.pop()
    canonical = {found[entry.name] for entry in algorithms_of("all_reduce") if entry.is_canonical(size)}
    assert len(canonical) == 1


def test_auto_with_canonical_order_is_the_canonical_tree():
    for size in range(2, 9):
        parts = random_parts("float32", size, 64)

        def body(comm, parts=parts):
            whole = mpizero.all_reduce(parts[comm.rank].copy(), comm, order="canonical")
            chunk = mpizero.reduce_scatter(parts[comm.rank].copy(), comm, order="canonical")
            return whole.tobytes(), mpizero.all_gather(chunk, comm, out=np.empty_like(whole)).tobytes()

        wanted = evaluate(algorithm("all_reduce", "direct").tree(size, 0), parts, "sum").tobytes()
        assert run_loopback(size, body) == [(wanted, wanted)] * size


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(dtype, op):
    """K9: NaN on one rank, op max and min: NaN at that element on every rank."""
    library = "torch" if dtype == "bfloat16" else "numpy"
    for size, name in itertools.product((2, 3, 4, 5), names_of("all_reduce")):
        for guilty in range(size):

            def body(comm, name=name, guilty=guilty):
                values = np.arange(9, dtype=np.float32) * (-1) ** comm.rank
                if comm.rank == guilty:
                    values[[0, 4, 8]] = np.nan
                x = mpizero.all_reduce(to_array(values, dtype, library), comm, op=op, algorithm=name)
                return to_bytes(x), np.flatnonzero(np.isnan(np.asarray(x.tolist()))).tolist()

            results = run_loopback(size, body)
            assert len({data for data, _ in results}) == 1
            assert results[0][1] == [0, 4, 8]


def test_rounded_once():
    """K10: fp16 2048 + 1 + 1 + 1 is 2052; bf16 2048 + 8 + 8 + 8 is 2080; fp16 mean of four 65000 is 65000."""
    torch = pytest.importorskip("torch")
    for name in names_of("all_reduce"):

        def body(comm, name=name):
            first = comm.rank == 0
            half = np.full(5, 2048 if first else 1, np.float16)
            brain = torch.full((5,), 2048.0 if first else 8.0, dtype=torch.bfloat16)
            large = np.full(5, 65000, np.float16)
            mpizero.all_reduce(half, comm, algorithm=name)
            mpizero.all_reduce(brain, comm, algorithm=name)
            mpizero.all_reduce(large, comm, op="mean", algorithm=name)
            return [set(half.tolist()), set(brain.tolist()), set(large.tolist())]

        assert run_loopback(4, body) == [[{2052.0}, {2080.0}, {float(np.float16(65000))}]] * 4


def test_infinity_raises_no_warning():
    """Data are data: a rank that turned numpy's warnings into errors must not drop out of a collective."""

    def body(comm):
        with np.errstate(all="raise"):
            x = np.array([np.inf if comm.rank else -np.inf, 3e38, 1e-45], np.float32)
            half = np.full(3, 60000, np.float16)
            return mpizero.all_reduce(x, comm).tolist()[1], mpizero.all_reduce(half, comm).tolist()[0]

    assert run_loopback(2, body) == [(np.inf, np.inf)] * 2


def test_complex_mean_divides_each_part_once():
    def body(comm):
        x = np.array([0.3 + 0.7j, complex(np.inf, 1.0)], np.complex64)
        return mpizero.all_reduce(x, comm, op="mean").tolist()

    third = np.float32(0.3) + np.float32(0.3) + np.float32(0.3), np.float32(0.7) + np.float32(0.7) + np.float32(0.7)
    first, second = run_loopback(3, body)[2]
    assert first == complex(third[0] / np.float32(3), third[1] / np.float32(3))
    assert second == complex(np.inf, 1.0)


@pytest.mark.parametrize("scratch", [1, 18_000])
def test_segments_change_nothing(scratch, monkeypatch, pytestconfig):
    """With little scratch a collective runs in many segments and gives the same bits, in place and apart."""
    count = 2003
    pairs = [(2, "float32"), (5, "float16"), (8, "float32"), (2, "float16"), (5, "float32"), (8, "float16")]
    for size, dtype in pairs if pytestconfig.getoption("--all") else pairs[:3]:
        parts = [part.astype(dtype) for part in random_parts(dtype, size, count if scratch > 1 else 61)]

        def body(comm, parts=parts):
            mine = parts[comm.rank]
            found = []
            for entry in algorithms_of("all_reduce"):
                found.append(mpizero.all_reduce(mine.copy(), comm, algorithm=entry.name, op="mean").tobytes())
                found.append(mpizero.all_reduce(mine, comm, algorithm=entry.name, out=mine.copy()).tobytes())
            scatters = [entry.name for entry in algorithms_of("reduce_scatter")]
            found += [mpizero.reduce_scatter(mine, comm, algorithm=name).tobytes() for name in scatters]
            for entry in algorithms_of("reduce"):
                result = mpizero.reduce(mine.copy(), comm, algorithm=entry.name, root=1)
                found.append(result.tobytes() if comm.rank == 1 else b"")
            return found, comm.stats.messages_sent, comm.stats.bytes_sent

        monkeypatch.undo()
        plain = run_loopback(size, body)
        monkeypatch.setattr(select, "SCRATCH", scratch)
        pieces = run_loopback(size, body)
        assert [found for found, _, _ in pieces] == [found for found, _, _ in plain]
        assert [nbytes for _, _, nbytes in pieces] == [nbytes for _, _, nbytes in plain]
        assert all(many > few for (_, many, _), (_, few, _) in zip(pieces, plain, strict=True))


@pytest.mark.parametrize(("dtype", "wide_itemsize"), [("float32", 4), ("float16", 4), ("int8", 1)])
def test_what_is_counted_is_what_the_schedule_says(dtype, wide_itemsize):
    """Bytes of every algorithm, and messages where no chunk is empty, equal the builder's own counts."""
    itemsize = np.dtype(dtype).itemsize
    for size, count in itertools.product((2, 3, 5, 8), (8, 13, 997)):

        def body(comm, count=count):
            for operation in ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"):
                for entry in algorithms_of(operation):
                    schedule = build(operation, entry.name, comm.size, comm.rank, 0)
                    offsets = even_offsets(count, schedule.chunks)
                    before = comm.stats.copy()
                    x = np.ones(count, dtype)
                    if operation == "all_gather":
                        low, high = offsets[comm.rank : comm.rank + 2]
                        mpizero.all_gather(x[low:high], comm, out=np.ones_like(x), algorithm=entry.name)
                    else:
                        getattr(mpizero, operation)(x, comm, algorithm=entry.name)
                    moved = comm.stats.since(before)
                    where = f"{operation} {entry.name} {comm.size} {count}"
                    assert moved.bytes_sent == schedule.sent_bytes(offsets, itemsize, wide_itemsize), where
                    assert moved.messages_sent == schedule.sent_messages(), where
            return comm.stats

        stats = run_loopback(size, body)
        assert sum(one.bytes_sent for one in stats) == sum(one.bytes_received for one in stats)


def test_nothing_is_sent_for_empty_chunks():
    """Fewer elements than ranks: empty chunks make no messages."""

    def body(comm):
        mpizero.all_reduce(np.ones(2, np.float32), comm, algorithm="direct")
        return comm.stats.messages_sent, comm.stats.bytes_sent

    stats = run_loopback(5, body)
    assert sum(nbytes for _, nbytes in stats) == 2 * 4 * 2 * 4
    assert sum(messages for messages, _ in stats) == 2 * 2 * 4


def test_barrier_waits_for_all():
    arrived = []

    def body(comm):
        for turn in range(20):
            arrived.append(turn)
            mpizero.barrier(comm)
            assert arrived.count(turn) == comm.size
        return True

    for size in SIZES:
        arrived.clear()
        assert all(run_loopback(size, body))


def test_a_rank_that_never_calls_is_named():
    def body(comm):
        if comm.rank != 2:
            mpizero.all_reduce(np.ones(8, np.float32), comm, algorithm="ring")

    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce \(ring\): rank \d of 3 waited 0.2 s for rank \d"):
        run_loopback(3, body, timeout=0.2)


def test_different_lengths_are_noticed():
    """K1, over loopback alone: MPI's receives do not tell."""

    def body(comm):
        mpizero.all_reduce(np.ones(4 if comm.rank else 6, np.float32), comm, algorithm="direct")

    with pytest.raises(CollectiveError, match=r"expected .* bytes of rank . and got"):
        run_loopback(2, body)


def test_the_first_exception_is_the_one_raised():
    def body(comm):
        if comm.rank == 1:
            raise ZeroDivisionError
        mpizero.barrier(comm)

    with pytest.raises(ZeroDivisionError):
        run_loopback(3, body)
