"""A job in which one rank fails ends, soon and with a reason; started as a user starts it."""

import socket
import subprocess
import sys

import pytest
from helpers.jobs import ROOT, TIMED_OUT, run_script


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script's text in some ranks; return exit code and output. The job may not outlive its limit."""

    def start(body, ranks=3, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return run_script(tmp_path, f"import time, sys\nimport numpy as np\nimport mpizero\n{body}", ranks)

    return start


WAITS = {
    "barrier": "mpizero.barrier()",
    "raw MPI barrier": "world.mpi.Barrier()",
    "native all-reduce": "mpizero.all_reduce(np.ones(4, np.float32), algorithm='native')",
    "large all-reduce": "mpizero.all_reduce(np.ones(1 << 20, np.float32))",
}


@pytest.mark.parametrize("wait", WAITS)
def test_k13_one_rank_raises_while_the_others_wait(run, wait):
    """K13: traceback with rank and host, the job ends, exit code not 0."""
    code, text = run(
        "world = mpizero.world()\n"
        "if world.rank == 1:\n"
        "    raise ZeroDivisionError('the reason')\n"
        f"{WAITS[wait]}\n"
        "print('went on')\n"
    )
    assert code not in {0, TIMED_OUT}, text
    assert f"mpizero: rank 1 of 3 on {socket.gethostname()} raised; ending the job" in text
    assert "ZeroDivisionError: the reason" in text
    assert "script.py" in text
    assert "went on" not in text


def test_an_exception_in_a_thread_ends_the_job(run):
    code, text = run(
        "import threading\n"
        "world = mpizero.world()\n"
        "if world.rank == 2:\n"
        "    threading.Thread(target=lambda: 1 / 0).start()\n"
        "world.mpi.Barrier()\ntime.sleep(300)\n"
    )
    assert code not in {0, TIMED_OUT}, text
    assert "rank 2 of 3 on" in text
    assert "ZeroDivisionError" in text


def test_what_fails_while_failing_still_ends_the_job(run):
    """A hook of the user's that raises, and an exception that cannot be shown."""
    code, text = run(
        "class Odd(Exception):\n"
        "    def __str__(self): raise KeyError('no text')\n"
        "def hook(*args): raise RuntimeError('a broken hook')\n"
        "sys.excepthook = hook\n"
        "world = mpizero.world()\n"
        "if world.rank == 1:\n"
        "    raise Odd\n"
        "mpizero.barrier()\n"
    )
    assert code not in {0, TIMED_OUT}, text
    assert "rank 1 of 3 on" in text


def test_a_users_hook_still_runs(run):
    code, text = run(
        "sys.excepthook = lambda kind, error, trace: print(f'my hook saw {kind.__name__}', flush=True)\n"
        "world = mpizero.world()\n"
        "if world.rank == 1:\n"
        "    raise ZeroDivisionError\n"
        "mpizero.barrier()\n"
    )
    assert code not in {0, TIMED_OUT}, text
    assert "my hook saw ZeroDivisionError" in text
    assert "rank 1 of 3 on" in text


CALLS = {
    "barrier": ("mpizero.barrier()", "barrier (loads)", "rank 1"),
    "loads": ("mpizero.all_reduce(np.ones(9000))", "all_reduce (loads)", "rank 1"),
    "ring": ("mpizero.all_reduce(np.ones(9000), algorithm='ring')", "all_reduce (ring)", "rank 1"),
    "direct": ("mpizero.all_reduce(np.ones(9000), algorithm='direct')", "all_reduce (direct)", "receive from rank 1"),
    "native": ("mpizero.all_reduce(np.ones(9), algorithm='native')", "all_reduce (native)", "its peers"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_never_calls_is_named_and_the_job_ends(run, call):
    """K1 and K14 without strict mode: a time-out, not a hang."""
    statement, name, peer = CALLS[call]
    code, text = run(
        f"world = mpizero.world()\nif world.rank == 1:\n    time.sleep(300)\n{statement}\nprint('went on')\n",
        MPIZERO_TIMEOUT="1.5",
    )
    assert code not in {0, TIMED_OUT}, text
    assert "CollectiveTimeoutError" in text
    assert name in text
    assert "waited 1.5 s for" in text
    assert peer in text
    assert "went on" not in text


def test_a_caught_time_out_leaves_no_communicator_to_go_on_with(run):
    """Messages that are still under way would meet those of the next collective: refused, not garbage."""
    code, text = run(
        "world = mpizero.world()\n"
        "if world.rank == 0:\n"
        "    for attempt in range(2):\n"
        "        try:\n"
        "            mpizero.all_reduce(np.ones(9000), algorithm='direct')\n"
        "        except mpizero.CollectiveError as error:\n"
        "            print(type(error).__name__, error, flush=True)\n"
        "    world.abort(7)\n"
        "time.sleep(300)\n",
        ranks=2,
        MPIZERO_TIMEOUT="1",
    )
    assert code not in {0, TIMED_OUT}, text
    assert "CollectiveTimeoutError all_reduce" in text
    assert "CollectiveError all_reduce: the communicator must have finished its earlier collectives" in text


def test_counts_that_differ_end_the_job(run):
    """K1 without strict mode: no hang at the end."""
    code, text = run(
        "count = 100_000 if mpizero.world().rank else 60_000\n"
        "mpizero.all_reduce(np.ones(count, np.float32), algorithm='direct')\n",
        ranks=2,
        MPIZERO_TIMEOUT="1.5",
    )
    assert code not in {0, TIMED_OUT}, text


def test_k18_each_rank_alone(tmp_path):
    """K18: a launcher says three ranks, MPI says one: an error that says what is wrong, not three trainings."""
    script = tmp_path / "script.py"
    script.write_text("import os\nos.environ['PMI_SIZE'] = '3'\nimport mpizero\nprint('size', mpizero.world().size)\n")
    job = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert job.returncode != 0
    assert "LaunchError" in job.stderr
    assert "size 1" not in job.stdout


def test_all_well(run):
    """The same machinery lets a good job end with 0."""
    code, text = run("x = mpizero.all_reduce(np.ones(3))\nmpizero.barrier()\nassert x[0] == 3\nprint('went on')\n")
    assert code == 0, text
    assert text.count("went on") == 3
