"""Whether the job was asked to stop: a signal that came to any rank, agreed on by all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.collectives.call import default_communicator
from mpizero.collectives.verbs import all_reduce
from mpizero.comm.signals import stop_signal

__all__ = ["stop_requested"]

NOTE = "stop_requested"


def stop_requested(comm: Any = None) -> bool:
    """Return whether any rank has got SIGUSR1 by now: the same answer on all ranks. Collective.

        if mz.stop_requested():
            mz.save("run/step-1000", model, optimizer, extra={"step": 1000})
            break

    Schedulers send SIGUSR1 some time before they end a job (Slurm's `--signal`), and mpirun, `mzrun` and srun pass it
    on to the ranks, where it ends the program unless there is a handler. The first call installs one, and one for
    SIGTERM that writes a line with the rank, the host and what it was doing, and then ends the rank as before.
    A program's own handler of either signal stays; a SIGUSR1 that it takes is not seen here. Once True, the answer
    stays True.

    Args:
        comm: the communicator; None means `mpizero.world()`.

    Raises:
        ArgumentError: if the first call of the program is not made in the main thread.
        CollectiveError, CollectiveTimeoutError: as of the verbs.

    Costs an all-reduce of 4 bytes: among the ranks of a host some microseconds, over
    messages log2(p) of them, and as everywhere the wait for the slowest rank. Call it once per step or less.
    """
    stop = stop_signal()
    comm = default_communicator(comm)
    word = comm.notes.setdefault(NOTE, np.zeros(1, np.int32))
    word[0] |= stop.came
    return bool(all_reduce(word, comm, op="max")[0])
