"""A launcher as a process: started, told of signals, waited for, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.cli.lost import Listener
from mpizero.comm import sweep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["GRACE", "TIMED_OUT", "Ended", "Watch", "kill_group", "watching"]

TIMED_OUT = 124
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ENDING = (signal.SIGINT, signal.SIGTERM)
GRACE = 5.0
"""Seconds that a job has to end by itself after it was asked to."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Say how a job ended."""

    code: int
    """Its exit code: 128 + N where signal N ended the launcher, TIMED_OUT where the time was over."""

    timed_out: bool
    """Whether the time was over."""

    seconds: float
    """How long it took."""

    lost_a_host: bool = False
    """Whether the launcher lost a host and did not say so by its exit code; `code` is 1 then."""


@dataclass(kw_only=True)
class Watch:
    """Stand between the signals that `mzrun` gets and the job that runs at the moment."""

    asked: dict[int, float] = field(default_factory=dict)
    """The signals that came from outside, each with when it first did (`time.monotonic`)."""

    process: subprocess.Popen[bytes] | None = None
    """The launcher that runs, the leader of a session of its own."""

    waiting: list[int] = field(default_factory=list)
    """The signals that came when there was no launcher, or when it had just been started and was not known yet."""

    def take(self, number: int, _frame: object) -> None:
        """Note a signal and pass it on."""
        self.asked.setdefault(number, time.monotonic())
        self.waiting.append(number)
        while self.process is not None and self.waiting:
            told = self.waiting.pop(0)
            for pid in _listeners(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, told)

    def run(
        self, line: list[str], variables: Mapping[str, str], timeout: float | None, *, listen: bool = False
    ) -> Ended:
        """Run a job to its end.

        Args:
            line: the launcher's command line.
            variables: its environment, in which `sweep.MARK` names the job.
            timeout: seconds after which it is ended.
            listen: whether the launcher may lose a host without saying so by its exit code.
        """
        start = time.monotonic()
        # It has no terminal to read from in a session of its own.
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        listeners = [Listener(stream) for stream in (1, 2)] if listen else []
        out, err = (listeners[0].writes, listeners[1].writes) if listen else (None, None)
        # A session of its own, so that a Ctrl-C reaches the ranks once, through the launcher.
        with subprocess.Popen(
            line, env=variables, stdin=stdin, stdout=out, stderr=err, start_new_session=True
        ) as process:
            for listener in listeners:
                os.close(listener.writes)
            self.process = process
            try:
                if self.waiting:
                    self.take(self.waiting.pop(0), None)
                code, timed_out = self._wait(process, variables[sweep.MARK], timeout)
            finally:
                self.process = None
        told = [listener.lost_a_host() for listener in listeners]  # all of them: each has a rest to pass on
        lost = any(told) and code == 0
        seconds = time.monotonic() - start
        return Ended(code=code or int(lost), timed_out=timed_out, seconds=seconds, lost_a_host=lost)

    def _wait(self, process: subprocess.Popen[bytes], mark: str, timeout: float | None) -> tuple[int, bool]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
                return (code if code >= 0 else 128 - code), False
            now = time.monotonic()
            if deadline is not None and now > deadline:
                _end(process, mark)
                return TIMED_OUT, True
            asked = [when for number, when in self.asked.items() if number in ENDING]
            if asked and now > min(asked) + GRACE:
                _end(process, mark)
                return 128 + signal.SIGTERM, False


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Have the signals that end or warn a job go through a `Watch`."""
    watch = Watch()
    before = {number: signal.signal(number, watch.take) for number in FORWARDED}
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listeners(pid: int) -> list[int]:
    """Return whom to signal: Intel's mpirun is a shell that would die of it and leave the launcher that it started."""
    with contextlib.suppress(OSError):
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        hydra = [child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "mpiexec.hydra"]
        return hydra or [pid]
    return [pid]


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the launcher and all that it started: politely, then by force.

    Launchers put ranks into process groups of their own, and a killed launcher leaves them running; so the ranks are
    noted before the launcher is asked to end.
    """
    family = sweep.members(mark)
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    sweep.end({**family, **sweep.members(mark)})
    kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher, the leader of a session, and what has stayed in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
