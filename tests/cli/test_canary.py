"""The canary: whatever happens to its children, the caller gets a verdict in words, and nothing is left running.

The CuPy of these children is a stand-in whose device memory is host memory, or, as on a real GPU, memory that the
processor cannot touch: an MPI that is handed its pointers is killed.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mpizero.comm import canary
from mpizero.comm.canary import run_canary
from mpizero.comm.launch import Launcher
from mpizero.errors import ArgumentError, MpiNotFoundError

STAND_IN = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
how, shadows = os.environ["CUPY_STAND_IN"], {}
memcpyHostToDevice, memcpyDeviceToHost = 1, 2
deviceSynchronize = lambda: None
getDeviceCount = lambda: int(os.environ.get("CUPY_COUNT", 2))
free = lambda address: None

def setDevice(number):
    print("device", number, flush=True)

def malloc(nbytes):
    rights = 0 if how == "untouchable" else mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, nbytes, rights, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    shadows[address] = ctypes.create_string_buffer(nbytes)
    return address

def memcpy(target, source, nbytes, kind):
    if how == "untouchable":
        target, source = (ctypes.addressof(shadows[each]) if each in shadows else each for each in (target, source))
    ctypes.memmove(target, source, nbytes)
    if how == "wrong" and kind == memcpyDeviceToHost and nbytes > 8:
        ctypes.memset(target + nbytes - 3, 255, 3)
"""


@pytest.fixture
def cupy(tmp_path, monkeypatch):
    """Give the children a CuPy: "right", "wrong" or "untouchable"."""

    def cupy(how):
        folder = tmp_path / "cupy" / "cuda"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "runtime.py").write_text(STAND_IN)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("CUPY_STAND_IN", how)

    return cupy


def child(body):
    return [sys.executable, "-c", f"import os, signal, time\n{textwrap.dedent(body)}"]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_host_memory_passes_between_two_processes():
    verdict = run_canary("host")
    assert verdict.passed, verdict.why
    assert verdict.why == "the canary passed: 8 B and 1,048,576 B came right between two processes"


def test_host_memory_passes_alone():
    verdict = run_canary("host", alone=True)
    assert verdict.passed, verdict.why
    assert "from a process to itself" in verdict.why


@pytest.mark.parametrize("alone", [True, False])
def test_device_memory_that_mpi_can_read_passes(cupy, alone):
    cupy("right")
    verdict = run_canary(alone=alone)
    assert verdict.passed, verdict.why


@pytest.mark.parametrize("alone", [True, False])
def test_device_pointers_given_to_an_mpi_that_takes_them_for_host_ones(cupy, alone):
    cupy("untouchable")
    verdict = run_canary(alone=alone, timeout=30)
    assert not verdict.passed
    assert "was ended by signal 11 (SIGSEGV)" in verdict.why


def test_wrong_values_are_counted(cupy):
    cupy("wrong")
    verdict = run_canary(alone=True)
    assert not verdict.passed
    assert verdict.why == "the canary failed: of 1048576 bytes 3 came wrong"


def test_without_cupy_the_extra_is_named(monkeypatch, tmp_path):
    package = tmp_path / "cupy"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no cupy here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verdict = run_canary(alone=True)
    assert not verdict.passed
    assert "`pip install 'mpizero[cuda13]'`" in verdict.why


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by signal 11 (SIGSEGV); UCX_MEMTYPE_CACHE=n may help"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "was ended by signal 6 (SIGABRT)"),
        ("os._exit(128 + signal.SIGSEGV)", "was ended by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGALRM)", "hung: it took longer than 30 s"),
        ("pass", "ended without saying that it passed"),
        ("print('canary: begun, ranks: 2')", "ended without saying that it passed"),
        ("print('canary: begun, ranks: 1\\ncanary: begun, ranks: 1\\ncanary: passed')", "ended without saying"),
        ("print('canary: passed')", "ended without saying that it passed"),
        ("print('canary: begun, ranks: 1\\ncanary: passed', flush=True); os._exit(9)", "ended with exit code 9"),
        ("raise SystemExit('MPI is broken')", "ended with exit code 1 (MPI is broken)"),
    ],
)
def test_a_child_that_does_not_pass_is_told_of_in_words(body, why):
    verdict = run_canary("host", 30, program=child(body), alone=True)
    assert not verdict.passed
    assert verdict.why.startswith(f"the canary {why}")


def test_a_child_that_dies_beside_another_is_told_of():
    body = "print('canary: begun, ranks: 2', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    verdict = run_canary("host", 30, program=child(body))
    assert not verdict.passed
    assert "signal 11 (SIGSEGV)" in verdict.why


@pytest.mark.parametrize(
    ("code", "said", "number"),
    [
        (11, "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)", 11),
        (255, "RANK 0 KILLED BY SIGNAL: 9 (Killed)\nRANK 1 KILLED BY SIGNAL: 11 (Segmentation fault)", 11),
        (139, "", 11),
        (-11, "", 11),
        (1, "a rank failed", None),
        (0, "signal 11", None),
    ],
)
def test_signals_that_launchers_report(code, said, number):
    assert canary._signal(code, said) == number


@pytest.mark.parametrize("alone", [True, False])
def test_a_child_that_hangs_is_ended(tmp_path, alone):
    body = f"""
        print('canary: begun, ranks: 2', flush=True)
        open('{tmp_path}/' + str(os.getpid()), 'w')
        time.sleep(100)
    """
    seconds, start = 1 if alone else 4, time.monotonic()
    verdict = run_canary("host", seconds, program=child(body), alone=alone)
    assert verdict.why == f"the canary hung: it took longer than {seconds:g} s"
    assert time.monotonic() - start < 60
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == (1 if alone else 2)
    deadline = time.monotonic() + 5
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if running(pid)]


def test_the_child_ends_itself():
    """Whoever ended its parent: a child that hangs inside MPI has no other way out."""
    code = "import time; from mpizero.comm import canary; canary._exchange = lambda *_: time.sleep(100); "
    code += "canary.main(['host', '0.5'])"
    done = subprocess.run([sys.executable, "-c", code], env=canary._clean(), check=False, timeout=60)
    assert done.returncode == -signal.SIGALRM


def test_a_launcher_that_starts_nothing_leaves_the_canary_alone(monkeypatch, tmp_path):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    broken = Launcher(path=str(program), vendor="mpich", version="9")
    monkeypatch.setattr(canary, "find_launcher", lambda _: broken)
    assert "from a process to itself" in run_canary("host").why

    def none(_):
        raise MpiNotFoundError("none")

    monkeypatch.setattr(canary, "find_launcher", none)
    assert "from a process to itself" in run_canary("host").why


def test_the_children_start_afresh_with_the_same_settings_of_mpi(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_JOB_ID", "PBS_JOBID", "PALS_LOCAL_RANKID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/wheel")
    variables = canary._clean()
    assert not [name for name in variables if name.startswith(("OMPI_COMM", "PMI", "SLURM_", "PBS_", "PALS_"))]
    assert (variables["OMPI_MCA_pml"], variables["LD_LIBRARY_PATH"]) == ("ucx", "/wheel")
    assert Path(variables["PYTHONPATH"].split(os.pathsep)[0], "mpizero", "comm", "canary.py").exists()


@pytest.mark.parametrize(("buffers", "timeout"), [("managed", 60), ("cuda", 0), ("cuda", float("nan"))])
def test_bad_arguments(buffers, timeout):
    with pytest.raises(ArgumentError, match=r"buffers must be one of cuda, host|timeout must be a number of seconds"):
        run_canary(buffers, timeout)
