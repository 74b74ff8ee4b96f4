"""The progress thread: it runs collectives in the background, in order per communicator, several communicators at once.

A job is a collective's steps (see [Note: steps] in `waiting`). The thread polls the wait of the first job of every
communicator in turn, so that A then B on one rank and B then A on another cannot block each other, and MPI moves while
the caller computes. It starts with the first asynchronous call and sleeps while there is nothing to do.

[Note: driven by the caller] Loads and stores are work of a core, not of a wire: done in the background they would take
the core, and Python's lock, from the caller's computation at any moment. A queue may therefore be left to the caller,
who advances it between two computations (`progress`) and finishes it where a result is needed (`Work.wait`).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any

from mpizero.comm.waiting import drive, goes_on, tell_late
from mpizero.comm.watch import LOOK, look_around
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.typing import Wait

__all__ = ["NAP", "Queue", "Work", "engine"]

PASSES = 50
"""Rounds of polls without progress before the thread sleeps between them; a tenth of them on slow links."""
NAP = 30e-6
"""Seconds of the first such sleep; each is a quarter longer than the one before, up to the longest. The thread
holds Python's lock while it polls, and takes the core from the computation that it runs beside."""
LONGEST_NAP = 200e-6
SLOW_NAP = 2e-3
"""The longest sleep where messages go over slow links, whose buffers keep the wire busy for longer than that; the first
is a quarter of it. A look at some hundred requests takes a tenth of a millisecond of the core that computes."""

GRACE = 5.0
"""Seconds that the thread has to end when the interpreter does."""


class Work:
    """Be one collective under way; its buffers belong to it until it is done."""

    def __init__(
        self,
        steps: Iterator[Wait] | None,
        result: Any,
        queue: Queue | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Hold the steps of a collective.

        Args:
            steps: the steps; None where they have been taken.
            result: what it gives.
            queue: the one that its caller drives, if so.
            then: called by `wait` before it returns.
        """
        self._steps = steps
        self._then = then
        self._result = result
        self._queue = queue
        self.ended = 0.0
        """When it was over, in seconds of `time.perf_counter`; 0 before."""
        self._current: Wait | None = None
        self._since = 0.0
        self._patience = 1
        """By how many time-outs a wait has to be late to be told; see `MPIZERO_ON_TIMEOUT`."""
        self.error: BaseException | None = None
        """What ended it, if that was an error."""
        self.told: Callable[[BaseException | None], None] | None = None
        """Called when it is over, with what ended it if that was an error."""
        self._over = threading.Event()

    @classmethod
    def finished(cls, result: Any, then: Callable[[], None] | None = None) -> Work:
        """Return work that is done."""
        work = cls(None, result, then=then)
        work._over.set()
        return work

    @property
    def driven_by_caller(self) -> bool:
        """Return whether no thread drives it; see [Note: driven by the caller]."""
        return self._queue is not None

    def done(self) -> bool:
        """Return whether the collective is over, well or not; never blocks.

        A result in device memory may still be on its way then: `wait` puts the caller's stream behind it.
        """
        return self._over.is_set()

    def wait(self) -> Any:
        """Return the collective's result once it is over.

        Raises:
            Exception: what the collective raised, `CollectiveTimeoutError` for one.
        """
        if self._queue is not None:
            self._queue.run_to(self)
        while not self._over.wait(0.1):  # by pieces, so that signals are served
            pass
        if self.error is not None:
            raise self.error
        if self._then is not None:
            self._then()
        return self._result

    def give_up(self, late: BaseException) -> None:
        """End it if it has to wait, since an earlier collective of its queue did so in vain; for `Queue`."""
        if self._current is not None and not self._current.done():
            self._current.settle(0.0, finished=False)
            text = f"an earlier collective on the communicator was given up, which this one had to wait for: {late}"
            self._finish(CollectiveError(text))

    def advance(self) -> bool:
        """Go on as far as possible without blocking; return whether anything moved. For whoever drives the queue."""
        try:
            return self._advance()
        except BaseException as error:  # noqa: BLE001  (carried to the thread that waits)
            self._finish(error)
            return True

    def run(self) -> None:
        """Go on to the end in this thread; errors are kept for `wait`, interrupts end the work and are passed on."""
        assert self._steps is not None  # noqa: S101  (see `_advance`)
        try:
            if self._current is not None:
                wait, self._current = self._current, None
                drive(iter((wait,)))
            drive(self._steps)
        except Exception as error:  # noqa: BLE001  (as in `advance`)
            self._finish(error)
        except BaseException as interrupt:
            self._finish(interrupt)
            raise
        else:
            self._finish(None)

    def _advance(self) -> bool:
        if self._current is not None:
            waited = time.perf_counter() - self._since
            if not self._current.done():
                if self._queue is not None or not self._current.overdue(waited / self._patience):
                    return False
                late = self._current.late()
                if goes_on():
                    self._patience *= 2
                    tell_late(waited, waited, str(late))
                    return False
                self._current.settle(waited, finished=False)
                raise late
            # A caller that drives the queue has computed meanwhile, and waited for nothing.
            self._current.settle(waited if self._queue is None else 0.0, finished=True)
        assert self._steps is not None  # noqa: S101  (work without steps is done, and never advanced)
        self._current = next(self._steps, None)
        if self._current is None:
            self._finish(None)
        else:
            self._since, self._patience = time.perf_counter(), 1
        return True

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        self._steps = self._current = None
        self.ended = time.perf_counter()
        if self.told is not None:
            self.told(error)
        self._over.set()


class Queue:
    """Hold one communicator's collectives in the order of their calls."""

    def __init__(self) -> None:
        self.jobs: deque[Work] = deque()
        self.failure: BaseException | None = None
        """What ended the first job that failed."""
        self.late: BaseException | None = None
        """What ended the first one that did by a time-out. The wire is broken then: each one behind it would wait in
        vain for as long again, and whoever waits for the last would hear of it after the sum."""
        self.slow = False
        """Whether messages go over slow links."""

    def add(self, work: Work) -> None:
        """Append a job and wake the progress thread, or begin it here where the caller drives the queue."""
        self.jobs.append(work)
        if work.driven_by_caller:
            self.progress()
        else:
            engine().serve(self)

    def progress(self) -> None:
        """Advance the jobs as far as they go without blocking. For a caller that drives the queue."""
        while self.advance():
            pass

    def run_to(self, work: Work) -> None:
        """Finish the jobs up to and with `work`. For a caller that drives the queue."""
        while not work.done():
            if self.late is not None:
                self._advance()
                continue
            try:
                self.jobs[0].run()
            finally:
                self._remove_first()

    def advance(self) -> bool:
        """Advance the first job; after a failure those behind it go on, unless it was a time-out."""
        return bool(self.jobs) and self._advance()

    def _advance(self) -> bool:
        work = self.jobs[0]
        moved = work.advance()
        if self.late is not None:
            work.give_up(self.late)
        if work.done():
            self._remove_first()
        return moved

    def _remove_first(self) -> None:
        work = self.jobs.popleft()
        self.failure = self.failure or work.error
        if isinstance(work.error, CollectiveTimeoutError):
            self.late = self.late or work.error


class _Engine:
    """Be the one thread that advances all queues."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._queues: list[Queue] = []
        self._open = True
        self._thread = threading.Thread(target=self._run, name="mpizero progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread: MPI, which is finalized after this, must not be called any more.

        Called when the interpreter ends; collectives that nobody waited for are left as they are.
        """
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(GRACE)

    def serve(self, queue: Queue) -> None:
        """Take a queue up unless it is already served."""
        with self._wake:
            if queue not in self._queues:
                self._queues.append(queue)
                self._wake.notify()

    def _run(self) -> None:
        idle, look = 0, 0.0
        while True:
            with self._wake:
                self._queues = [queue for queue in self._queues if queue.jobs]
                while self._open and not self._queues:
                    self._wake.wait()
                if not self._open:
                    return
                queues = list(self._queues)
            moved = [queue.advance() for queue in queues]
            idle = 0 if any(moved) else idle + 1
            if idle > PASSES and time.monotonic() > look:
                look = time.monotonic() + LOOK
                look_around()
            time.sleep(_nap(idle, slow=all(queue.slow for queue in queues)))


def _nap(idle: int, *, slow: bool) -> float:
    """Return how long to sleep after so many rounds without progress."""
    passes, first, longest = (PASSES // 10, SLOW_NAP / 4, SLOW_NAP) if slow else (PASSES, NAP, LONGEST_NAP)
    return 0.0 if idle < passes else min(first * 1.25 ** min(idle - passes, 30), longest)


@cache
def engine() -> _Engine:
    """Return the process's progress thread, started at the first call."""
    return _Engine()
