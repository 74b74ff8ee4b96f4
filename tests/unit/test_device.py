"""Device memory without a GPU: the runtime that the host plays, runs of memory, and what users are told."""

import sys

import numpy as np
import pytest

import mpizero
from mpizero.arrays import DeviceArray, gpus, parse_device
from mpizero.arrays.runtime import Runtime
from mpizero.collectives import call
from mpizero.comm import run_loopback
from mpizero.errors import ArgumentTypeError, DeviceError, DeviceMemoryError
from mpizero.testing.host_runtime import IMMEDIATE, POISON, HostRuntime, stand_in


@pytest.fixture
def runtime():
    """A runtime that runs nothing before it must."""
    return HostRuntime(restless=0.0)


@pytest.fixture
def device(runtime):
    with stand_in(runtime) as device:
        yield device


def bytes_at(array):
    return bytes((np.ctypeslib.ctypes.c_uint8 * array.nbytes).from_address(array.address))


def test_work_is_late(runtime, device):
    """A copy has not happened when it has been queued, and has when an event behind it says so."""
    source, target = device.pinned(4), device.allocate(4)
    source[:] = [1, 2, 3, 4]
    stream = device.stream()
    device.copy(target, source, stream)
    assert bytes_at(target) == bytes([POISON] * 4)
    event = stream.record()
    while not event.done():
        pass
    assert bytes_at(target) == bytes([1, 2, 3, 4])


def test_streams_overtake_each_other_unless_told(runtime, device):
    first, second = device.stream(), device.stream()
    order = []
    runtime.enqueue(first.handle, lambda: order.append("first"))
    runtime.enqueue(second.handle, lambda: order.append("second"))
    second.record().synchronize()
    assert order == ["second"]
    second.wait(first.record())
    runtime.enqueue(second.handle, lambda: order.append("third"))
    second.record().synchronize()
    assert order == ["second", "first", "third"]


def test_an_immediate_stream_waits_at_once(runtime, device):
    stream, order = device.stream(), []
    runtime.enqueue(stream.handle, lambda: order.append("ours"))
    event = stream.record()
    (user,) = device.users_streams()
    assert user.handle == IMMEDIATE
    user.wait(event)
    assert order == ["ours"]


def test_freed_memory_is_overwritten_and_counted(runtime, device):
    before = runtime.allocated
    array = device.allocate(1000)
    address = array.address
    part = array[10:20]
    del array
    assert runtime.allocated == before + 1000, "a part keeps all of it alive"
    del part
    assert runtime.allocated == before
    assert device.allocate(1000).address == address


def test_room_runs_out(runtime, device):
    runtime.capacity = 100
    with pytest.raises(DeviceMemoryError, match="GPU 0 must have 101 bytes free"):
        device.allocate(101)


def test_ipc_may_be_refused():
    runtime = HostRuntime(ipc=False)
    with stand_in(runtime) as device, pytest.raises(DeviceError, match="by CUDA IPC"):
        device.open(device.share(device.allocate(8)), 8)


def test_what_is_in_flight_is_kept(device):
    stream = device.stream()
    device.runtime.enqueue(stream.handle, lambda: None)
    array = device.allocate(64)
    before = device.runtime.allocated
    device.keep(stream.record(), array)
    del array
    assert device.runtime.allocated == before
    device.runtime.finish()
    device.let_go()
    assert device.runtime.allocated == before - 64


def test_runs_of_memory(device):
    array = DeviceArray(device, 1000, 10, np.float32, None)
    assert (len(array), array.nbytes) == (10, 40)
    part = array[2:5]
    assert (part.address, part.size) == (1008, 3)
    assert array[7:3].size == 0
    assert array.view(np.uint8).size == 40
    assert array.__cuda_array_interface__["data"] == (1000, False)
    with pytest.raises(IndexError, match="no step"):
        array[::2]


def test_a_gpu_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", None)
    with pytest.raises(ArgumentTypeError, match=r"array of GPU 7'\): pip install 'mpizero\[cuda1[23]\]'"):
        gpus().device(7)


@pytest.mark.parametrize("word", ["cpu", "mps:0", "cuda:x", True])
def test_what_is_no_device(word):
    with pytest.raises(ArgumentTypeError, match="device must be cuda"):
        parse_device(word)


def test_arrays_on_two_devices_of_one_process(device, monkeypatch):
    """The input on one GPU, the result on another: refused before anything is sent."""
    torch = pytest.importorskip("torch")
    other = type("Other", (), {"__repr__": lambda _: "GPU 1"})()
    x, out = torch.ones(3), torch.ones(3)
    monkeypatch.setattr(call, "device_of", lambda array: other if array is out else device)
    with pytest.raises(ArgumentTypeError, match=r"out must be where x is, in GPU 0 .got 'GPU 1'"):
        run_loopback(1, lambda comm: mpizero.all_reduce(x, comm, out=out))


def test_threads_that_play_ranks_have_no_device(device):
    torch = pytest.importorskip("torch")
    with pytest.raises(mpizero.ArgumentError, match=r"an mpizero.Communicator for arrays in GPU memory"):
        run_loopback(2, lambda comm: mpizero.all_reduce(torch.ones(3), comm))


def test_cupy_has_the_functions_that_are_used():
    """Without a GPU CuPy's runtime cannot be called, but its names are there to be looked up."""
    runtime = pytest.importorskip("cupy.cuda.runtime")
    names = [name for name in vars(Runtime) if not name.startswith("_")]
    assert len(names) == 20
    assert [name for name in names if not callable(getattr(runtime, name, None))] == []
    assert [name for name in names if not callable(getattr(HostRuntime, name, None))] == []
