"""What benchmarks/collectives measures in ranks beside bin/*_perf; rank 0 prints one line of JSON.

memory NBYTES BUFFER    bytes by which a rank's memory grows with its first all-reduce, the mean over ranks
links                   what was timed of the links, and the speed of adding and copying
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import mpizero as mz

ROUNDS = 15
BLOCK = 1 << 20


def memory(nbytes: int, buffer: str) -> dict:
    """Measure what an all-reduce needs beside its array: proportional set size, in which a shared page counts once."""
    comm = mz.world()
    mz.barrier()  # loads the modules, which are no scratch
    make = mz.empty if buffer == "symmetric" else np.empty
    x = make((nbytes // 4,), "float32")
    x[:] = 1
    comm.mpi.Barrier()
    before = comm.mpi.allreduce(pss())
    comm.mpi.Barrier()
    mz.all_reduce(x)
    comm.mpi.Barrier()
    grown = (comm.mpi.allreduce(pss()) - before) / comm.size
    return {"grown": grown, "right": bool((x == comm.size).all())}


def pss() -> int:
    """Return this process's proportional set size in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE).group(1)) << 10


def links() -> dict:
    """Measure the numbers that the cost model wants."""
    comm = mz.world()
    found = dict(comm.notes["links"])  # timed when the communicator was made
    x, y = np.ones(BLOCK // 4, np.float32), np.ones(BLOCK // 4, np.float32)
    found["gamma"] = repeated(lambda: np.add(x, y, out=x)) / BLOCK
    found["copy"] = repeated(lambda: np.copyto(x, y)) / BLOCK
    return found


def repeated(call) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Read the command line and measure."""
    found = links() if sys.argv[1] == "links" else memory(int(sys.argv[2]), sys.argv[3])
    if mz.world().rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
