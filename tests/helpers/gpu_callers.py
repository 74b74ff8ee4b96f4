"""Late callers on a real GPU, for helpers/device_contracts.py: torch's and CuPy's arrays, on streams of their own.

Just before an input is written, and just before a result is read, the stream sleeps. So work that does not wait for the
stream reads what was there before, and a result that the stream does not wait for is read too early.
"""

from contextlib import contextmanager

import torch
from helpers import device_contracts as contracts

import mpizero
from mpizero.arrays import parse_device

SLEEP = 400_000
"""Cycles, about 0.2 ms: several times as long as a kernel's launch, in each of hundreds of calls."""


class Lacking:
    """A runtime with less memory than the device has, or whose IPC is refused."""

    def __init__(self, runtime, *, room=None, ipc=True):
        self._runtime, self._room, self._ipc = runtime, room, ipc

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def malloc(self, size):
        if self._room is not None:
            if size > self._room:
                raise RefusedError(2, "cudaErrorMemoryAllocation: out of memory")
            self._room -= size
        return self._runtime.malloc(size)

    def ipcOpenMemHandle(self, handle):  # noqa: N802  (CuPy's name)
        if not self._ipc:
            raise RefusedError(400, "cudaErrorInvalidResourceHandle: invalid resource handle")
        return self._runtime.ipcOpenMemHandle(handle)


class RefusedError(RuntimeError):
    """What CuPy's runtime raises: an error with CUDA's number."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Caller:
    copies = None

    def __init__(self, number):
        self.number, self.device = number, parse_device(number)

    def packing(self):
        pass

    @contextmanager
    def lacking(self, **options):
        runtime = self.device.runtime
        self.device.runtime = Lacking(runtime, **options)
        try:
            yield
        finally:
            self.device.runtime = runtime

    def room(self, nbytes):
        return self.lacking(room=nbytes)

    def without_ipc(self, *, wanted):
        return self.lacking(ipc=not wanted)


class TorchCaller(Caller):
    dtypes = contracts.DTYPES

    @contextmanager
    def working(self):
        with torch.cuda.stream(torch.cuda.Stream(self.number)):
            yield self

    def tensor(self, values):
        x = torch.full(values.shape, 77, dtype=values.dtype, device=f"cuda:{self.number}")
        self.fill(x, values)
        return x

    def fill(self, x, values):
        there = values.to(x.device)
        torch.cuda._sleep(SLEEP)
        x.copy_(there)

    def like(self, x):
        return torch.empty_like(x)

    def empty(self, count, dtype, comm):
        return mpizero.empty(count, dtype, comm, device="cuda")

    def seen(self, x):
        torch.cuda._sleep(SLEEP)
        found = x.clone()
        x.fill_(88)  # while the collective may still be reading it on another rank, which it must not
        x.copy_(found)
        return found.cpu()


class CupyCaller(Caller):
    dtypes = (torch.float32, torch.float16, torch.float64, torch.int32, torch.uint8)
    """CuPy has no bfloat16."""

    @contextmanager
    def working(self):
        import cupy

        self.cupy = cupy
        with cupy.cuda.Stream(non_blocking=True) as self.stream:
            yield self

    def sleep(self):
        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr, device=self.number)):
            torch.cuda._sleep(SLEEP)

    def tensor(self, values):
        x = self.cupy.full(tuple(values.shape), 77, values.numpy().dtype)
        self.fill(x, values)
        return x

    def fill(self, x, values):
        there = self.cupy.asarray(values.numpy())
        self.sleep()
        self.cupy.copyto(x, there)

    def like(self, x):
        return self.cupy.empty_like(x)

    def empty(self, count, dtype, comm):
        return mpizero.empty(count, str(dtype).removeprefix("torch."), comm, device="cuda")

    def seen(self, x):
        self.sleep()
        return torch.from_numpy(self.cupy.asnumpy(x.copy()))


CALLERS = {"torch": TorchCaller, "cupy": CupyCaller}
