"""The figures of `bin/gpucheck` on speed: started in ranks that share one GPU, rank 0 writes what was measured.

Every figure is a ratio of two times of one run, so that it holds beside its own limit: a machine that is slow that day
is slow in both.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero as mz
from mpizero.arrays import View, dtype_named
from mpizero.bench.cases import COPIES
from mpizero.bench.gpu_run import Figure, Run, options_of, write_figures
from mpizero.bench.place import DevicePlace, place_of
from mpizero.bench.progress import mib
from mpizero.collectives.schedule import even_offsets
from mpizero.collectives.staged import SLOT, SLOTS
from mpizero.errors import MpiZeroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpizero.arrays import DeviceArray

__all__ = ["main"]

MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, return the exit code: 1 for wrong results. Collective.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    options = options_of("mpizero.bench.gpu_figures", __doc__, argv)
    figures: list[Figure] = []
    with place_of("stand-in" if options.stand_in else "cuda") as place:
        assert isinstance(place, DevicePlace)  # noqa: S101
        run = Run(mz.world(), place, stand_in=options.stand_in)
        for measured in _all(run):
            figures += measured
            if run.comm.rank == 0:
                write_figures(options.json, figures)
        run.wires.close()
    return 1 if any(figure.wrong for figure in figures) else 0


def _all(run: Run) -> Iterator[list[Figure]]:
    """Measure one after the other; what cannot be had is a figure without a value, with the reason."""
    parts: list[tuple[str, Callable[[Run], list[Figure]]]] = [(f"loads-{run.comm.size}", loads)]
    if run.comm.size == 2:
        parts += [("kernel-sum-float32", kernels), ("against-64M", against_native), ("staged", staged)]
    for name, part in parts:
        yield _tried(run, name, part)


def _tried(run: Run, name: str, part: Callable[[Run], list[Figure]]) -> list[Figure]:
    try:
        return part(run)
    except MpiZeroError as error:  # raised alike on all ranks
        return [Figure(name=name, value=None, how=str(error))]


def loads(run: Run) -> list[Figure]:
    """Hold an all-reduce of symmetric buffers against the same kernels on the same bytes in one process."""
    size, name = run.comm.size, f"loads-{run.comm.size}"
    if "loads" in run.wires.refused:
        return [Figure(name=name, value=None, how=run.wires.refused["loads"])]
    nbytes = run.fitting(run.sizes.loads, 2 * size + 1)
    ours = run.time("loads", "loads", "symmetric", nbytes)
    median = statistics.median(ours.times)
    alone = run.alone(_same_work(run, nbytes) if run.comm.rank == 0 else _nothing)
    how = f"{_ms(alone)} over {_ms(median)}; {mib(nbytes)} a rank, {size} ranks; median of {len(ours.times)}"
    return [Figure(name=name, value=alone / median, how=how, limit_seconds=alone, wrong=ours.wrong)]


def _same_work(run: Run, nbytes: int) -> Callable[[int], None]:
    """Return what queues the kernels of all ranks, on as many buffers: each chunk of all read, summed, and written."""
    size, dtype = run.comm.size, dtype_named("float32")
    memory = [run.random(nbytes).view(np.float32) for _ in range(size)]
    cuts = even_offsets(nbytes // 4, size)
    chunks = [[View(each[low:high], dtype) for each in memory] for low, high in pairwise(cuts)]

    def launch(stream: int) -> None:
        for chunk in chunks:
            run.device.kernels.reduce("sum", chunk, chunk, 1, stream)

    return launch


def kernels(run: Run) -> list[Figure]:
    """Hold the kernels, in one process, against cudaMemcpyAsync within the device."""
    nbytes = run.fitting(run.sizes.kernels, 3)
    memory = [run.random(nbytes) for _ in range(3)] if run.comm.rank == 0 else []
    copied = run.alone(partial(_copy, run, memory))
    found = []
    for op, name, num in (("sum", "float32", 2), ("sum", "bfloat16", 2), ("copy", "float32", 1)):
        seconds = run.alone(partial(_reduce, run, (op, name, num), memory))
        speed, limit = ((num + 1) * nbytes / seconds, 2 * nbytes / copied)
        how = f"{speed / 1e9:.0f} over {limit / 1e9:.0f} GB/s, read and written; {mib(nbytes)} an array"
        figure = Figure(
            name=f"kernel-{op}-{name}", value=speed / limit, how=how, limit_seconds=(num + 1) * nbytes / limit
        )
        found.append(figure)
    return found


def _copy(run: Run, memory: list[DeviceArray], stream: int) -> None:
    run.device.runtime.memcpyAsync(memory[1].address, memory[0].address, memory[0].nbytes, 3, stream)


def _reduce(run: Run, what: tuple[str, str, int], memory: list[DeviceArray], stream: int) -> None:
    op, name, num = what
    dtype = dtype_named(name)
    views = [View(each.view(dtype.storage), dtype) for each in memory]
    run.device.kernels.reduce(op, [views[2]], views[:num], 1, stream)


def against_native(run: Run) -> list[Figure]:
    """Hold loads on plain tensors against the faster of the MPI library's own ways through host copies.

    The one copies all bytes out, calls mpi4py, and copies all back; the other is `algorithm="native"`, in pieces.
    """
    found = []
    for nbytes in run.sizes.against:
        name = f"against-{nbytes // MIB}M" if not run.stand_in else "against-64M"
        if "loads" in run.wires.refused:
            return [Figure(name=name, value=None, how=run.wires.refused["loads"])]
        size = run.fitting(nbytes, 2 * run.comm.size)
        ways = {
            "plain tensors": run.time("loads", "loads", "private", size),
            "symmetric": run.time("loads", "loads", "symmetric", size),
            "copies": run.time("mpi4py", COPIES, "private", size),
            "native": run.time("native", "staged", "private", size),
        }
        times = {way: statistics.median(measured.times) for way, measured in ways.items()}
        limit = min(times["copies"], times["native"])
        shown = ", ".join(f"{way} {_ms(seconds)}" for way, seconds in times.items())
        how = f"{shown}; {mib(size)}, {run.comm.size} ranks; the faster of copies and native over plain tensors"
        wrong = sum(measured.wrong or 0 for measured in ways.values())
        figure = Figure(name=name, value=limit / times["plain tensors"], how=how, limit_seconds=limit, wrong=wrong)
        found.append(figure)
    return found


def staged(run: Run) -> list[Figure]:
    """Hold the pipelined all-reduce through the host against each of its three parts alone, in the same pieces."""
    nbytes = run.fitting(run.sizes.staged, 2 * run.comm.size)
    ours = run.time("auto", "staged", "private", nbytes)
    parts, pinned = _parts_of_staged(run, nbytes)
    times = {name: run.together(call) for name, call in parts.items()}
    median, limit = statistics.median(ours.times), max(times.values())
    shown = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in times.items())
    how = f"{_ms(median)} over the longest of: {shown}; {mib(nbytes)}, {run.comm.size} ranks"
    how += "" if pinned else "; the system page-locks no memory"
    return [Figure(name="staged", value=median / limit, how=how, limit_seconds=limit, wrong=ours.wrong)]


def _parts_of_staged(run: Run, nbytes: int) -> tuple[dict[str, Callable[[], Any]], bool]:
    """Return the three parts, each of all bytes, and whether the system page-locks the memory. Collective.

    Copies out, sums on the host, copies in: through slots of memory that the ranks share, as `Staged` does.
    """
    device, stream = run.device, run.place.stream
    there = run.random(nbytes)
    comm = run.wires.comm("staged")
    slots = mz.empty((SLOTS, SLOT), np.uint8, comm)
    slots[:] = 0
    pinned = device.pin(slots)
    pieces = [there[at : at + SLOT] for at in range(0, nbytes, SLOT)]
    here = [slots[at % SLOTS][: piece.nbytes] for at, piece in enumerate(pieces)]

    def out() -> None:
        for piece, slot in zip(pieces, here, strict=True):
            device.copy(slot, piece, stream)
        stream.record().synchronize()

    def back() -> None:
        for piece, slot in zip(pieces, here, strict=True):
            device.copy(piece, slot, stream)
        stream.record().synchronize()

    def host() -> None:
        for slot in here:
            mz.all_reduce(slot.view(np.float32), comm)

    return {"device to host": out, "sums on the host": host, "host to device": back}, pinned


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _nothing(stream: int) -> None:
    """Queue nothing: rank 0 does."""


if __name__ == "__main__":
    sys.exit(main())
