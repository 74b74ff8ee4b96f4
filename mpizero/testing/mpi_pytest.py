"""A pytest plugin for tests that run in several ranks: `mzrun -n 4 -m pytest --with-mpi -p mpizero.testing.mpi_pytest`.

- Every rank runs the same tests in the same order; a collection that differs ends the run.
- After each test the ranks tell each other how it went, so that a failure on one rank is a failure on all. Only rank 0
  writes pytest's report; another rank that fails writes its traceback to stderr.
- A rank that failed and whose peers do not come within the grace period (they wait in a collective for it) ends the
  job, and so does a rank whose test takes longer than its time-out. Both first write the test's name, the rank and the
  Python stacks.

[Note: two clocks] Stacks are written by a thread, which labels them, and which can run since mpi4py lets go of the
GIL. For a rank that hangs while it holds the GIL, `faulthandler`'s own timer, which needs no GIL, stands behind.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from _pytest.runner import runtestprotocol

from mpizero.comm.launch import mixed_launch_message, under_launcher
from mpizero.comm.raw import mpi

__all__ = ["World", "pytest_addoption", "pytest_configure", "world"]

TIMEOUT = 60.0
"""Seconds that a test may take unless its marker says otherwise."""
GRACE = 20.0
"""Seconds that a rank which failed waits for the others to come out of the test."""
TEXT_BYTES = 480
POLL = 0.002
WATCH = "mpizero test watch"
OWN_FRAMES = re.compile(r"[/\\](_pytest|pytest|pluggy)[/\\]|^<frozen|mpi_pytest\.py$")
HARD_DELAY = 10.0
"""Seconds between a time-out and faulthandler's end of the process. See [Note: two clocks]."""


@dataclass(kw_only=True)
class World:
    """Be the ranks of a test run, on a communicator that no test sees."""

    comm: Any
    """mpi4py's duplicate of COMM_WORLD."""

    stderr: int
    """The descriptor of this rank's stderr, out of reach of pytest's capturing."""

    alarm: Path
    """A file that a rank makes before it ends the job: its peers on the host then write where they are."""

    test: str = ""
    """The test that runs, "" between tests."""

    deadline: float = float("inf")
    """When it has to be over (`time.monotonic`)."""

    waiting: bool = False
    """Whether this rank is through with the test and waits for its peers."""

    lost: list[str] = field(default_factory=list)
    """Failures of rank 0, whose report is not written if the job is aborted."""

    said: threading.Lock = field(default_factory=threading.Lock)
    """Taken for good by the first thread that writes this rank's stacks."""

    def exchange(self, text: str, patience: float) -> list[str] | None:
        """Return what every rank said, in rank order; None if some did not answer within `patience` seconds."""
        mine = bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
        everyone = bytearray(TEXT_BYTES * self.comm.size)
        request = self.comm.Iallgather(mine, everyone)
        end = time.monotonic() + patience
        while not request.Test():
            if time.monotonic() > end:
                return None
            time.sleep(POLL)
        cuts = range(0, len(everyone), TEXT_BYTES)
        return [everyone[at : at + TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for at in cuts]

    def write(self, text: str) -> None:
        """Write to the real stderr, each line with the rank before it, in one piece."""
        label = f"[rank {self.comm.rank}] "
        os.write(self.stderr, "".join(f"{label}{line}\n" for line in text.splitlines()).encode())

    def say(self, reason: str) -> None:
        """Write why, in which test and where this rank is, once in its life."""
        if self.said.acquire(blocking=False):
            where = "" if self.waiting else _stacks()
            earlier = "\n".join(["", *self.lost])
            self.write(f"rank {self.comm.rank}: {self.test or 'between tests'}: {reason}\n{where}{earlier}")

    def end(self, reason: str) -> None:
        """Write why and where, let the peers write where they are, and abort the job."""
        faulthandler.dump_traceback_later(HARD_DELAY, exit=True, file=self.stderr)
        self.say(reason)
        self.alarm.touch()
        time.sleep(1.5)
        self.alarm.unlink(missing_ok=True)
        self.comm.Abort(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options to pytest."""
    group = parser.getgroup("mpizero", "tests in several ranks")
    group.addoption("--mpi-timeout", type=float, default=TIMEOUT, help="seconds for a test without timeout_s")
    group.addoption("--mpi-grace", type=float, default=GRACE, help="seconds that a failed rank waits for its peers")


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Start MPI, silence the report of all ranks but rank 0, and start the watch."""
    config.addinivalue_line("markers", "timeout_s(seconds): how long a test under MPI may take")
    module = mpi()
    comm = module.COMM_WORLD
    claimed = under_launcher()
    if claimed is not None and claimed > 1 and comm.size == 1:
        pytest.exit(mixed_launch_message(claimed, module.Get_library_version()), returncode=3)
    if comm.rank != 0:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        # Held by the reporter until the process ends.
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: PTH123, SIM115, SLF001
    alarm = Path(tempfile.gettempdir()) / comm.bcast(f"mpizero-test-{uuid.uuid4().hex}")
    world = World(comm=comm.Dup(), stderr=os.dup(2), alarm=alarm)
    config.pluginmanager.register(Agreement(world, config), "mpizero-agreement")
    threading.Thread(target=_watch, args=(world,), daemon=True, name=WATCH).start()


class Agreement:
    """Be the hooks that keep the ranks of a test run together."""

    def __init__(self, world: World, config: pytest.Config) -> None:
        self.world = world
        self.grace: float = config.getoption("--mpi-grace", GRACE)
        self.timeout: float = config.getoption("--mpi-timeout", TIMEOUT)

    def pytest_internalerror(self, excrepr: object) -> None:
        """End the job: this rank leaves pytest while its peers would wait for it."""
        self.world.end(f"pytest itself failed:\n{excrepr}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Show what could not be collected on a rank that writes no report."""
        if report.failed and self.world.comm.rank != 0:
            self.world.write(f"{report.nodeid} could not be collected\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """End the run on all ranks if they do not have the same tests in the same order."""
        names = "\n".join(item.nodeid for item in session.items)
        digest = hashlib.sha256(names.encode()).hexdigest()[:12]
        mine = f"{len(session.items)} tests, {session.testsfailed} errors, digest {digest}"
        everyone = self.world.exchange(mine, self.grace + self.timeout)
        if everyone is None:
            self.world.end("the other ranks did not finish collecting")
        elif len(set(everyone)) > 1:
            listed = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(everyone))
            pytest.exit(f"the ranks collected different tests:\n{listed}", returncode=1)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, agree with the other ranks on its outcome, and report it."""
        marker = item.get_closest_marker("timeout_s")
        timeout = float(marker.args[0]) if marker else self.timeout
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._begin(item.nodeid, timeout)
        try:
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        except BaseException:
            self.world.end(f"the test left pytest:\n{traceback.format_exc()}")
            raise
        failed = [report for report in reports if report.failed]
        everyone = self._agree(failed)
        self._begin("", float("inf"))
        if not failed:
            _fail_with_peers(reports, everyone)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _begin(self, test: str, timeout: float) -> None:
        world = self.world
        world.test, world.waiting, world.deadline = test, False, time.monotonic() + timeout
        faulthandler.cancel_dump_traceback_later()
        if test:
            faulthandler.dump_traceback_later(timeout + HARD_DELAY, exit=True, file=world.stderr)

    def _agree(self, failed: list[pytest.TestReport]) -> list[str]:
        world = self.world
        for report in failed:
            text = f"rank {world.comm.rank}: {report.nodeid} failed in {report.when}\n{report.longreprtext}"
            if world.comm.rank == 0:
                world.lost.append(text)
            else:
                world.write(text)
        world.waiting = True
        faulthandler.cancel_dump_traceback_later()
        # A rank that passed waits for as long as a peer may take; the peer's own time-out names the peer.
        patience = self.grace if failed else max(0.0, world.deadline - time.monotonic()) + self.grace
        everyone = world.exchange(_last_line(failed[0]) if failed else "", patience)
        if everyone is not None:
            return everyone
        outcome = "failed" if failed else "passed"
        world.end(f"{outcome} here, and other ranks did not get through it within {patience:.0f} s")
        return []


@pytest.fixture(scope="session")
def world() -> Any:
    """Return mpizero's communicator over all ranks."""
    import mpizero

    return mpizero.world()


def _fail_with_peers(reports: list[pytest.TestReport], everyone: list[str]) -> None:
    """Make this rank's report of a test a failure if the test failed elsewhere."""
    guilty = {rank: text for rank, text in enumerate(everyone) if text}
    if not guilty:
        return
    listed = "\n".join(f"rank {rank}: {text}" for rank, text in guilty.items())
    names = ", ".join(str(rank) for rank in guilty)
    report = reports[min(1, len(reports) - 1)]
    report.outcome = "failed"
    report.longrepr = f"failed on rank {names}, whose traceback is in stderr\n{listed}"


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return text.strip().partition("\n")[0] or "failed"


def _watch(world: World) -> None:
    """End the job when the running test has overstayed; a rank through with it leaves that to the one that is not."""
    while True:
        time.sleep(0.1)
        if world.alarm.exists():
            world.say("a peer ends the job, and this rank waits for it" if world.waiting else "a peer ends the job")
        elif not world.waiting and time.monotonic() > world.deadline:
            world.end("took longer than its time-out")


def _stacks() -> str:
    """Return where every thread is, without the frames of pytest and of the watch."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001  (the documented way to all stacks)
        if names.get(ident) != WATCH:
            lines = [entry for entry in traceback.extract_stack(frame) if not OWN_FRAMES.search(entry.filename)]
            parts += [f"thread {names.get(ident, ident)}:\n", *traceback.format_list(lines)]
    return "".join(parts)
