"""Ranks of benchmarks/strict: short all-reduces with strict mode on and off in turn, and with and without a record."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

import mpizero as mz
from mpizero.comm import About
from mpizero.comm.describe import machine
from mpizero.comm.door import Door
from mpizero.comm.health import Health
from mpizero.comm.progress import Queue
from mpizero.comm.voice import Voice

BYTES = (64, 16 << 10)


def seconds(call, times: int, clock=time.perf_counter) -> float:
    """Return the seconds of one call, of many in a row."""
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def strict_rounds(comm, nbytes: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return microseconds per call by mode, of the slowest rank, a value per round."""
    x = np.zeros(nbytes // 4, np.float32)
    found: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(rounds):
        for mode in ("off", "on") if turn % 2 else ("on", "off"):
            comm.compare(on=mode == "on")
            seconds(lambda: mz.all_reduce(x, comm), calls // 10)
            comm.mpi.Barrier()
            mine = seconds(lambda: mz.all_reduce(x, comm), calls)
            found[mode].append(1e6 * max(comm.mpi.allgather(mine)))
    comm.compare(on=False)
    return found


def record_rounds(comm, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return microseconds of the processor for what every collective begins and ends with, on rank 0 alone."""
    what = About("all_reduce", "all_reduce(16 elements of float32, op sum)", nbytes=64, algorithm="loads")
    doors = {"on": comm, "off": Door(0, Voice(), Health(), Queue(), None)}
    found: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        for mode, door in doors.items():

            def call(door=door) -> None:
                door.enter(what)
                door.leave()

            found[mode].append(1e6 * seconds(call, calls, time.process_time))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()
    world = mz.world(strict=False)
    strict = {nbytes: strict_rounds(world, nbytes, args.rounds, args.calls) for nbytes in BYTES}
    alone = mz.Communicator(world.mpi, strict=False)  # on which one rank may call what the others do not
    record = record_rounds(alone, args.rounds, 10 * args.calls) if world.rank == 0 else {}
    over = world.mpi.Ibarrier()
    while not over.Test():
        time.sleep(0.01)  # a wait that takes no core from rank 0
    if world.rank == 0:
        found = {"ranks": world.size, "strict": strict, "record": record, "machine": machine()}
        args.file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
