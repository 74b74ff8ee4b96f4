"""Processes that a rank has started, and that are no ranks: they must call no collective, and end without MPI.

[Note: children of a rank] A forked child has a copy of everything: communicators that still speak, the hooks that end
the job, what is to be done at exit. MPI knows the parent alone. A collective of the child would take the parent's
messages, or wait for ever. `MPI_Finalize` at the child's end hangs on Open MPI, and breaks the job on MPICH (tried). So
from the fork on every communicator refuses, by a flag, which needs no MPI; the hooks that abort the job are taken off;
and a child that comes to the end of its Python leaves by `os._exit`, ahead of whatever its parent has registered for
its own exit: MPI's end, the removal of files, the records of who left. Children of `multiprocessing` leave in that way
anyhow.

A child that is started anew (spawn, forkserver) and imports the script again finds in its environment what the launcher
gave to its parent. If it started MPI, it would do so in the parent's name; so it may not.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from functools import cache
from typing import Any, NoReturn, Protocol

from mpizero.errors import CollectiveError, LaunchError

__all__ = ["Gone", "LeftBehind", "check_may_start", "refuse_in_child", "tell_in_child"]

_ABORT = "mpizero.comm.abort"
"""The module whose hooks end the job."""
_REMEDY = (
    "MPI knows the parent alone: let the child, a DataLoader's worker for one, give its results to the parent, and "
    "call the collective there"
)


class LeftBehind(Protocol):
    """Be what has to be told that this process is a forked child."""

    def leave_behind(self) -> None:
        """Never use MPI, or memory that other ranks watch, again."""
        ...


class Gone:
    """Stand in a child for what only the parent may use: every use of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise CollectiveError."""
        refuse_in_child(name)


class _Family:
    """Know what a fork leaves behind, and how the child's Python ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.forked = False
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._code: Any = None
        os.register_at_fork(after_in_child=self._begin_child)

    def _begin_child(self) -> None:
        self.forked = True
        for one in list(self.watched):
            one.leave_behind()
        excepthook = sys.__excepthook__ if _ends_the_job(sys.excepthook) else sys.excepthook
        if _ends_the_job(threading.excepthook):
            threading.excepthook = threading.__excepthook__
        exit_of_python = sys.exit

        def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._code = 1
            excepthook(kind, error, trace)

        def leave(code: Any = None) -> NoReturn:
            self._code = code
            exit_of_python(code)

        sys.excepthook, sys.exit = show, leave
        atexit.register(self._end_child)

    def _end_child(self) -> None:
        """Leave at once. A `SystemExit` that was raised without `sys.exit` counts as 0: nothing tells its code here."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        code = self._code
        os._exit((0 if code is None else code if isinstance(code, int) else 1) & 0xFF)


@cache
def _family() -> _Family:
    return _Family()


def tell_in_child(one: LeftBehind) -> None:
    """Have `one.leave_behind()` called in every child that this process forks from now on; holds it weakly."""
    _family().watched.add(one)


def refuse_in_child(what: str) -> NoReturn:
    """Raise CollectiveError for a use in a forked child."""
    raise CollectiveError(
        f"{what}: the caller must be the process that is the rank (got process {os.getpid()}, a fork of the rank's "
        f"process {_family().pid}): {_REMEDY}"
    )


def check_may_start() -> None:
    """Refuse to start, or to use, MPI in a child of a rank; see [Note: children of a rank].

    Raises:
        CollectiveError: in a forked child of a process that has used a communicator.
        LaunchError: in a child that `multiprocessing` has started anew inside an MPI job.
    """
    if _family.cache_info().currsize and _family().forked:
        refuse_in_child("MPI")
    processes = sys.modules.get("multiprocessing.process")
    if processes is None:
        return
    here = processes.current_process()
    # The parent is known only after the child has imported the script again; a name, or this mark, before.
    started = here.name != "MainProcess" or getattr(here, "_inheriting", False)
    from mpizero.comm.launch import under_launcher

    if started and (under_launcher() or 1) > 1:
        raise LaunchError(
            f"a process that starts MPI must be one that the launcher has started (got {here.name!r}, a child that "
            "multiprocessing has started): in the script, put all but imports and definitions under "
            "`if __name__ == '__main__':`, and call no collective in a worker"
        )


def _ends_the_job(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _ABORT
