"""Whether messages really carry device pointers: tried in child processes, so that a segmentation fault is theirs.

[Note: canary] An MPI that takes a device pointer for a host one ends the process, or sends what it must not. A child of
a rank cannot join the rank's job, so the canary is a small job of its own on this host, started without what the
launcher said to this rank but with the same settings of the MPI library. It is a pair of ranks, one per GPU where there
are two, wherever a launcher is found that fits the library: two processes on one host take the roads that a single
one's messages to itself do not (IPC, staging by UCX). Where there is none, as under srun alone, or where it starts
nothing, it is one process that sends to itself, which still shows whether the pointers are recognised. Tried nested in
running jobs with the wheels of Open MPI, MPICH and Intel MPI, both ways work with all three. Messages between hosts are
not tried.

Each child says that it begins, and that it has passed; an exit code of 0 alone proves nothing. It ends itself by an
alarm, since a launcher that is killed may leave its ranks running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero
from mpizero.comm.describe import Verdict, describe, takes_device_memory
from mpizero.comm.launch import JOB_VARIABLES, command, environment, find_launcher
from mpizero.comm.raw import mpi
from mpizero.errors import ArgumentError, MpiNotFoundError, must_be
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SIZES", "Verdict", "device_messages", "main", "run_canary", "verdict_of_all"]

SIZES = (8, 1 << 20)
"""Bytes of the messages: one that is sent at once, one that waits for its receiver."""
BEGUN = "canary: begun, ranks: "
PASSED = "canary: passed"
FAILED = "canary: failed: "
KINDS = ("cuda", "host")
BATCH_VARIABLES = re.compile(r"SLURM_|SRUN_|PBS_|LSB_|JSM_|PALS_|FLUX_|COBALT_|PE_HOSTFILE|MV2_COMM_WORLD_")
"""What makes a launcher take the job to be on the hosts of a batch system's allocation."""
GRACE = 5.0
"""Seconds that a launcher has to end its ranks."""
EXIT_FAILED = 3


def run_canary(
    buffers: str = "cuda",
    timeout: float = 60,
    *,
    program: Sequence[str] | None = None,
    alone: bool = False,
) -> Verdict:
    """Send 8 B and 1 MiB between two child processes on this host and compare what comes; see [Note: canary].

    Not collective. It costs the start of two Python processes and of MPI, one to two seconds; on a GPU also a CUDA
    context of each. No exception of the children comes through: whatever happens to them is in the verdict.

    Args:
        buffers: "cuda" for memory of cudaMalloc through CuPy, "host" for host memory, by which the canary itself is
            tried where there is no GPU.
        timeout: seconds after which the children are ended and the verdict is that they hung.
        program: what to run in place of the canary's own child, for tests.
        alone: whether to start one process that sends to itself without looking for a launcher.

    Raises:
        ArgumentError: for other `buffers`, or a time-out that is not above 0.
    """
    if buffers not in KINDS:
        raise ArgumentError(must_be("buffers", f"one of {', '.join(KINDS)}", buffers))
    if not timeout > 0:
        raise ArgumentError(must_be("timeout", "a number of seconds above 0", timeout))
    child = list(program or [sys.executable, "-W", "ignore", "-m", __name__, buffers, str(timeout)])
    job = None if alone else _pair(child)
    if job is not None:
        verdict, spoke = _try(*job, timeout)
        if spoke:
            return verdict
    return _try(child, _clean(), timeout)[0]


def verdict_of_all(comm: Any, run: Callable[[], Verdict] = run_canary, *, wanted: bool | None = None) -> Verdict | None:
    """Run the canary once on each host and return the same verdict on all ranks: passed where all hosts' have.

    Collective over `comm`. Costs what `run_canary` does, at the same time on all hosts, and two small messages.

    Args:
        comm: the ranks that will send to each other.
        run: what the first rank of each host calls.
        wanted: whether to run it at all; None for `MPIZERO_CANARY`, unless `MPIZERO_CUDA_AWARE` has decided already.
            Rank 0's word counts.

    Returns:
        The verdict; None where it is not wanted.
    """
    asked_for = settings().canary and settings().cuda_aware is None
    if not comm.mpi.bcast(asked_for if wanted is None else wanted):
        return None
    mine = run() if comm.node.rank == 0 else None
    told: list[tuple[str, Verdict | None]] = comm.mpi.allgather((socket.gethostname(), mine))
    found = [(host, each) for host, each in told if each is not None]
    failed = next(((host, each) for host, each in found if not each.passed), None)
    if failed is None:
        return found[0][1]
    host, verdict = failed
    return Verdict(passed=False, why=f"{verdict.why}, on {host}" if len(found) > 1 else verdict.why)


def device_messages(comm: Any, run: Callable[[], Verdict] = run_canary) -> tuple[bool, str]:
    """Return whether messages between these ranks may be given device pointers, and why; the same on all ranks.

    Collective over `comm`: the canary where it is wanted, the ladder of `comm/describe.py` on each rank, and a no where
    one of them says no. To be called once and kept: it costs what `verdict_of_all` does, and a small message more.

    Args:
        comm: the ranks that will send to each other.
        run: what runs the canary.
    """
    facts = describe(verdict_of_all(comm, run))
    told: list[tuple[bool, str]] = comm.mpi.allgather((takes_device_memory(facts), facts.gpu_source))
    return next((each for each in told if not each[0]), told[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Be the child: send, receive, compare, and say how it went; returns the exit code.

    Args:
        argv: "cuda" or "host", then the seconds after which it ends itself.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    kind, seconds = words[0], float(words[1]) if len(words) > 1 else 60.0
    # The default action of the alarm ends a process that hangs inside the library, where Python's handlers never run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        module = mpi()
        rank = module.COMM_WORLD.rank
        runtime = _runtime(kind, rank)
        print(f"{BEGUN}{module.COMM_WORLD.size}", flush=True)
        for nbytes in SIZES:
            wrong = _exchange(module, runtime, nbytes)
            if wrong:
                return _fail(f"of {nbytes} bytes {wrong} came wrong")
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the verdict)
        return _fail(f"{type(error).__name__}: {error}")
    print(PASSED, flush=True)
    return 0


def _fail(why: str) -> int:
    print(f"{FAILED}{' '.join(why.split())}", flush=True)
    # Without MPI's own finalizing: a partner that waits for a message would keep it from returning.
    os._exit(EXIT_FAILED)


class _HostRuntime:
    """Be what the canary needs of `cupy.cuda.runtime`, on host memory."""

    memcpyHostToDevice = memcpyDeviceToHost = 0  # noqa: N815  (CuPy's names)

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}

    def malloc(self, nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes)
        self._blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self._blocks[address]

    def memcpy(self, target: int, source: int, nbytes: int, _kind: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def deviceSynchronize(self) -> None:  # noqa: N802  (CuPy's name)
        """Have nothing to wait for."""


def _runtime(kind: str, rank: int) -> Any:
    if kind == "host":
        return _HostRuntime()
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise RuntimeError("CuPy is not installed or does not load: `pip install 'mpizero[cuda13]'`") from error
    runtime.setDevice(rank % runtime.getDeviceCount())
    return runtime


def _exchange(module: Any, runtime: Any, nbytes: int) -> int:
    """Send to the partner, or to oneself, and return how many bytes came wrong."""
    comm = module.COMM_WORLD
    partner = (comm.rank + 1) % comm.size
    sent, right = (_pattern(rank, nbytes) for rank in (comm.rank, (comm.rank - 1) % comm.size))
    came = ~right
    source, target = runtime.malloc(nbytes), runtime.malloc(nbytes)
    try:
        runtime.memcpy(source, sent.ctypes.data, nbytes, runtime.memcpyHostToDevice)
        runtime.memcpy(target, came.ctypes.data, nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()
        into, out_of = (module.buffer.fromaddress(address, nbytes) for address in (target, source))
        requests = [
            comm.Irecv([into, module.BYTE], (comm.rank - 1) % comm.size),
            comm.Isend([out_of, module.BYTE], partner),
        ]
        module.Request.Waitall(requests)
        runtime.memcpy(came.ctypes.data, target, nbytes, runtime.memcpyDeviceToHost)
    finally:
        runtime.free(source)
        runtime.free(target)
    return int(np.count_nonzero(came != right))


def _pattern(rank: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that differ from rank to rank and from place to place, with no period of a power of two."""
    return ((np.arange(nbytes) + 7 * rank + 1) % 251).astype(np.uint8)


def _pair(child: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return command line and environment of two children under a launcher; None where there is none."""
    try:
        launcher = find_launcher(sys.executable)
    except MpiNotFoundError:
        return None
    return command(launcher, 2, child), _clean(environment(launcher, 2))


def _clean(variables: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a job starts afresh on this host, and where this very package is found."""
    variables = dict(os.environ) if variables is None else variables
    left = {
        name: value
        for name, value in variables.items()
        if not JOB_VARIABLES.match(name) and not BATCH_VARIABLES.match(name)
    }
    home = str(Path(mpizero.__file__).parents[1])
    left["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [left.get("PYTHONPATH")])])
    return left


def _try(line: Sequence[str], variables: dict[str, str], timeout: float) -> tuple[Verdict, bool]:
    """Run one job and judge it; the second value says whether a child of the canary's own has spoken."""
    try:
        job = subprocess.Popen(
            line,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Verdict(passed=False, why=f"the canary could not be started ({error})"), False
    with job:
        try:
            output, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = _end(job)
            return Verdict(passed=False, why=f"the canary hung: it took longer than {timeout:g} s"), BEGUN in output
    return _judge(output, errors, job.returncode, timeout), BEGUN in output or FAILED in output


def _end(job: subprocess.Popen[str]) -> str:
    """End a job, politely and then by force, and return what it had said."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.communicate(timeout=GRACE)[0]
    # A rank in a session of its own may hold the pipes open: its alarm ends it.
    for pipe in (job.stdout, job.stderr):
        if pipe is not None:
            pipe.close()
    return ""


def _judge(output: str, errors: str, code: int, timeout: float) -> Verdict:
    failed = re.search(rf"{re.escape(FAILED)}(.*)", output)
    if failed:
        return Verdict(passed=False, why=f"the canary failed: {failed.group(1)}")
    if code == 0 and 0 < output.count(BEGUN) == output.count(PASSED):
        # Under the launcher of another MPI there are two ranks, each alone in its job.
        way = "between two processes" if f"{BEGUN}2" in output else "from a process to itself"
        sizes = " and ".join(f"{nbytes:,} B" for nbytes in SIZES)
        return Verdict(passed=True, why=f"the canary passed: {sizes} came right {way}")
    number = _signal(code, output + errors)
    if number == signal.SIGALRM:
        return Verdict(passed=False, why=f"the canary hung: it took longer than {timeout:g} s")
    if number is not None:
        advice = "; UCX_MEMTYPE_CACHE=n may help under UCX" if number == signal.SIGSEGV else ""
        return Verdict(passed=False, why=f"the canary was ended by {_name(number)}{advice}")
    if code == 0:
        return Verdict(passed=False, why="the canary ended without saying that it passed")
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return Verdict(passed=False, why=f"the canary ended with exit code {code}{f' ({last})' if last else ''}")


def _signal(code: int, said: str) -> int | None:
    """Return the number of the signal that ended a child, None where none did.

    Open MPI's launcher returns it as a shell does. MPICH's and Intel's say it in words, also that of the ranks which
    they have killed themselves.
    """
    if code < 0 or 128 < code < 128 + signal.NSIG:
        return abs(code) if code < 0 else code - 128
    told = [int(number) for number in re.findall(r"\bsignal:? (\d+)", said, re.IGNORECASE)] if code else []
    return next((number for number in told if number not in {signal.SIGKILL, signal.SIGTERM}), None)


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main())
