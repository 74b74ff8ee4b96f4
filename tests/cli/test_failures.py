"""A rank that is late, stopped, gone or elsewhere is named by those that wait for it; started as a user does."""

import pytest
from helpers.jobs import TIMED_OUT, run_script

from mpizero.comm.record import DIED, LEFT, STOPPED, clean
from mpizero.comm.recorded import Recorded


@pytest.fixture
def records(tmp_path):
    return tmp_path / "records"


@pytest.fixture
def run(tmp_path, records, monkeypatch):
    """Run a script's text in some ranks; return exit code and output. The job may not outlive its limit."""

    def start(body, ranks=3, **variables):
        for name, value in {"MPIZERO_RECORD": str(records), **variables}.items():
            monkeypatch.setenv(name, value)
        text = f"import os, signal, sys, time\nimport numpy as np\nimport mpizero as mz\n{body}"
        return run_script(tmp_path, text, ranks)

    return start


def left_in(records):
    """Return the records by rank."""
    return {found.rank: found for found in map(Recorded, records.glob("*.record"))}


def line_of(text, start):
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert found, text
    return found[0]


def test_who_is_late_is_waited_for_and_who_has_done_its_part_may_leave(run, records):
    """`MPIZERO_ON_TIMEOUT=wait`, in both threads; an ordinary end leaves no record."""
    code, text = run(
        "world = mz.world()\n"
        "x = np.full(5, world.rank + 1.0)\n"
        "time.sleep(2.5 if world.rank == 2 else 0)\n"
        "mz.all_reduce(x, algorithm='direct')\n"
        "def late(): time.sleep(2.5)\n"
        "if world.rank == 1: late()\n"
        "assert np.all(mz.all_reduce(x, algorithm='direct', async_op=True).wait() == 18)\n"
        "if world.rank: time.sleep(0.6)\n"
        "mz.broadcast(x, algorithm='double_tree')\n"
        "assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL\n"
        "print('went on', flush=True)\n",
        MPIZERO_TIMEOUT="0.4",
        MPIZERO_ON_TIMEOUT="wait",
    )
    assert code == 0, text
    assert text.count("went on") == 3
    assert "all_reduce (direct): rank 0 of 3 waits for: receive from rank 2" in text
    assert "rank 2: not in it yet: in code of its own since" in text
    assert "before its first call, at script.py:6 in <module>" in text
    assert "after all_reduce #1, at script.py:8 in late < script.py:9 in <module>" in text
    assert list(records.iterdir()) == []


def test_parts_of_the_world_one_thread_and_an_end_by_hand(run, records):
    """No `mz.world()`, no MPI_THREAD_MULTIPLE, MPI finalized by the program, at different times."""
    code, text = run(
        "import mpi4py\n"
        "mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI\n"
        "part = mz.Communicator(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2))\n"
        "work = mz.all_reduce(np.ones(4), part, async_op=True)\n"
        "assert np.all(work.wait() == part.size)\n"
        "time.sleep(0.5 * part.rank)\n"
        "MPI.Finalize()\n"
        "print('went on', flush=True)\n",
        ranks=4,
    )
    assert code == 0, text
    assert text.count("went on") == 4
    assert list(records.iterdir()) == []


LEAVES = {
    "sys.exit": ("sys.exit(0)", "mz.barrier()", "barrier", "it exits"),
    "os._exit": ("os._exit(0)", "mz.all_reduce(np.ones(9), async_op=True).wait()", "all_reduce", "os._exit(0)"),
}


@pytest.mark.parametrize("way", LEAVES)
def test_who_leaves_while_others_wait_is_named(run, records, way):
    """In the caller's thread and in the progress thread; the records stay, until the next start."""
    statement, wait, name, cause = LEAVES[way]
    code, text = run(f"world = mz.world()\nmz.barrier()\nif world.rank == 1: {statement}\n{wait}\nprint('went on')\n")
    assert code not in {0, TIMED_OUT}, text
    assert "went on" not in text
    said = line_of(text, "mpizero: rank 1 on ")
    assert f" left ({cause}) after barrier #1; rank " in said
    assert f" waits for it in {name} #2 since 0." in said
    assert said.endswith("; ending the job")
    found = left_in(records)
    assert (found[1].state, found[1].cause) == (LEFT, cause)
    assert STOPPED in {found[0].state, found[2].state}
    clean(records)
    assert 1 not in left_in(records)


@pytest.mark.parametrize(("wait", "what"), [("mz.empty(8)", "a symmetric buffer"), ("mz.world().split(0)", "a split")])
def test_who_leaves_ahead_of_what_mpi_does_blocking_is_named(run, wait, what):
    code, text = run(f"world = mz.world()\nmz.barrier()\nif world.rank == 1: os._exit(3)\n{wait}\nprint('went on')\n")
    assert code not in {0, TIMED_OUT}, text
    assert "went on" not in text
    said = line_of(text, "mpizero: rank 1 on ")
    assert " left (os._exit(3)) after barrier #1; rank " in said
    assert said.endswith(f" of 3 waits for all ranks to come to {what}; ending the job")


def test_who_leaves_while_another_receives_is_named(run):
    """What it sent before that arrives."""
    code, text = run(
        "import torch, torch.distributed as dist\n"
        "import mpizero.c10d\n"
        "mpizero.c10d.init()\n"
        "x = torch.ones(9)\n"
        "if dist.get_rank() == 1:\n"
        "    dist.send(x, 0)\n"
        "    sys.exit(0)\n"
        "time.sleep(3.5)\n"
        "dist.recv(x, 1)\n"
        "print('the first came', flush=True)\n"
        "dist.recv(x, 1, tag=7)\n",
        ranks=2,
    )
    assert code not in {0, TIMED_OUT}, text
    assert "the first came" in text
    said = line_of(text, "mpizero: rank 1 on ")
    assert said.endswith(" left (it exits) before its first call; rank 0 of 2: recv from rank 1, tag 7; ending the job")


def test_a_time_out_says_where_each_rank_is(run, records):
    code, text = run(
        "world = mz.world()\n"
        "mz.barrier()\n"
        "if world.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "def asleep(): time.sleep(300)\n"
        "if world.rank == 2: asleep()\n"
        "if world.rank == 3: world.transport.timeout = 60\n"  # else it may give up in the same moment
        "with world.channel(1, 'blocks.7'):\n"
        "    mz.all_reduce(np.ones(9000), algorithm='direct')\n",
        ranks=4,
        MPIZERO_TIMEOUT="1",
    )
    assert code not in {0, TIMED_OUT}, text
    assert "waited 1 s for: receive from rank" in text
    seen = (
        "seen from all_reduce #2 (blocks.7), all_reduce(9000 elements of float64, op sum) by direct, on communicator "
    )
    assert seen in text
    assert line_of(text, "  rank 1: stopped (by SIGSTOP, or a debugger), not in it yet: in code of its own since ")
    assert line_of(text, "  rank 2: not in it yet: ").endswith("at script.py:7 in asleep < script.py:8 in <module>")
    assert line_of(text, "  rank 3: waiting in")
    found = left_in(records)
    assert DIED in {found[0].state, found[3].state}
    assert "CollectiveTimeoutError" in found[0].cause + found[3].cause


def test_different_calls_by_messages_are_told(run):
    """K14 where nothing is compared: the time-out says what the others call in its place."""
    code, text = run(
        "world = mz.world()\n"
        "if world.rank == 1: mz.all_gather(np.ones(3000), algorithm='ring')\n"
        "mz.all_reduce(np.ones(9000), algorithm='direct')\n",
        ranks=2,
        MPIZERO_TIMEOUT="1",
        MPIZERO_LOADS="0",
    )
    assert code not in {0, TIMED_OUT}, text
    assert "in all_gather(" in text or "in all_reduce(9000 elements of float64, op sum) in its place" in text


def test_with_abort_off_all_is_left_to_the_user(run, records):
    code, text = run(
        "world = mz.world()\n"
        "hook = sys.excepthook\n"
        "if world.rank != 1:\n"
        "    try: mz.barrier()\n"
        "    except mz.CollectiveTimeoutError as error: print(error, flush=True)\n"
        "assert hook is sys.__excepthook__\n",
        MPIZERO_TIMEOUT="1",
        MPIZERO_ABORT="0",
    )
    assert code == 0, text
    assert "rank 1: ended (it exits) before its first call" in text
    clean(records)
    assert left_in(records) == {}
