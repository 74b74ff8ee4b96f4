"""mzrun: exit codes, bad command lines, signals and the time-out."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpizero.comm.launch import vendor_of_library

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, str(ROOT / "bin" / "mzrun")]


@pytest.fixture
def script(tmp_path):
    def script(body):
        path = tmp_path / "script.py"
        head = "import os, sys, time\nfrom mpi4py import MPI\nrank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size\n"
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    return script


def mzrun(*args, cwd=None):
    return subprocess.run([*LINE, *args], capture_output=True, text=True, timeout=100, check=False, cwd=cwd)


def test_runs_so_many_ranks_with_the_scripts_arguments(script):
    done = mzrun("-n", "3", script("print(f'{rank} of {size} {sys.argv[1:]}')"), "-n", "9", "--timeout")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.strip() for line in done.stdout.splitlines())
    assert lines == [f"{rank} of 3 ['-n', '9', '--timeout']" for rank in range(3)]
    assert done.stderr == ""


def test_runs_a_module_of_the_folder_it_is_called_in(script):
    folder = Path(script("print('here', sys.argv[1])")).parent
    done = mzrun("-n", "1", "--", "-m", "script", "x", cwd=folder)
    assert (done.returncode, done.stdout.strip()) == (0, "here x")


def test_forwards_the_exit_code(script):
    assert mzrun("-n", "2", script("MPI.COMM_WORLD.barrier(); sys.exit(3 * rank)")).returncode == 3


def test_uncaught_exception_shows_and_ends_the_job(script):
    start = time.monotonic()
    done = mzrun("-n", "2", script("if rank == 1: raise ValueError('boom')"))
    assert done.returncode != 0
    assert "ValueError: boom" in done.stdout + done.stderr
    assert time.monotonic() - start < 30


def running(pid):
    """Whether a process is there; one that is dead but not yet reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", "0", "x.py"], "-n must be a whole number of ranks, at least 1 (got '0')"),
        (["-n", "-2", "x.py"], "-n must be a whole number of ranks, at least 1 (got '-2')"),
        (["-n", "two", "x.py"], "-n must be a whole number of ranks, at least 1 (got 'two')"),
        (["-n", "2.5", "x.py"], "-n must be a whole number of ranks, at least 1 (got '2.5')"),
        (["-n", "2", "nowhere.py"], "the script must be a file that exists (got 'nowhere.py')"),
        (["-n", "2", "-m", "nowhere"], "the module must be one that this Python finds (got 'nowhere')"),
        (["-n", "2"], "the program must be a script or -m MODULE (got '')"),
        (["-n", "2", "-m"], "the program must be a script or -m MODULE (got '-m')"),
        (["-n", "2", "--timeout", "soon", "x.py"], "--timeout must be a number of seconds above 0 (got 'soon')"),
        (["x.py"], "the following arguments are required: -n"),
        (["-n", "2", "--rank", "x.py"], "unrecognized arguments: --rank"),
    ],
)
def test_bad_command_line(args, said):
    done = mzrun(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_k18_launcher_of_another_mpi_is_refused(script, tmp_path):
    """K18: mzrun starts nothing with a pair that cannot work."""
    library = mzrun("-n", "1", script("print(MPI.Get_library_version())"))
    other = "HYDRA build details: Version: 9.9" if "Open MPI" in library.stdout else "mpirun (Open MPI) 9.9"
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{other}'\n")
    program.chmod(0o755)
    # A link beside the false launcher would lose the environment's packages; so only the search is turned.
    code = "import sys; from mpizero.cli import mzrun; from mpizero.comm import launch; "
    code += f"launch._candidates = lambda python: iter([{str(program)!r}]); sys.exit(mzrun.main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "-n", "2", script("print('started')")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "launcher must be of the MPI whose library mpi4py loads" in done.stderr
    assert "started" not in done.stdout


def test_timeout_ends_every_rank_and_says_so(script, tmp_path):
    start = time.monotonic()
    body = f"open(f'{tmp_path}/{{rank}}', 'w').write(str(os.getpid())); time.sleep(80)"
    done = mzrun("-n", "2", "--timeout", "6", script(body))
    assert done.returncode == 124
    assert "mzrun: the job was ended: it took longer than --timeout 6 s" in done.stderr
    assert time.monotonic() - start < 40
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    deadline = time.monotonic() + 5
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if running(pid)]


def test_interrupt_ends_the_job(script, tmp_path):
    job = subprocess.Popen([*LINE, "-n", "2", script(f"open('{tmp_path}/up', 'w'); time.sleep(80)")])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        assert job.wait(30) != 0
    finally:
        job.kill()
        job.wait()


def test_jobs_nest(script):
    """A job that a rank of another job starts has ranks of its own."""
    inner = script("if size > 1: print('inner', size)\nMPI.COMM_WORLD.barrier()")
    outer = Path(inner).with_name("outer.py")
    outer.write_text(f"import subprocess, sys\nsys.exit(subprocess.call([*{LINE!r}, '-n', '2', {inner!r}]))")
    done = mzrun("-n", "1", str(outer))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("inner") == 2


def test_tells_ranks_of_a_terminal(script, monkeypatch):
    monkeypatch.setenv("MPIZERO_TTY", "1")
    done = mzrun("-n", "1", script("print(os.environ.get('MPIZERO_TTY'))"))
    assert done.stdout.strip() == "None"
    leader, follower = os.openpty()
    line = [*LINE, "-n", "1", script("print(os.environ.get('MPIZERO_TTY'), int(os.environ['COLUMNS']) > 0)")]
    with subprocess.Popen(line, stdout=follower) as job:
        os.close(follower)
        assert job.wait(60) == 0
    assert os.read(leader, 1000).strip() == b"1 True"
    os.close(leader)


UCX_LOADED = """
import numpy as np
peer, count = (rank + 1) % size, 1 << 18
came = np.empty(count, "f4")
MPI.COMM_WORLD.Sendrecv(np.arange(count, dtype="f4") + rank, peer, recvbuf=came, source=peer)
right = bool((came == np.arange(count, dtype="f4") + peer).all()) and MPI.COMM_WORLD.allreduce(rank) == 1
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "/libucp" in line}
print("right", right, *loaded, flush=True)
"""


@pytest.mark.skipif(find_spec("libucx") is None, reason="no libucx-cu12 or libucx-cu13 wheel (extras ucx12, ucx13)")
def test_cuda_aware_runs_on_the_ucx_of_the_wheel(script):
    """On host memory: messages go right, and the UCX in the ranks is the wheel's, not Open MPI's own."""
    if vendor_of_library()[0] != "openmpi":
        pytest.skip("the swap needs Open MPI")
    done = mzrun("--cuda-aware", "-n", "2", "--timeout", "60", script(UCX_LOADED))
    folder = Path(find_spec("libucx").submodule_search_locations[0]) / "lib"
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == [["right", "True", f"{folder}/libucp.so.0"]] * 2
