"""The communicator of a group, whose background work is done by whoever has time for it.

The progress thread moves collectives while the caller computes, and naps between its looks, so as not to take the core
from the computation. A caller that waits has nothing to compute: it goes on with the work itself, from where the thread
has brought it. An asynchronous collective that is waited for at once costs little more than a synchronous one this way,
which is also how a torch that does not tell a group whether the caller waits (before 2.8 or so) gets its results.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mpizero.comm import Communicator
from mpizero.comm import Work as Job
from mpizero.comm.progress import Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.typing import Wait

__all__ = ["GroupCommunicator"]


class GroupCommunicator(Communicator):
    """Be a communicator whose asynchronous collectives the progress thread and the waiting caller share."""

    def _make_queue(self) -> Queue:
        return _Shared()

    def _work(self, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None) -> Job:
        return _SharedJob(self._queue, steps, result, then)


class _SharedJob(Job):
    """Be one collective under way, which its `wait` helps along."""

    def __init__(
        self, shared: Queue, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None = None
    ) -> None:
        super().__init__(steps, result, then=then)
        self._shared = shared

    def wait(self) -> Any:
        """Go on with the collective, and with those before it, and return its result."""
        if not self.done():
            self._shared.run_to(self)
        return super().wait()


class _Shared(Queue):
    """Be a queue that one thread at a time goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def advance(self) -> bool:
        """Advance the first job, unless a caller is at it. For the progress thread, which must not block."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return super().advance()
        finally:
            self._lock.release()

    def run_to(self, work: Job) -> None:
        """Finish the jobs up to and with `work`. For a caller that waits."""
        with self._lock:
            super().run_to(work)
