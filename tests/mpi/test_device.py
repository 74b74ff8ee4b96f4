"""Collectives on device memory, every wire, on a device that the host plays: work runs late and out of order."""

import itertools
import random

import numpy as np
import pytest

import mpizero
from mpizero.collectives import algorithms_of, even_offsets
from mpizero.testing.host_runtime import IMMEDIATE, HostRuntime, stand_in

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.mpi

WIRES = {"loads": "loads", "staged": "staged", "slots": "messages", "direct": "messages"}
"""What MPIZERO_DEVICE_WIRE says: messages go through slots in host memory, or take device pointers."""
COUNTS = (1, 2, 7, 64, 1000, 40_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)


class Late:
    """A caller who produces inputs and reads results by work on a stream of his own, which runs when it likes."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.stream = runtime.streamCreateWithFlags(1)
        runtime.users = [self.stream]

    def tensor(self, values):
        x = torch.full_like(values, 77)
        self.fill(x, values)
        return x

    def fill(self, x, values):
        self.runtime.enqueue(self.stream, lambda: x.copy_(values))

    def seen(self, x):
        result = torch.empty_like(x)
        self.runtime.enqueue(self.stream, lambda: result.copy_(x))
        event = self.runtime.eventCreateWithFlags(0)
        self.runtime.eventRecord(event, self.stream)
        self.runtime.eventSynchronize(event)
        return result


@pytest.fixture(autouse=True)
def _few(world):
    if world.size > 4:
        pytest.skip("the streams of up to 4 ranks show what there is to see, and cost the processor enough")


@pytest.fixture(params=WIRES)
def wired(request, world, monkeypatch):
    """A communicator of its own whose device memory takes one wire, the runtime, and a late caller."""
    monkeypatch.setenv("MPIZERO_DEVICE_WIRE", WIRES[request.param])
    monkeypatch.setenv("MPIZERO_CUDA_AWARE", str(int(request.param == "direct")))
    monkeypatch.setattr("mpizero.comm.side.WINDOW", 1 << 16)
    monkeypatch.setattr("mpizero.collectives.device_loads.WINDOW", 1 << 16)
    monkeypatch.setattr("mpizero.collectives.device_loads.ONE_SHOT", 1 << 12)
    monkeypatch.setattr("mpizero.collectives.staged.SLOT", 1 << 14)
    comm = mpizero.Communicator(world.mpi)
    runtime = HostRuntime(seed=world.rank)
    with stand_in(runtime) as device:
        yield comm, Late(runtime), request.param
        if world.size > 1 and request.param in {"slots", "direct"}:
            kind = {"slots": "staged"}.get(request.param, request.param)
            assert set(comm.side(device).wires.kinds) == {kind}
    comm.close()


def part(dtype, rank, count, size):
    values = torch.from_numpy(np.random.default_rng([rank, count]).standard_normal(count) * 3)
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def same(x, y):
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def test_all_reduce(wired, world):
    comm, late, wire = wired
    for count, dtype in itertools.product(COUNTS, DTYPES):
        op = random.Random(count).choice(["sum", "mean", "max", "prod"] if dtype.is_floating_point else ["sum", "max"])
        parts = [part(dtype, rank, count, world.size) for rank in range(world.size)]
        x = late.tensor(parts[world.rank])
        assert mpizero.all_reduce(x, comm, op=op, order="canonical") is x
        assert same(late.seen(x), canonical(parts, op)), f"{wire} {count} {dtype} {op}"


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


def test_reduce_scatter_and_all_gather(wired, world):
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in itertools.product(COUNTS, DTYPES):
        parts = [part(dtype, r, count, size) for r in range(size)]
        wanted = canonical(parts, "sum")
        for counts in (None, [count - count // 2, *[0] * (size - 2), count // 2] if size > 1 else [count]):
            offsets = even_offsets(count, size) if counts is None else np.cumsum([0, *counts]).tolist()
            low, high = offsets[rank : rank + 2]
            x = late.tensor(parts[rank])
            out = mpizero.reduce_scatter(x, comm, counts=counts, order="canonical")
            assert same(late.seen(out), wanted[low:high]), f"{wire} {count} {dtype} {counts}"
            whole = mpizero.all_gather(out, comm, out=torch.empty_like(x), counts=counts)
            assert same(late.seen(whole), wanted), f"{wire} {count} {dtype} {counts}"


def test_rooted_and_all_to_all(wired, world):
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in itertools.product((1, 64, 5003, 40_000), (torch.float32, torch.bfloat16)):
        parts = [part(dtype, r, count, size) for r in range(size)]
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
        counts = [(rank + 2 * peer) % 5 * (count // 50 + 1) for peer in range(size)]
        arriving = [(peer + 2 * rank) % 5 * (count // 50 + 1) for peer in range(size)]
        values = [
            torch.arange(sum((r + 2 * peer) % 5 * (count // 50 + 1) for peer in range(size))) for r in range(size)
        ]
        out = mpizero.all_to_all(late.tensor(values[rank].to(dtype)), comm, counts=counts, out_counts=arriving)
        starts = [sum((r + 2 * peer) % 5 * (count // 50 + 1) for peer in range(rank)) for r in range(size)]
        want = torch.cat([v[s : s + n] for v, s, n in zip(values, starts, arriving, strict=True)]).to(dtype)
        assert same(late.seen(out), want), f"{wire} {count} {dtype}"


def test_async_in_a_row(wired, world):
    """Several under way, inputs dropped at once, and an input overwritten right after the wait."""
    comm, late, _ = wired
    works, wanted = [], []
    for number in range(6):
        parts = [part(torch.float32, r + 10 * number, 3000 + number, world.size) for r in range(world.size)]
        x = late.tensor(parts[world.rank])
        works.append(mpizero.all_reduce(x, comm, order="canonical", out=torch.empty_like(x), async_op=True))
        wanted.append(canonical(parts, "sum"))
        del x
    for work, want in zip(works, wanted, strict=True):
        assert same(late.seen(work.wait()), want)


def test_strided(wired, world):
    comm, late, _ = wired
    late.runtime.users.append(IMMEDIATE)
    rows = [part(torch.float32, r, 60, world.size).view(6, 10) for r in range(world.size)]
    x = late.tensor(rows[world.rank])
    before = late.seen(x)  # packing runs on torch's own stream, which is immediate here
    mpizero.all_reduce(x.T[2:7], comm, order="canonical")
    wanted = before.clone()
    wanted.T[2:7] = canonical(rows, "sum").T[2:7]
    assert same(late.seen(x), wanted)


def test_prepared(wired, world):
    comm, late, _ = wired
    x = late.tensor(part(torch.float32, world.rank, 100, world.size))
    again = mpizero.prepare(mpizero.all_reduce, x, comm, order="canonical")
    for turn in range(3):
        parts = [part(torch.float32, r + turn, 100, world.size) for r in range(world.size)]
        late.runtime.enqueue(late.stream, lambda parts=parts: x.copy_(parts[world.rank]))
        assert same(late.seen(again()), canonical(parts, "sum"))


def test_symmetric_buffers(wired, world):
    """In buffers of `empty` the peers' kernels read and write in place: no windows, one phase."""
    comm, late, wire = wired
    size, rank = world.size, world.rank
    for count, dtype in itertools.product((1, 7, 1000, 40_001), (torch.float32, torch.bfloat16)):
        parts = [part(dtype, r, count, size) for r in range(size)]
        x, out = (mpizero.empty(count, dtype, comm, device="cuda") for _ in range(2))
        moved = late.runtime.copies
        late.fill(x, parts[rank])
        mpizero.all_reduce(x, comm, order="canonical")
        assert same(late.seen(x), canonical(parts, "sum"))
        late.fill(x, parts[rank])
        late.fill(out, parts[rank] * 0)
        assert mpizero.all_reduce(x, comm, out=out, op="max") is out
        assert same(late.seen(out), canonical(parts, "max"))
        if wire == "loads" and size > 1:
            assert late.runtime.copies == moved, "symmetric buffers need no copies"
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
    with pytest.raises(mpizero.ArgumentTypeError, match="in GPU 0"):
        mpizero.all_reduce(late.tensor(torch.ones(4)), comm, out=np.ones(4, np.float32))
    late.runtime.capacity = late.runtime.allocated + (1 << 20 if world.rank else 1)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("mpizero.comm.side.WINDOW", 1 << 22)
    if wire == "loads" and world.size > 1:
        fresh = mpizero.Communicator(world.mpi)
        with pytest.raises(mpizero.DeviceMemoryError, match="rank"):
            mpizero.all_reduce(late.tensor(torch.ones(4)), fresh)
        late.runtime.capacity = 1 << 30
        x = late.tensor(torch.ones(4))
        monkey.undo()
        mpizero.all_reduce(x, fresh)
        assert late.seen(x).tolist() == [world.size] * 4
    monkey.undo()


def test_refused_ipc_falls_back(world, monkeypatch, capfd):
    """Where the system lets no process open another's device memory, data go through the host, and one rank says so."""
    runtime = HostRuntime(seed=world.rank, ipc=world.rank != 0)
    comm = mpizero.Communicator(world.mpi)
    with stand_in(runtime):
        late = Late(runtime)
        for turn in range(2):
            x = late.tensor(torch.full((1000,), 1.0 + turn))
            mpizero.all_reduce(x, comm)
            assert late.seen(x).tolist() == [world.size * (1.0 + turn)] * 1000
        buffer = mpizero.empty(100, torch.float32, comm, device="cuda")
        late.fill(buffer, torch.ones(100))
        mpizero.all_reduce(buffer, comm)
        assert late.seen(buffer).tolist() == [world.size] * 100
    told = capfd.readouterr().err.count("cannot load each other's GPU memory")
    assert told == (world.size > 1 and world.rank == 0)
    comm.close()


def test_every_algorithm_over_loads(world):
    """Any schedule runs on device memory: between ranks of one host by slots that the peers have opened."""
    comm = mpizero.Communicator(world.mpi)
    runtime = HostRuntime(seed=world.rank)
    with stand_in(runtime) as device:
        late = Late(runtime)
        for count, dtype in itertools.product((1, 1000, 70_001), (torch.float32, torch.bfloat16)):
            parts = [part(dtype, rank, count, world.size).round() for rank in range(world.size)]
            for name in ("native", *(entry.name for entry in algorithms_of("all_reduce"))):
                if name == "native" and dtype == torch.bfloat16:
                    continue
                x = late.tensor(parts[world.rank])
                mpizero.all_reduce(x, comm, algorithm=name)
                assert same(late.seen(x), canonical(parts, "sum")), f"{name} {count} {dtype}"
        if world.size > 1:
            assert set(comm.side(device).wires.kinds) == {"peer"}
    comm.close()
