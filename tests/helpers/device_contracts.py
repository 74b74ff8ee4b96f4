"""What collectives on device memory must do, whoever plays the device: imported by tests/mpi and by tests/gpu.

Each of these tests takes the fixture `wired`, a communicator whose device memory takes one wire, a late caller and the
wire's name, or `late`, the caller alone. A late caller produces inputs and reads results by work on a stream of his
own, which runs when it likes:

- `dtypes`, torch's element types that his library has, `number`, his device's, and `copies`, how many copies were
  started so far, or None;
- `tensor(values)`, an array that will have the values of a torch CPU tensor, `fill(x, values)`, `like(x)`, an
  uninitialised array, and `empty(count, dtype, comm)`, a symmetric one;
- `seen(x)`, a torch CPU tensor of what work behind all that came before finds in `x`;
- `packing()`: his library's own work, which packs arrays with strides, is about to be used;
- `room(nbytes)` and `without_ipc(wanted)`: inside the `with` block the device has so many bytes left for collectives,
  and opens no other process's memory.
"""

import itertools
import random

import numpy as np
import pytest
import torch

import mpizero
from mpizero.collectives import even_offsets

COUNTS = (1, 2, 7, 64, 1000, 40_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)


def small_pieces(monkeypatch):
    """Have few elements make many pieces."""
    monkeypatch.setattr("mpizero.comm.side.LEAST_WINDOW", 1 << 16)
    monkeypatch.setattr("mpizero.comm.side.MOST_WINDOW", 1 << 16)
    monkeypatch.setattr("mpizero.collectives.device_loads.ONE_SHOT", 1 << 12)
    monkeypatch.setattr("mpizero.collectives.staged.SLOT", 1 << 14)


def part(dtype, rank, count):
    values = torch.from_numpy(np.random.default_rng([rank, count]).standard_normal(count) * 3)
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def same(x, y):
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def cases(late, counts, dtypes=DTYPES):
    return itertools.product(counts, [dtype for dtype in dtypes if dtype in late.dtypes])


def canonical(parts, op):
    """The canonical order by hand: pair neighbours, carry the odd one; fp32 for halves; one rounding."""
    wide = torch.float32 if parts[0].dtype in {torch.bfloat16, torch.float16} and op not in {"max", "min"} else None
    level = [part.to(wide or part.dtype) for part in parts]
    add = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "prod": torch.mul}[op]
    while len(level) > 1:
        pairs = [add(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    total = level[0] / len(parts) if op == "mean" else level[0]
    return total.to(parts[0].dtype)


def test_all_reduce(wired, world):
    comm, late, wire = wired
    for count, dtype in cases(late, COUNTS):
        op = random.Random(count).choice(["sum", "mean", "max", "prod"] if dtype.is_floating_point else ["sum", "max"])
        parts = [part(dtype, rank, count) for rank in range(world.size)]
        x = late.tensor(parts[world.rank])
        assert mpizero.all_reduce(x, comm, op=op, order="canonical") is x
        assert same(late.seen(x), canonical(parts, op)), f"{wire} {count} {dtype} {op}"


def test_reduce_scatter_and_all_gather(wired, world):
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in cases(late, COUNTS):
        parts = [part(dtype, r, count) for r in range(size)]
        wanted = canonical(parts, "sum")
        for counts in (None, [count - count // 2, *[0] * (size - 2), count // 2] if size > 1 else [count]):
            offsets = even_offsets(count, size) if counts is None else np.cumsum([0, *counts]).tolist()
            low, high = offsets[rank : rank + 2]
            x = late.tensor(parts[rank])
            out = mpizero.reduce_scatter(x, comm, counts=counts, order="canonical")
            assert same(late.seen(out), wanted[low:high]), f"{wire} {count} {dtype} {counts}"
            whole = mpizero.all_gather(out, comm, out=late.like(x), counts=counts)
            assert same(late.seen(whole), wanted), f"{wire} {count} {dtype} {counts}"


def test_rooted_and_all_to_all(wired, world):
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in cases(late, (1, 64, 5003, 40_000), (torch.float32, torch.bfloat16)):
        parts = [part(dtype, r, count) for r in range(size)]
        root = count % size
        x = late.tensor(parts[rank])
        mpizero.broadcast(x, comm, root=root)
        assert same(late.seen(x), parts[root]), f"{wire} {count} {dtype}"
        total = mpizero.reduce(late.tensor(parts[rank]), comm, root=root, order="canonical")
        assert (total is None) == (rank != root)
        assert total is None or same(late.seen(total), canonical(parts, "sum"))
        stacked = mpizero.gather(late.tensor(parts[rank]), comm, root=root)
        assert stacked is None or same(late.seen(stacked), torch.cat(parts))
        low, high = even_offsets(count, size)[rank : rank + 2]
        mine = mpizero.scatter(late.tensor(parts[rank]), comm, root=root)
        assert same(late.seen(mine), parts[root][low:high])
        if count % size == 0:
            out = mpizero.all_to_all(late.tensor(parts[rank]), comm)
            step = count // size
            assert same(late.seen(out), torch.cat([p[rank * step : (rank + 1) * step] for p in parts]))
        check_uneven_all_to_all(wired, world, count, dtype)


def check_uneven_all_to_all(wired, world, count, dtype):
    comm, late, wire = wired
    size, rank = world.size, world.rank

    def length(sender, receiver):
        return (sender + 2 * receiver) % 5 * (count // 50 + 1)

    leaving, arriving = ([length(*pair) for pair in pairs] for pairs in (
        [(rank, peer) for peer in range(size)],
        [(peer, rank) for peer in range(size)],
    ))  # fmt: skip
    values = [torch.arange(sum(length(r, peer) for peer in range(size))) for r in range(size)]
    out = mpizero.all_to_all(late.tensor(values[rank].to(dtype)), comm, counts=leaving, out_counts=arriving)
    starts = [sum(length(r, peer) for peer in range(rank)) for r in range(size)]
    want = torch.cat([v[s : s + n] for v, s, n in zip(values, starts, arriving, strict=True)]).to(dtype)
    assert same(late.seen(out), want), f"{wire} {count} {dtype}"


def test_async_in_a_row(wired, world):
    """Several under way, inputs dropped at once, and an input overwritten right after the wait."""
    comm, late, _ = wired
    works, wanted = [], []
    for number in range(6):
        parts = [part(torch.float32, r + 10 * number, 3000 + number) for r in range(world.size)]
        x = late.tensor(parts[world.rank])
        works.append(mpizero.all_reduce(x, comm, order="canonical", out=late.like(x), async_op=True))
        wanted.append(canonical(parts, "sum"))
        del x
    for work, want in zip(works, wanted, strict=True):
        assert same(late.seen(work.wait()), want)


def test_strided(wired, world):
    comm, late, _ = wired
    late.packing()
    rows = [part(torch.float32, r, 60).view(6, 10) for r in range(world.size)]
    x = late.tensor(rows[world.rank])
    before = late.seen(x)
    mpizero.all_reduce(x.T[2:7], comm, order="canonical")
    wanted = before.clone()
    wanted.T[2:7] = canonical(rows, "sum").T[2:7]
    assert same(late.seen(x), wanted)


def test_nothing(wired, world):
    """Arrays without elements, on all ranks and on all but one."""
    comm, late, _ = wired
    x = late.tensor(torch.empty(0))
    assert mpizero.all_reduce(x, comm) is x
    assert late.seen(mpizero.all_gather(x, comm)).numel() == 0
    assert late.seen(mpizero.reduce_scatter(x, comm)).numel() == 0
    mine = torch.arange(5.0) if world.rank == world.size - 1 else torch.empty(0)
    counts = [0] * (world.size - 1) + [5]
    assert late.seen(mpizero.all_gather(late.tensor(mine), comm, counts=counts)).tolist() == [0, 1, 2, 3, 4]


def test_prepared(wired, world):
    comm, late, _ = wired
    x = late.tensor(part(torch.float32, world.rank, 100))
    again = mpizero.prepare(mpizero.all_reduce, x, comm, order="canonical")
    for turn in range(3):
        parts = [part(torch.float32, r + turn, 100) for r in range(world.size)]
        late.fill(x, parts[world.rank])
        assert same(late.seen(again()), canonical(parts, "sum"))


def test_symmetric_buffers(wired, world):
    """In buffers of `empty` the peers' kernels read and write in place: no windows, one phase."""
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in cases(late, (1, 7, 1000, 40_001), (torch.float32, torch.bfloat16)):
        parts = [part(dtype, r, count) for r in range(size)]
        x, out = (late.empty(count, dtype, comm) for _ in range(2))
        moved = late.copies
        late.fill(x, parts[rank])
        mpizero.all_reduce(x, comm, order="canonical")
        assert same(late.seen(x), canonical(parts, "sum"))
        late.fill(x, parts[rank])
        late.fill(out, parts[rank] * 0)
        assert mpizero.all_reduce(x, comm, out=out, op="max") is out
        assert same(late.seen(out), canonical(parts, "max"))
        if wire == "loads" and size > 1:
            assert late.copies == moved, "symmetric buffers need no copies"
        low, high = even_offsets(count, size)[rank : rank + 2]
        mpizero.reduce_scatter(x, comm, out=out[low:high], order="canonical")
        assert same(late.seen(out[low:high]), canonical(parts, "sum")[low:high])
        mpizero.all_gather(out[low:high], comm, out=out)
        assert same(late.seen(out), canonical(parts, "sum"))
        mpizero.broadcast(x, comm, root=size - 1)
        assert same(late.seen(x), parts[size - 1])


def test_errors_leave_the_job_alive(wired, world):
    """Host memory on one rank, a device on another; x and out apart; a device without room: errors on all ranks."""
    comm, late, wire = wired
    if world.size > 1:
        x = np.ones(4, np.float32) if world.rank == 0 else late.tensor(torch.ones(4))
        with pytest.raises(mpizero.CollectiveError, match="on a GPU"):
            mpizero.all_reduce(x, mpizero.Communicator(world.mpi))
    with pytest.raises(mpizero.ArgumentTypeError, match=f"in GPU {late.number}"):
        mpizero.all_reduce(late.tensor(torch.ones(4)), comm, out=np.ones(4, np.float32))
    if wire == "loads" and world.size > 1:
        fresh = mpizero.Communicator(world.mpi)
        x = late.tensor(torch.ones(4))
        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr("mpizero.comm.side.LEAST_WINDOW", 1 << 22)
            with late.room(1 << 20 if world.rank else 1), pytest.raises(mpizero.DeviceMemoryError, match="rank"):
                mpizero.all_reduce(x, fresh)
        mpizero.all_reduce(x, fresh)
        assert late.seen(x).tolist() == [world.size] * 4


def test_refused_ipc_falls_back(late, world, capfd):
    """Where the system lets no process open another's device memory, data go through the host, and one rank says so."""
    comm = mpizero.Communicator(world.mpi)
    with late.without_ipc(wanted=world.rank == 0):
        for turn in range(2):
            x = late.tensor(torch.full((1000,), 1.0 + turn))
            mpizero.all_reduce(x, comm)
            assert late.seen(x).tolist() == [world.size * (1.0 + turn)] * 1000
        buffer = late.empty(100, torch.float32, comm)
        late.fill(buffer, torch.ones(100))
        mpizero.all_reduce(buffer, comm)
        assert late.seen(buffer).tolist() == [world.size] * 100
    told = capfd.readouterr().err.count("cannot load each other's GPU memory")
    assert told == (world.size > 1 and world.rank == 0)
    comm.close()
