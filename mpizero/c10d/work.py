"""What an operation of a group gives: torch's `Work`, and the one way in which all operations are started.

[Note: jobs] A verb's background work is a job of its communicator's queue, which the progress thread runs in order.
What has to follow it, as copying a packed result to its places, is one more job behind it. A future is completed by a
job too, but in a thread of its own: callbacks are the user's code, which may wait for another collective (torch's
PowerSGD does), and the progress thread, which has to run that one, must not be the one that waits.

[Note: device memory] A job that is done has done the host's part. What follows it on a device belongs behind it in the
stream of whoever waits, so it is done by `wait`, and by the thread that completes the future.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist

from mpizero.c10d.kept import release, waited
from mpizero.comm import Work as Job
from mpizero.comm.waiting import poll
from mpizero.comm.watch import story
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from torch import Tensor

    from mpizero.comm import Communicator

__all__ = ["Operation", "Pending", "Work", "seconds_of"]

CALLBACKS = 4
"""Threads that complete futures, so many of which may wait for other futures in their callbacks."""


_TorchWork: Any = dist.Work


class Pending(Protocol):
    """Be something under way."""

    @property
    def error(self) -> BaseException | None:
        """Return what ended it, if that was an error."""
        ...

    def done(self) -> bool:
        """Return whether it is over; never blocks."""
        ...

    def wait(self) -> Any:
        """Return when it is over; raise what ended it."""
        ...

    def follow(self, then: Callable[[], None]) -> None:
        """Call `then` from some thread when it is over."""
        ...


class Work(_TorchWork):
    """Be one operation of a group, finished or under way; its tensors belong to it until it is waited for."""

    pending: Pending | None = None
    """What is under way."""
    limit = 0.0
    """Seconds that the operation was given; 0 for the group's time-out."""
    _future: Any = None

    def __init__(self, outputs: list[Tensor], pending: Pending | None = None) -> None:
        """Hold an operation.

        Args:
            outputs: what `result` and the future give.
            pending: what is under way; None for work that is done.
        """
        _TorchWork.__init__(self)
        self._outputs = outputs
        if pending is not None:
            self.pending = pending

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return True once the operation is over, and its results are there, or behind it in the current stream.

        Args:
            timeout: how long this call may wait; None or 0 leaves it to the operation's or the group's time-out.
                Work that is given up here goes on, and may be waited for again.

        Raises:
            CollectiveTimeoutError: when the time is over.
            Exception: what the operation raised.
        """
        if self.pending is not None:
            seconds = seconds_of(timeout) or self.limit
            if seconds and not poll(self.pending.done, seconds, lambda: "an operation of torch.distributed"):
                text = (
                    f"an operation of torch.distributed must be over within the {seconds:g} s that wait was given (got "
                    "none): either the other ranks are slower than that or they never made this call"
                )
                raise CollectiveTimeoutError(f"{text}\n{story()}".strip())
            self.pending.wait()
            waited(self)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is over, well or not; never blocks."""
        return self.pending is None or self.pending.done()

    def is_success(self) -> bool:
        """Return whether it is over without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what ended it, if that was an error."""
        return None if self.pending is None or not self.pending.done() else self.pending.error

    def result(self) -> list[Tensor]:
        """Return the tensors with its results, which `wait` makes valid."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank, within the group, from which a message came; for `recv` alone.

        Raises:
            CollectiveError: of other operations.
        """
        source = getattr(self.pending, "source", None)
        if source is None:
            raise CollectiveError("source_rank must be asked of a recv that is over (got another operation)")
        return int(source)

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as `wait` does: what is given to the current stream afterwards sees the results."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the outputs, made at the first call; its callbacks run in threads of their own.

        An error ends it as a RuntimeError with the error's text; `wait` raises the error itself.
        """
        if self._future is None:
            self._future = self._make_future()
            release(self)
        return self._future

    def _make_future(self) -> Any:
        devices = {x.device for x in self._outputs if x.device.type == "cuda"}
        gate: torch.futures.Future[None] = torch.futures.Future(devices=list(devices))
        future = gate.then(self._deliver)
        if self.pending is None or (self.pending.done() and not devices):
            gate.set_result(None)
        else:
            self.pending.follow(lambda: _later(gate))
        return future

    def _deliver(self, _: Any) -> list[Tensor]:
        self.wait()
        return self._outputs


class Operation:
    """Start the verbs of one operation of a group, at once or in the background, and what follows them."""

    def __init__(self, comm: Communicator, opts: Any, timeout: timedelta | None = None) -> None:
        """Read what all options have in common.

        Args:
            comm: the group's communicator.
            opts: torch's options; None, and options of a torch that does not tell, mean an asynchronous operation.
            timeout: how long the operation may take, in the place of the options'.
        """
        self.comm = comm
        self.seconds = seconds_of(getattr(opts, "timeout", None) if timeout is None else timeout)
        self.synchronous = not getattr(opts, "asyncOp", True)
        self.later = not self.synchronous or bool(self.seconds)
        self._jobs: list[Job] = []
        self._after: list[Callable[[], None]] = []

    def start(self, verb: Callable[..., Any], x: Any, **named: Any) -> None:
        """Start a verb."""
        started = verb(x, self.comm, async_op=self.later, **named)
        if self.later:
            self._jobs.append(started)

    def then(self, act: Callable[[], None] | None) -> None:
        """Do something with the results of the verbs that were started, when they are there."""
        if act is None:
            return
        if self.later:
            self._after.append(act)
        else:
            act()

    def work(self, outputs: list[Tensor]) -> Work:
        """Return the work; where its time is limited and the caller waits, wait for it here."""
        if not self.later:
            return Work(outputs)
        on_device = any(x.device.type != "cpu" for x in outputs)
        work = Work(outputs, _Jobs(self.comm, self._jobs, self._after, on_device=on_device))
        work.limit = self.seconds
        if self.synchronous:
            work.wait()
        return work


class _Jobs:
    """Be the jobs of one operation, and what follows them."""

    def __init__(
        self, comm: Communicator, jobs: list[Job], after: list[Callable[[], None]], *, on_device: bool
    ) -> None:
        self._comm = comm
        self._jobs = jobs
        self._after = after if on_device else []
        """What `wait` is left to do; see [Note: device memory]."""
        if after and not on_device:
            self._jobs = [*jobs, self._append(lambda: _all(after))]

    def done(self) -> bool:
        return self.error is not None or all(job.done() for job in self._jobs)

    @property
    def error(self) -> BaseException | None:
        return next((job.error for job in self._jobs if job.error is not None), None)

    def wait(self) -> None:
        for job in self._jobs:
            job.wait()
        while self._after:
            self._after.pop(0)()

    def follow(self, then: Callable[[], None]) -> None:
        try:
            self._comm.submit("a future", _steps(then), None)
        except CollectiveError:  # one of these has failed, or something before them; they end all the same
            _callbacks().submit(self._await, then)

    def _await(self, then: Callable[[], None]) -> None:
        poll(self.done, float("inf"), lambda: "an operation after one that failed")
        then()

    def _append(self, act: Callable[[], None]) -> Job:
        """Return a job that does something after the others, or fails as they do."""
        jobs = list(self._jobs)

        def unless_failed() -> None:
            for job in jobs:
                if job.error is not None:
                    raise job.error
            act()

        try:
            return self._comm.submit("the copy of results", _steps(unless_failed), None)
        except CollectiveError as error:
            job = Job.finished(None)
            job.error = error
            return job


def _later(gate: torch.futures.Future[None]) -> None:
    _callbacks().submit(gate.set_result, None)


def seconds_of(timeout: Any) -> float:
    """Return seconds of a `timedelta` or a number; 0 where none was given, torch's negative ones included."""
    if timeout is None:
        return 0.0
    seconds = timeout if isinstance(timeout, int | float) else timeout.total_seconds()
    return max(0.0, float(seconds))


def _all(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        act()


def _steps(act: Callable[[], None]) -> Iterator[Any]:
    act()
    yield from ()


@cache
def _callbacks() -> ThreadPoolExecutor:
    """Return the threads that complete futures, started as they are needed."""
    return ThreadPoolExecutor(CALLBACKS, thread_name_prefix="mpizero futures")
