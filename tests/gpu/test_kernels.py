"""The kernels' bits on a real GPU against numpy's: every element type, every operation. In one rank alone."""

import numpy as np
import pytest
from helpers.cuda_text import OPS, takes
from helpers.reductions import Memory, accumulated, check_same, values_of

from mpizero.arrays import DTYPES, View, parse_device
from mpizero.errors import DeviceMemoryError

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

AROUND = 256
KINDS = [(name, op) for name, dtype in DTYPES.items() for op in (*OPS, "copy") if takes(dtype, op)]
SHAPES = ((1, (0, 0, 0)), (1001, (1, 3, 2)), (40_001, (0, 0, 0)), (70_003, (5, 5, 5)))
"""Elements, and how many elements after a multiple of 64 bytes the arrays begin."""


@pytest.fixture
def device(world, gpu):
    if world.size > 1:
        pytest.skip("one rank says it all")
    return parse_device(gpu)


class Twin:
    """An array of a `Memory` on the device, between guard bytes as there."""

    def __init__(self, memory, device, stream, offset):
        self.memory, self.device, self.stream = memory, device, stream
        self.start = AROUND + offset * memory.dtype.itemsize
        self.stop = self.start + memory.data.nbytes
        self.bytes = np.full(self.stop + AROUND, memory.guard, np.uint8)
        self.bytes[self.start : self.stop] = memory.data.view(np.uint8)
        self.there = device.allocate(self.bytes.nbytes)
        device.copy(self.there, self.bytes, stream)
        self.view = View(self.there[self.start : self.stop].view(memory.dtype.storage), memory.dtype)

    def fetch(self):
        """Copy what is there into the `Memory`, and look at the guards."""
        self.device.copy(self.bytes, self.there, self.stream)
        self.stream.record().synchronize()
        self.memory.data.view(np.uint8)[:] = self.bytes[self.start : self.stop]
        around = np.concatenate([self.bytes[: self.start], self.bytes[self.stop :]])
        assert (around == self.memory.guard).all()


def check(device, op, names, shape, divisor=1):
    """Reduce arrays of the types `names`, the target's last."""
    count, offsets = shape
    rng, stream = np.random.default_rng(count), device.stream()
    memories = [Memory(name, values_of(DTYPES[name], count, rng)) for name in names]
    twins = [Twin(memory, device, stream, offsets[at % 3]) for at, memory in enumerate(memories)]
    *sources, target = twins
    device.kernels.reduce(op, [target.view], [twin.view for twin in sources], divisor, stream.handle)
    want = accumulated(op, [memory.host for memory in memories[:-1]], names[-1], divisor)
    target.fetch()
    check_same(memories[-1].host, want, op)


@pytest.mark.parametrize(("name", "op"), KINDS)
def test_bits_are_those_of_numpy(device, name, op):
    for shape in SHAPES:
        check(device, op, [name] * (2 if op == "copy" else 3), shape)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_many_sources_means_and_wide_partners(device, name):
    for number in (3, 8):
        check(device, "sum", [name] * (number + 1), SHAPES[1])
        check(device, "mean", [name] * (number + 1), SHAPES[2], divisor=number)
    if name != "float32":
        check(device, "sum", [name, "float32", name], SHAPES[1])
        check(device, "sum", [name, name, "float32"], SHAPES[2])
        check(device, "copy", ["float32", name], SHAPES[3])


def test_in_place_and_into_several(device):
    stream = device.stream()
    memories = [Memory("float32", np.arange(5003, dtype=np.float32) + at) for at in range(2)]
    twins = [Twin(memory, device, stream, 0) for memory in memories]
    views = [twin.view for twin in twins]
    device.kernels.reduce("sum", views, views, 1, stream.handle)
    for twin in twins:
        twin.fetch()
        assert (twin.memory.data == 2 * np.arange(5003) + 1).all()


@pytest.mark.parametrize(("offsets", "nbytes"), [((0, 0), 100_000), ((5, 5), 1003), ((3, 11), 4099), ((1, 0), 17)])
def test_moved_bytes_arrive_and_no_others(device, offsets, nbytes):
    rng, stream = np.random.default_rng(nbytes), device.stream()
    memories = [Memory("uint8", rng.integers(0, 256, nbytes, dtype=np.uint8)) for _ in range(80)]
    twins = [Twin(memory, device, stream, offsets[at % 2]) for at, memory in enumerate(memories)]
    runs = [
        (source.view.data.address, target.view.data.address, nbytes)
        for source, target in zip(twins[::2], twins[1::2], strict=True)
    ]
    device.kernels.move(runs, stream.handle)
    for source, target in zip(twins[::2], twins[1::2], strict=True):
        wanted = source.memory.data.copy()
        target.fetch()
        assert (target.memory.data == wanted).all()


def test_more_than_the_device_has_is_an_error_that_says_so(device):
    with pytest.raises(DeviceMemoryError, match="bytes free"):
        device.allocate(1 << 50)
    assert device.allocate(1 << 20).nbytes == 1 << 20
