"""What the programs that `bin/gpucheck` starts in ranks have in common: where, how often, and what they write."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpizero.arrays import dtype_named, from_device_memory
from mpizero.bench.calls import Job, arrays_of, verb
from mpizero.bench.cases import COPIES, Case, Plan
from mpizero.bench.results import write_json
from mpizero.bench.timing import Loop, Measured, measure
from mpizero.bench.versus import Mpi4py
from mpizero.bench.wires import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.arrays import Device, DeviceArray
    from mpizero.bench.place import DevicePlace

__all__ = ["Figure", "Run", "Sizes", "options_of", "write_figures"]

ROOM = 0.7
"""The part of a GPU's free memory that a measurement may take."""
BATCH = 5
"""Launches between two looks at the clock, so that what starts and ends a kernel does not count."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Hold one measured figure."""

    name: str
    """A key of `gpu_bars.BARS`."""
    value: float | None
    """None where it could not be measured."""
    how: str
    """What was divided by what, of how many bytes, on how many ranks; or why there is no value."""
    limit_seconds: float | None = None
    """What the time is held against."""
    wrong: int | None = None
    """Wrong elements in all results, None where there are none to check."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Say how large and how often."""

    loads: int = 1 << 30
    staged: int = 256 << 20
    against: tuple[int, ...] = (64 << 20, 256 << 20)
    kernels: int = 1 << 30
    iterations: int = 10
    seconds: float = 3.0
    """That the iterations of one measurement may take, about."""


TINY = Sizes(loads=1 << 18, staged=20 << 20, against=(1 << 18,), kernels=1 << 18, iterations=3, seconds=1.0)
"""For the device that the host plays."""


class Run:
    """Measure on the ranks of a job."""

    def __init__(self, comm: Any, place: DevicePlace, *, stand_in: bool) -> None:
        """Make a communicator per wire. Collective."""
        self.comm, self.place, self.stand_in = comm, place, stand_in
        self.device: Device = place.device
        self.sizes = TINY if stand_in else Sizes()
        self.wires = Wires(comm, self.device, ("loads", "staged"))
        self.plan = Plan(operation="all_reduce", sizes=())

    def fitting(self, nbytes: int, buffers: int) -> int:
        """Return `nbytes`, halved until the ranks' buffers of that size, so many in all, fit in the GPU. Collective."""
        if self.stand_in:
            return nbytes
        import torch

        torch.cuda.empty_cache()
        free = min(self.comm.mpi.allgather(torch.cuda.mem_get_info(self.device.number)[0]))
        while nbytes * buffers > ROOM * free and nbytes > 1 << 20:
            nbytes //= 2
        return nbytes

    def time(self, algorithm: str, wire: str, buffer: str, nbytes: int) -> Measured:
        """Return the times of an all-reduce of fp32, checked. Collective.

        Args:
            algorithm: auto, loads, native, or mpi4py for the plain call.
            wire: loads or staged, or `COPIES` for mpi4py.
            buffer: private or symmetric.
            nbytes: of each rank's array.
        """
        case = Case(operation="all_reduce", algorithm=algorithm, buffer=buffer, prepared=False, dtype="float32",
                    op="sum", count=nbytes // 4, nbytes=nbytes, wire=wire)  # fmt: skip
        comm = self.wires.comm(wire)
        arrays = arrays_of(case, comm, self.place)
        job = Job(case, self.plan, arrays, comm, place=self.place)
        if wire == COPIES:
            job.call = Mpi4py(comm, self.place).call(case, self.plan, arrays)
        else:
            job.call = self.place.settled(verb(case, self.plan, arrays, comm))
        return measure(job, self._loop(check=True), self.comm)

    def random(self, nbytes: int) -> DeviceArray:
        """Return new plain device memory that holds random numbers: nothing is to be quick because of zeros."""
        memory = self.device.allocate(nbytes)
        tensor = from_device_memory(memory, (nbytes // 4,), dtype_named("float32"), "torch")
        tensor.uniform_()
        self.place.settle()
        return memory

    def together(self, call: Callable[[], Any]) -> float:
        """Return the median of the seconds of a call that all ranks make, of the slowest each time. Collective."""
        return statistics.median(measure(_Bare(call), self._loop(check=False), self.comm).times)

    def alone(self, launch: Callable[[int], None]) -> float:
        """Return the median seconds of what rank 0 launches on a stream while the others wait. Collective.

        Args:
            launch: queues the work on the stream whose handle it is given; called on rank 0 alone.
        """
        seconds = _median_of_batches(launch, self.place, self.sizes) if self.comm.rank == 0 else 0.0
        self.comm.mpi.Barrier()
        found: float = self.comm.mpi.bcast(seconds)
        return found

    def _loop(self, *, check: bool) -> Loop:
        return Loop(warm_up=2, iterations=self.sizes.iterations, check=check, budget=self.sizes.seconds)


class _Bare:
    """Be a call without data of its own to rewrite or to check."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def rewrite(self, iteration: int) -> None:
        """Leave the data."""

    def wrong(self, iteration: int) -> int:
        """Return 0."""
        _ = iteration
        return 0


def _median_of_batches(launch: Callable[[int], None], place: DevicePlace, sizes: Sizes) -> float:
    def batch(launches: int) -> float:
        start = time.perf_counter()
        for _ in range(launches):
            launch(place.stream.handle)
        place.stream.record().synchronize()
        return (time.perf_counter() - start) / launches

    batch(2)
    return statistics.median(batch(BATCH) for _ in range(sizes.iterations))


def write_figures(path: str, figures: list[Figure]) -> None:
    """Write what has been measured so far, whole or not at all: a program that is stopped leaves what it had."""
    write_json({"figures": [asdict(figure) for figure in figures]}, path)


def options_of(prog: str, about: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a program that measures figures."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--json", required=True)
    parser.add_argument("--stand-in", action="store_true")
    return parser.parse_args(argv)
