"""Collectives on device memory, every wire that the machine has, with torch's tensors and CuPy's arrays on real GPUs.

The contracts are those that tests/mpi/test_device.py holds on a device that the host plays.
"""

import pytest

import mpizero

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
from helpers.gpu_callers import CALLERS  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

WIRES = ("loads", "messages", "staged")


@pytest.fixture(params=CALLERS)
def late(request, gpu):
    with CALLERS[request.param](gpu).working() as caller:
        yield caller


@pytest.fixture(params=WIRES)
def wired(request, late, world, monkeypatch):
    """A communicator of its own whose device memory takes one wire, a late caller, and the wire."""
    monkeypatch.setenv("MPIZERO_DEVICE_WIRE", request.param)
    contracts.small_pieces(monkeypatch)
    comm = mpizero.Communicator(world.mpi)
    side = comm.side(late.device)
    missing = ""
    if world.size > 1 and request.param == "messages" and not side.aware:
        missing = f"MPI is not known to take GPU memory: {side.why_aware}"
    if world.size > 1 and request.param == "loads" and side.windows is None:
        missing = "the ranks cannot load each other's GPU memory"
    if missing:
        comm.close()
        pytest.skip(missing)
    yield comm, late, request.param
    comm.close()
