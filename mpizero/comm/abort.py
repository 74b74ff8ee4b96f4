"""One rank's uncaught exception ends the whole job.

Without this the other ranks of a plain `mpirun python script.py` wait for ever for a rank that has already died: MPI
only ends a job when a process exits without having called MPI_Finalize, and mpi4py calls it at exit.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from mpizero.comm.raw import mpi
from mpizero.comm.record import DIED, STOPPED, conclude

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["abort", "install_abort_hooks"]

HANDED_ON = 0.05
"""Seconds for the launcher to hand on what was said: MPICH's ends with a job, and drops what is still in its pipes."""
_MARK = "_mpizero_abort_hook"
SHORT = 200
"""Characters of an error that comes after another rank's."""


def abort(code: int) -> None:
    """End every rank of the job at once with the exit code `code`."""
    conclude(STOPPED, f"abort({code})")
    time.sleep(HANDED_ON)
    mpi().COMM_WORLD.Abort(code)
    os._exit(code)  # an MPI whose Abort returns must not let this rank go on


def install_abort_hooks(told: Callable[[], bool]) -> None:
    """Make an uncaught exception, in any thread, print its traceback with rank and host and abort the job.

    Called with the first communicator of more than one rank, not at import. `MPIZERO_ABORT=0` leaves Python's hooks as
    they are. A hook of the user's that was installed before still runs, ahead of the abort.

    Args:
        told: whether another rank has already said why the job ends: this one is short then.
    """
    if getattr(sys.excepthook, _MARK, False):
        return
    previous, previous_in_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if previous is not sys.__excepthook__:
                previous(kind, error, trace)
        finally:
            _end(error, told)

    def hook_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:  # ends a thread without a word, as Python does
            return
        try:
            if previous_in_thread is not threading.__excepthook__:
                previous_in_thread(args)
        finally:
            _end(args.exc_value, told)

    setattr(hook, _MARK, True)
    sys.excepthook = hook
    threading.excepthook = hook_in_thread


def _end(error: BaseException | None, told: Callable[[], bool]) -> None:
    """Print the traceback in one write, so that the ranks' texts do not mix, and abort, whatever fails on the way."""
    try:
        cause = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        world = mpi().COMM_WORLD
        who = f"mpizero: rank {world.rank} of {world.size} on {socket.gethostname()} raised"
        shown = f"{who} too: {cause[:SHORT]}\n" if told() else f"{who}; ending the job\n{text}"
        conclude(DIED, cause)
        os.write(2, shown.encode(errors="replace"))
        sys.stdout.flush()
    finally:
        abort(1)
