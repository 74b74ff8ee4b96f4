"""A job killed at random moments of saves under training; the ranks are threads, so that a try takes a fraction of a
second. tests/cli/test_checkpoint.py kills single ranks under mpirun."""

import os
import random
import signal
import time

import pytest
from helpers import checkpoint_job

from mpizero.checkpoint.folder import LATEST
from mpizero.comm import run_loopback

RANKS = 3


def killed_at(folder, seconds):
    """Run the job for so long after its first save; return the last step that it said was saved."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            run_loopback(RANKS, lambda comm: checkpoint_job.work(comm, folder, writes))
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.readline()
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return int((said + pipe.read()).split()[-1])


def kills(folder, count):
    draw = random.Random(count)
    for _ in range(count):
        said = killed_at(folder, draw.uniform(0, 0.12))
        step = checkpoint_job.check(folder)
        assert said <= step <= said + 2
    left = [entry for entry in folder.iterdir() if entry.name.startswith(".")]
    assert len(left) <= 2
    assert (folder / LATEST).exists()


def test_kills(tmp_path):
    """Case C9."""
    kills(tmp_path, 4)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    """Case C9."""
    kills(tmp_path, 100)
