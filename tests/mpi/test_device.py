"""Collectives on device memory, every wire, on a device that the host plays: work runs late and out of order."""

import itertools
from contextlib import contextmanager

import pytest

import mpizero
from mpizero.arrays import gpus
from mpizero.collectives import algorithms_of
from mpizero.testing.host_runtime import IMMEDIATE, HostRuntime, stand_in

torch = pytest.importorskip("torch")
pytest.register_assert_rewrite("helpers.device_contracts")
from helpers import device_contracts as contracts  # noqa: E402  (needs torch)
from helpers.device_contracts import (  # noqa: E402, F401
    test_all_reduce,
    test_async_in_a_row,
    test_errors_leave_the_job_alive,
    test_nothing,
    test_prepared,
    test_reduce_scatter_and_all_gather,
    test_refused_ipc_falls_back,
    test_rooted_and_all_to_all,
    test_strided,
    test_symmetric_buffers,
)

pytestmark = pytest.mark.mpi

WIRES = {"loads": "loads", "staged": "staged", "slots": "messages", "direct": "messages"}
"""What MPIZERO_DEVICE_WIRE says: messages go through slots in host memory, or take device pointers."""


class HostCaller:
    """A late caller of a device that the host plays; see helpers/device_contracts.py."""

    dtypes, number = contracts.DTYPES, 0

    def __init__(self, runtime):
        self.runtime = runtime
        self.stream = runtime.streamCreateWithFlags(1)
        runtime.users = [self.stream]

    @property
    def copies(self):
        return self.runtime.copies

    def tensor(self, values):
        x = torch.full_like(values, 77)
        self.fill(x, values)
        return x

    def fill(self, x, values):
        self.runtime.enqueue(self.stream, lambda: x.copy_(values))

    def like(self, x):
        return torch.empty_like(x)

    def empty(self, count, dtype, comm):
        return mpizero.empty(count, dtype, comm, device="cuda")

    def seen(self, x):
        result = torch.empty_like(x)
        self.runtime.enqueue(self.stream, lambda: result.copy_(x))
        event = self.runtime.eventCreateWithFlags(0)
        self.runtime.eventRecord(event, self.stream)
        self.runtime.eventSynchronize(event)
        return result

    def packing(self):
        self.runtime.users.append(IMMEDIATE)  # the stream of torch's own work on CPU tensors

    @contextmanager
    def room(self, nbytes):
        before, self.runtime.capacity = self.runtime.capacity, self.runtime.allocated + nbytes
        yield
        self.runtime.capacity = before

    @contextmanager
    def without_ipc(self, *, wanted):
        self.runtime.ipc = not wanted
        yield
        self.runtime.ipc = True


@pytest.fixture(autouse=True)
def _few(world):
    if world.size > 4:
        pytest.skip("the streams of up to 4 ranks show what there is to see, and cost the processor enough")


@pytest.fixture
def late(world):
    runtime = HostRuntime(seed=world.rank)
    with stand_in(runtime):
        yield HostCaller(runtime)


@pytest.fixture(params=WIRES)
def wired(request, late, world, monkeypatch):
    """A communicator of its own whose device memory takes one wire, a late caller, and the wire."""
    monkeypatch.setenv("MPIZERO_DEVICE_WIRE", WIRES[request.param])
    monkeypatch.setenv("MPIZERO_CUDA_AWARE", str(int(request.param == "direct")))
    contracts.small_pieces(monkeypatch)
    comm = mpizero.Communicator(world.mpi)
    yield comm, late, request.param
    if world.size > 1 and request.param in {"slots", "direct"}:
        kind = {"slots": "staged"}.get(request.param, request.param)
        assert set(comm.side(gpus().stand_in).wires.kinds) == {kind}
    comm.close()


def test_every_algorithm_over_loads(late, world):
    """Any schedule runs on device memory: between ranks of one host by slots that the peers have opened."""
    comm = mpizero.Communicator(world.mpi)
    for count, dtype in itertools.product((1, 1000, 70_001), (torch.float32, torch.bfloat16)):
        parts = [contracts.part(dtype, rank, count).round() for rank in range(world.size)]
        for name in ("native", *(entry.name for entry in algorithms_of("all_reduce"))):
            if name == "native" and dtype == torch.bfloat16:
                continue
            x = late.tensor(parts[world.rank])
            mpizero.all_reduce(x, comm, algorithm=name)
            assert contracts.same(late.seen(x), contracts.canonical(parts, "sum")), f"{name} {count} {dtype}"
    if world.size == 1:
        return
    wires = comm.side(gpus().stand_in).wires
    assert set(wires.kinds) == {"peer"}
    comm.close()
    assert wires.closed, "peers' slots are closed before any rank frees its own"
