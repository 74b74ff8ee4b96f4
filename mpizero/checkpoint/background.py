"""A save that goes on while training does.

[Note: meeting in the folder] The threads that write touch no communicator, whose collectives are the main thread's. A
rank whose file is on the disk leaves a small file with its facts beside it; rank 0's thread looks for these and makes
the checkpoint visible once all are there, at whatever step training is. Only `wait`, on all ranks, speaks of how it
went: first of the files, so that rank 0's thread is not left waiting for one that will not come.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.checkpoint.failure import raise_together

if TYPE_CHECKING:
    from pathlib import Path

    from mpizero.checkpoint.job import Job

__all__ = ["SaveHandle", "finish"]

NOTE = "checkpoint under way"
ROOM = "checkpoint room"
NAP = 0.02
"""Seconds between two looks into the folder."""
FACTS = "facts-"


class SaveHandle:
    """Be a save that is under way."""

    def __init__(self, comm: Any, job: Job) -> None:
        """Copy what is to be written, and start to write it; not for users."""
        self._comm, self._job = comm, job
        self._text = ""
        self._committed = ""
        self._over = False
        self._written = threading.Event()
        self._give_up = threading.Event()
        _copy(comm, job)
        comm.notes[NOTE] = self
        self._thread = threading.Thread(target=self._run, name="mpizero save")
        self._thread.start()

    def done(self) -> bool:
        """Return whether this rank's thread is through: `wait` would only wait for other ranks."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: with the same text on all ranks, if it will not be; what was there before is as it was.

        Collective: two all-gathers. The second call does nothing.
        """
        if self._over:
            return
        self._over = True
        if self._comm.notes.get(NOTE) is self:
            del self._comm.notes[NOTE]
        self._written.wait()
        try:
            raise_together(self._comm, self._text)
            self._thread.join()
            raise_together(self._comm, self._committed)
        finally:  # not before: other ranks would find the folder gone in which they write
            self._give_up.set()
            self._thread.join()
            self._job.end()

    def _run(self) -> None:
        job = self._job
        try:
            self._text = job.write()
            if not self._text:
                self._leave_facts()
        except BaseException as error:  # noqa: BLE001  (a thread has nobody else to tell)
            self._text = f"a save in the background must end (got {error!r})"
        self._written.set()
        if job.saving is None:
            return
        try:
            table = self._await_facts() if not self._text else None
            if table is not None:
                self._committed = job.commit(table)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._committed = f"a save in the background must end (got {error!r})"

    def _leave_facts(self) -> None:
        job, hidden = self._job, self._hidden
        name = f"{FACTS}{job.file}"
        other = hidden / f"{name}.part"
        try:
            other.write_text(json.dumps([job.file, self._comm.rank, *job.written]))
            other.rename(hidden / name)
        except OSError as error:
            self._text = f"{hidden.parent} must take {name} (got: {error.strerror})"

    def _await_facts(self) -> list[list[int]] | None:
        """Return the facts of all files once they are there; None if they will not come."""
        job, hidden = self._job, self._hidden
        missing, table = set(range(job.files)), []
        end = time.monotonic() + self._comm.transport.timeout
        while missing and not self._give_up.is_set():
            for file in sorted(missing):
                with suppress(FileNotFoundError):
                    table.append(json.loads((hidden / f"{FACTS}{file}").read_text()))
                    missing.discard(file)
                    end = time.monotonic() + self._comm.transport.timeout
            if time.monotonic() > end:
                self._committed = f"{hidden.parent} must take all ranks' files (got none from some for too long)"
                return None
            if missing:
                time.sleep(NAP)
        if missing:
            return None
        for file in range(job.files):
            (hidden / f"{FACTS}{file}").unlink()
        return table

    @property
    def _hidden(self) -> Path:
        assert self._job.hidden is not None  # noqa: S101  (set before the handle is made)
        return self._job.hidden


def finish(comm: Any) -> None:
    """Wait for the save that is under way over these ranks, if any. Collective then; raises as `wait` does."""
    handle = comm.notes.get(NOTE)
    if handle is not None:
        handle.wait()


def _copy(comm: Any, job: Job) -> None:
    """Copy what is to be written into memory that is kept from save to save: fresh memory takes twice the time."""
    total = sum(one.data.nbytes for one in job.ranges)
    room = comm.notes.get(ROOM)
    if room is None or room.nbytes < total:
        comm.notes[ROOM] = None
        room = comm.notes[ROOM] = np.empty(total, np.uint8)
    position, copied = 0, []
    for one in job.ranges:
        target = room[position : position + one.data.nbytes]
        target[:] = one.data
        copied.append(replace(one, data=target))
        position += one.data.nbytes
    job.ranges = copied
