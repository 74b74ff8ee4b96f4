"""Handlers of SIGUSR1 and SIGTERM: when they are installed, and what a rank says at its end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mpizero as mz
from mpizero.comm import run_loopback, signals
from mpizero.comm.record import STOPPED
from mpizero.comm.recorded import Recorded
from mpizero.errors import ArgumentError

ROOT = Path(__file__).parents[2]
BODY = """
import hashlib, os, signal, time
import mpizero as mz
from mpizero.comm.record import record

def work():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in which Python calls no handler

record()  # which one rank alone does not keep
assert not mz.stop_requested()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGUSR1)
assert mz.stop_requested() and mz.stop_requested()
work()
"""


@pytest.fixture
def clean():
    """Forget what was installed, and put back the handlers that the tests install."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    signals.stop_signal.cache_clear()
    yield
    signals.stop_signal.cache_clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_program_in_a_long_call_says_where_it_was_and_ends_by_sigterm(tmp_path):
    """And its forked child does not, and dies alone; SIGUSR1 is only noted."""
    script = tmp_path / "script.py"
    script.write_text(BODY)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPIZERO_RECORD": str(tmp_path)}
    line = [sys.executable, str(script)]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == -signal.SIGTERM
            said = process.stderr.read()
        finally:
            process.kill()
    number = BODY.splitlines().index(next(line for line in BODY.splitlines() if "pbkdf2" in line)) + 1
    who = f"rank 0 of 1 on {socket.gethostname()}"
    places = [f"{script}:{line} in work" for line in (number - 1, number)]  # it may still be at the print before
    assert said in [f"mpizero: {who} got SIGTERM and ends; it was at {place}\n" for place in places]
    (kept,) = map(Recorded, tmp_path.glob("*.record"))
    assert kept.state == STOPPED
    assert f"mpizero: {who} {kept.cause}\n" == said


def test_handlers_of_the_program_stay(clean):
    def mine(*_):
        pass

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, mine)
    assert not signals.stop_signal().came
    assert {signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)} == {mine}


def test_only_the_main_thread_may_install(clean):
    def call(comm):
        with pytest.raises(
            ArgumentError, match=r"the thread of the first mpizero.stop_requested\(\) must be the main one"
        ):
            mz.stop_requested(comm)

    run_loopback(2, call)


def test_loopback_ranks_agree_once_the_main_thread_has_installed(clean):
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    stop = signals.stop_signal()
    assert run_loopback(3, mz.stop_requested) == [False] * 3
    stop(signal.SIGUSR1, None)
    assert run_loopback(3, mz.stop_requested) == [True] * 3


def test_whereabouts():
    def inside():
        return signals.whereabouts(sys._getframe())

    place = inside()
    assert place.startswith(f"at {__file__}:")
    assert place.endswith(" in inside")
    assert signals.whereabouts(None) == "in no code of the program's"


def test_whereabouts_in_a_call_of_ours(monkeypatch):
    seen = []

    def spy(*_, **__):
        seen.append(signals.whereabouts(sys._getframe(1)))
        return True

    monkeypatch.setattr("mpizero.collectives.stop.stop_signal", spy)
    with pytest.raises(mz.ArgumentTypeError):
        mz.stop_requested(3)
    assert seen[0].startswith(f"at {__file__}:")
    assert seen[0].endswith(" in test_whereabouts_in_a_call_of_ours, in mpizero's stop_requested")
