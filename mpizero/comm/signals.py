"""What a rank does when the scheduler signals: SIGUSR1 comes ahead of the end of its time, SIGTERM at the end.

[Note: last words] From SIGTERM Open MPI leaves 0.25 s until SIGKILL, and sends both to all ranks as soon as one dies;
MPICH and Intel MPI pass SIGTERM on and leave all the time that the rank takes, but kill at once where a rank dies
(tried: Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.18). Python calls its handlers between two lines of the main
thread, which may be in a matrix product or an MPI call for longer than that, with MPICH for ever. So the signal's
number also goes through Python's wake-up pipe to a thread, and whichever of the two runs first writes the line and ends
the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.comm.raw import mpi
from mpizero.comm.record import STOPPED, conclude
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["StopSignal", "stop_signal"]

PACKAGE = str(Path(__file__).parent.parent) + os.sep
LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep, "<")


class StopSignal:
    """Remember whether SIGUSR1 has come; be its handler."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Note that the signal has come."""
        self.came = True


@cache
def stop_signal() -> StopSignal:
    """Return what remembers SIGUSR1. The first call installs the handlers, the later ones give the same object.

    SIGUSR1 is noted, and ends the rank no more; one that hpc/bind.sh has held back since the start comes now. SIGTERM
    ends it as before, after a line on stderr that has the rank, the host, and where in the program it was; see [Note:
    last words]. A signal for which the program has a handler, or which it ignores, is left to it.

    Raises:
        ArgumentError: if the first call is not made in the main thread, which alone may install handlers.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        rule = "the main one, since only that may install signal handlers"
        remedy = "make the first call there, before other threads make theirs"
        raise ArgumentError(must_be("the thread of the first mpizero.stop_requested()", rule, thread.name, remedy))
    stop = StopSignal()
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        LastWords().install()
    return stop


class LastWords:
    """Write one line when SIGTERM comes, then let it end the process."""

    def __init__(self) -> None:
        world = mpi().COMM_WORLD
        self._who = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        self._once = threading.Lock()
        self._wakes = -1

    def install(self) -> None:
        """Take SIGTERM; for the main thread."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        previous = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if previous == -1:
            threading.Thread(target=self._listen, args=(reads,), name="mpizero-sigterm", daemon=True).start()
        else:  # an event loop's: it keeps it, and the main thread has to do
            signal.set_wakeup_fd(previous)
            os.close(reads)
            os.close(writes)
            writes = -1
        self._wakes = writes
        signal.signal(signal.SIGTERM, self._handle)
        os.register_at_fork(after_in_child=self._leave_to_child)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        self._end(frame)

    def _listen(self, reads: int) -> None:
        while True:
            # Numbers of all signals with Python handlers come here, SIGTERM's too if the program has taken it since.
            if signal.SIGTERM in os.read(reads, 64) and self._installed():
                self._end(sys._current_frames().get(threading.main_thread().ident or 0))  # noqa: SLF001  (documented)

    def _installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _end(self, frame: FrameType | None) -> None:
        if not self._once.acquire(blocking=False):
            return
        try:
            text = f"got SIGTERM and ends; it was {whereabouts(frame)}"
            os.write(2, f"mpizero: {self._who} {text}\n".encode(errors="replace"))
            conclude(STOPPED, text)
        finally:
            # Python's own `signal` is for the main thread alone.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave_to_child(self) -> None:
        """Give a forked child its SIGTERM back: it is no rank, and the pipe that it inherits is read by its parent."""
        if self._installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            previous = signal.set_wakeup_fd(-1)
            if previous != self._wakes:
                signal.set_wakeup_fd(previous)


def whereabouts(frame: FrameType | None) -> str:
    """Return file, line and function of the program's own innermost call, and which of mpizero's calls it has made."""
    inner = innermost = ""
    while frame is not None:
        code = frame.f_code
        place = f"at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if code.co_filename.startswith(PACKAGE):
            if code.co_filename != __file__:
                innermost, inner = innermost or place, f", in mpizero's {code.co_name}"
        elif not code.co_filename.startswith(LIBRARIES):
            return place + inner
        frame = frame.f_back
    return innermost or "in no code of the program's"
