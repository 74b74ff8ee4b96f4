"""The door of a communicator: one collective at a time, told to the flight record, and compared in strict mode."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpizero.comm.about import About, about
from mpizero.comm.forks import refuse_in_child
from mpizero.comm.record import DONE, FAILED
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.comm.health import Health
    from mpizero.comm.progress import Queue
    from mpizero.comm.strict import Strict
    from mpizero.comm.voice import Voice
    from mpizero.comm.watch import Watch

__all__ = ["Door"]


class Door:
    """Let collectives into one communicator."""

    closed = False
    in_child = False
    """Whether this process is a forked child of the rank; see [Note: children of a rank] in `forks`."""

    def __init__(self, uid: int, voice: Voice, health: Health, queue: Queue, watch: Watch | None) -> None:
        """Stand open.

        Args:
            uid: the communicator's.
            voice: what its calls are about.
            health: whether it can still be used.
            queue: what is under way on it.
            watch: whose record is told; None where no records are kept.
        """
        self.strict: Strict | None = None
        """What compares the ranks' calls; None where nothing does."""
        self._uid, self._voice, self._health, self._queue, self._watch = uid, voice, health, queue, watch
        self._record = None if watch is None else watch.mine
        self._busy = threading.Lock()
        self._calls = 0
        self._open = 0
        """The record's number of the call that holds the communicator."""

    def enter(self, what: str | About) -> None:
        """Begin one collective, which `leave` or `give_up` ends.

        Raises:
            CollectiveError: as of `exclusive`.
        """
        call = about(what) if isinstance(what, str) else what
        self._hold(call.name)
        record = self._record
        if record is not None:  # as `_begin` does, where every call counts
            self._calls += 1
            self._open = record.begin(self._uid, self._calls, call, self._voice.label)
        if self.strict is not None:
            try:
                self.strict.check(call, self._voice.label)
            except BaseException as error:
                self.give_up(error)
                raise

    def leave(self) -> None:
        """End what `enter` began, all being well."""
        if self._record is not None:
            self._record.end(self._open)
        self._busy.release()

    def give_up(self, error: BaseException) -> None:
        """End what `enter` began with an error, which is told where the other ranks are if that is why."""
        self.finished(self._open, error)
        self._busy.release()

    @contextmanager
    def exclusive(self, what: str | About) -> Iterator[None]:
        """Hold the communicator for one collective.

        Raises:
            CollectiveError: if another thread is in a collective on it (two threads on one communicator could pair
                their messages differently on different ranks, so this is never queued), if it was closed, or if an
                earlier collective on it was given up half-way; in strict mode, if other ranks make another call.
            CollectiveTimeoutError: in strict mode, if a rank does not come.
        """
        self.enter(what)
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise
        else:
            self.leave()

    def issue(self, what: str | About, add: Callable[[int], None]) -> None:
        """Begin a collective that goes on without holding the communicator, and is over with `finished`.

        Args:
            what: the collective.
            add: takes it up, with its number for `finished`.

        Raises:
            CollectiveError, CollectiveTimeoutError: as of `exclusive`.
        """
        call = about(what) if isinstance(what, str) else what
        self._hold(call.name)
        number = self._begin(call)
        try:
            if self.strict is not None:
                self.strict.check(call, self._voice.label)
            add(number)
        except BaseException as error:
            self.finished(number, error)
            raise
        finally:
            self._busy.release()

    def finished(self, number: int, error: BaseException | None) -> None:
        """Say in the record that a call is over; an error is told where the other ranks are, if that is why."""
        if self._record is None or self._watch is None:
            return
        broken = isinstance(error, CollectiveError) and error.__cause__ is not None  # by another's message
        if error is not None and (broken or isinstance(error, CollectiveTimeoutError)):
            error.args = ("\n".join(filter(None, (str(error), self._watch.report(number)))),)
        self._record.end(number, DONE if error is None else FAILED)

    def leave_behind(self) -> None:
        """Refuse everything from now on, this process being a forked child."""
        self.in_child, self._health.sound = True, False
        self._busy = threading.Lock()  # the parent's may be held by a thread that is not here

    def _begin(self, call: About) -> int:
        """Enter a call in the record; return its number there, 0 where there is none."""
        if self._record is None:
            return 0
        self._calls += 1
        return self._record.begin(self._uid, self._calls, call, self._voice.label)

    def _hold(self, name: str) -> None:
        if not self._busy.acquire(blocking=False):
            raise CollectiveError(
                f"{name}: a communicator must be used by one thread at a time (got a second one, "
                f"{threading.current_thread().name!r}): give each thread its own mpizero.Communicator(...)"
            )
        if not self._health.sound:
            self._busy.release()
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        if self.in_child:
            refuse_in_child(name)
        if self.closed:
            raise CollectiveError(f"{name}: the communicator must be open (got a closed one): make a new one")
        failure = self._queue.failure
        got = "one that was given up " + ("by an error, a time-out or a signal" if failure is None else f"as {failure}")
        raise CollectiveError(
            f"{name}: the communicator must have finished its earlier collectives (got {got}): its messages no longer "
            "match those of the other ranks, end the job"
        ) from failure
