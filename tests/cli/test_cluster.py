"""bin/cluster: hosts, jobs over them and their removal, where root may make namespaces; see unit/test_cluster too."""

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.hosts import why_not
from helpers.pages import Left

from mpizero.comm.launch import vendor_of_library

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, str(ROOT / "bin" / "cluster")]
PAGES = Left("tests/cli/test_cluster.py")
LIMIT = "60"
"""Seconds after which a job hangs for sure."""


@pytest.fixture(scope="module")
def able():
    reason = why_not() or ("" if vendor_of_library()[0] == "openmpi" else "needs Open MPI, whose agent enters hosts")
    if reason:
        pytest.skip(reason)


@pytest.fixture
def name(able):
    """Be a cluster's name that nobody else has; its hosts are gone after the test."""
    name = "t" + "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=5))
    yield name
    cluster("down", "--name", name)


@pytest.fixture(scope="module")
def hosts(able):
    """Three hosts."""
    name = "h" + "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=5))
    try:
        made = cluster(*named(PAGES.command("bin/cluster up"), name))
        assert made.returncode == 0, made.stderr
        yield name
    finally:
        cluster(*named(PAGES.command("bin/cluster down"), name))
    assert leftovers(name) == []


@pytest.fixture
def run(hosts, tmp_path):
    """Run a script's text over the three hosts; return exit code, lines on stdout, and stderr."""

    def start(body, *args, words=None, **variables):
        """Start it by a page's words, or by `bin/cluster run` with the arguments."""
        words = words or ["bin/cluster", "run", *args, "--", "python", "script.py"]
        script = tmp_path / words[-1]
        script.write_text(f"import os, sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n{body}")
        done = cluster(*named(words, hosts, "--timeout", LIMIT), cwd=tmp_path, **variables)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return start


def cluster(*args, cwd=None, **variables):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **variables}
    return subprocess.run([*LINE, *args], capture_output=True, text=True, timeout=90, check=False, env=env, cwd=cwd)


def named(words, name, *more):
    """Return the arguments of `bin/cluster COMMAND ...` for a cluster of another name, with more options."""
    program, command, *rest = words
    assert program == "bin/cluster"
    return [command, "--name", name, *more, *rest]


def ip(*words):
    line = [shutil.which("ip"), *words]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout


def leftovers(name):
    namespaces = ip("netns").split()
    links = [link for _, link in socket.if_nameindex()]
    folders = [path.name for path in Path("/run").glob("mpizero-cluster/*")]
    return [part for part in (*namespaces, *links, *folders) if name in part]


def crossed(name, host):
    """Return the bytes that a host has sent over its link."""
    return int(Path(f"/sys/class/net/{name}-port{host}/statistics/rx_bytes").read_text())


ALL_REDUCE = """
import numpy as np
import mpizero
from mpizero.collectives import algorithms_of
comm = mpizero.world()
node = world.Split_type(MPI.COMM_TYPE_SHARED)
on_node = node.allgather(MPI.Get_processor_name())
names = sys.argv[1:] or ["auto", "native", *(entry.name for entry in algorithms_of("all_reduce"))]
for name in names:
    for count in (0, 1, 7, 1000, 1 << (18 if len(names) == 2 else 14)):
        x = (np.arange(count) % 251 + world.rank).astype(np.float32)
        total = sum((np.arange(count) % 251 + rank).astype(np.float32) for rank in range(world.size))
        assert (mpizero.all_reduce(x, algorithm=name) == total).all(), (name, count)
host = MPI.Get_processor_name()
told = world.gather(f"{world.rank} {host} {set(on_node) == {host}} {node.size} {comm.node.size}")
if world.rank == 0:
    print("\\n".join(told), flush=True)
"""


def test_four_ranks_on_two_hosts(hosts, run):
    """Ranks of a host are one node, other hosts are others, and what they say to each other crosses the links."""
    before = crossed(hosts, 0), crossed(hosts, 1)
    body = f"sys.argv[1:] = ['ring', 'direct']\n{ALL_REDUCE}"
    code, lines, errors = run(body, words=PAGES.command("bin/cluster run -n 4"))
    assert code == 0, errors
    assert lines == [f"{rank} {hosts}{rank // 2} True 2 2" for rank in range(4)]
    # Ring and direct exchange both send 2^18 floats or more from either host.
    assert min(crossed(hosts, 0) - before[0], crossed(hosts, 1) - before[1]) > 2**20


ON_DEVICES = """
import torch
import mpizero
from mpizero.collectives import algorithms_of
from mpizero.testing.host_runtime import HostRuntime, stand_in
comm = mpizero.world()
runtime = HostRuntime(seed=comm.rank)
stream = runtime.streamCreateWithFlags(1)
runtime.users = [stream]
def seen(x):
    result, event = torch.empty_like(x), runtime.eventCreateWithFlags(0)
    runtime.enqueue(stream, lambda: result.copy_(x))
    runtime.eventRecord(event, stream)
    runtime.eventSynchronize(event)
    return result
with stand_in(runtime) as device:
    for count in (1, 7, 70_001):
        parts = [torch.arange(count) % 7 + rank for rank in range(comm.size)]
        for name in ("auto", "native", *(entry.name for entry in algorithms_of("all_reduce"))):
            x = torch.full((count,), 77.0)
            runtime.enqueue(stream, lambda: x.copy_(parts[comm.rank]))
            mpizero.all_reduce(x, algorithm=name)
            assert torch.equal(seen(x), sum(parts).float()), (name, count)
    if comm.rank == 0:
        print(*comm.side(device).wires.kinds, flush=True)
"""


def test_device_memory_on_two_hosts(hosts, run):
    """Loads between the ranks of a host, slots in host memory between hosts, sums on the device, in one schedule."""
    pytest.importorskip("torch")
    code, lines, errors = run(ON_DEVICES, "-n", "4", "--per-host", "2")
    assert code == 0, errors
    assert lines == ["peer peer staged staged"]


TORCH = """
import socket
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import mpizero.c10d
def check(group, ranks):
    for count in (1, 100_000):
        x = torch.full((count,), float(world.rank))
        dist.all_reduce(x, group=group)
        assert x.eq(sum(ranks)).all()
    found = [None] * len(ranks)
    dist.all_gather_object(found, world.rank, group)
    assert found == ranks
def check_all():
    check(None, [0, 1, 2, 3])
    for half in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]):
        groups = [dist.new_group(ranks) for ranks in half]
        mine = world.rank not in half[0]
        check(groups[mine], half[mine])
    mesh = init_device_mesh("cpu", (2, 2))
    check(mesh.get_group(0), [world.rank % 2, world.rank % 2 + 2])
    check(mesh.get_group(1), [world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    out = torch.empty(50_000)
    ops = [dist.P2POp(dist.isend, torch.full_like(out, world.rank), (world.rank + 1) % 4)]
    for work in dist.batch_isend_irecv([*ops, dist.P2POp(dist.irecv, out, (world.rank - 1) % 4)]):
        work.wait()
    assert out.eq((world.rank - 1) % 4).all()
    dist.destroy_process_group()
here = world.bcast(socket.gethostbyname(socket.gethostname()))
with socket.create_server((here if world.rank == 0 else "", 0)) as taken:
    port = world.bcast(taken.getsockname()[1])
socket.gethostname = socket.getfqdn = lambda: "nobody.invalid"
mpizero.c10d.init()
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
told = world.gather(f"{store.host} {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}")
check_all()
os.environ.update(RANK=str(world.rank), WORLD_SIZE="4", MASTER_ADDR=here, MASTER_PORT=str(port))
dist.init_process_group("mpizero")
check_all()
if world.rank == 0:
    print("\\n".join(told), flush=True)
"""


def test_torch_distributed_on_two_hosts(hosts, run):
    """The store is at an address that the other host reaches where rank 0's name is nobody's; groups cross hosts."""
    pytest.importorskip("torch")
    code, lines, errors = run(TORCH, "-n", "4", "--per-host", "2")
    assert code == 0, errors
    assert lines == [f"10.77.0.1 {rank % 2} of 2" for rank in range(4)]


def test_k15_uneven_hosts_round_robin(hosts, run):
    """K15: 3, 2 and 1 ranks, placed in turn: every algorithm has the right sums."""
    code, lines, errors = run(ALL_REDUCE, words=PAGES.command("bin/cluster run --per-host"))
    assert code == 0, errors
    sizes = (3, 2, 1)
    placed = [0, 1, 2, 0, 1, 0]
    assert lines == [f"{r} {hosts}{host} True {sizes[host]} {sizes[host]}" for r, host in enumerate(placed)]


def test_ranks_have_the_environment_and_addresses(hosts, run):
    body = "import socket\nprint(os.environ['MPIZERO_TIMEOUT'], os.environ['OMP_NUM_THREADS'], os.environ['MINE'], "
    body += "os.environ['PYTHONPATH'], socket.gethostbyname(MPI.Get_processor_name()), flush=True)"
    code, lines, errors = run(body, "-n", "3", MPIZERO_TIMEOUT="33", OMP_NUM_THREADS="1", MINE="a b'c$d")
    assert code == 0, errors
    assert Counter(lines) == Counter(f"33 1 a b'c$d {ROOT} 10.77.0.{host}" for host in (1, 2, 3))


def test_arguments_and_exit_code_pass_through(hosts):
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = cluster("run", "--name", hosts, "-n", "1", "--", sys.executable, "-c", code, "--", "-n", "a b", "$HOME", "'")
    assert done.returncode == 3
    assert """['--', '-n', 'a b', '$HOME', "'"]""" in done.stdout


def running(pid):
    """Whether a process is there; one that is dead but not yet reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SLEEPS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(300)"


@contextlib.contextmanager
def waiting(hosts, folder, *args):
    """Start a job whose ranks sleep; a job that does not end is killed."""
    line = [*LINE, "run", "--name", hosts, *args, "--per-host", "1", "--", sys.executable, "-c", SLEEPS, str(folder)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        try:
            yield job
        finally:
            job.kill()


def wait_for(count, folder):
    deadline = time.monotonic() + 30
    while len(pids := [int(path.name) for path in folder.iterdir()]) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == count
    return pids


def test_timeout_ends_the_ranks_of_all_hosts(hosts, tmp_path):
    with waiting(hosts, tmp_path, "--timeout", "4") as job:
        pids = wait_for(3, tmp_path)
        assert job.wait(30) == 124
        assert "the job was ended: it took longer than --timeout 4 s" in job.stderr.read()
    assert not list(filter(running, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job(hosts, tmp_path, number):
    with waiting(hosts, tmp_path) as job:
        pids = wait_for(3, tmp_path)
        job.send_signal(number)
        assert job.wait(30) == 128 + number
    assert not list(filter(running, pids))


def test_a_killed_mpirun_leaves_no_ranks(hosts, tmp_path):
    with waiting(hosts, tmp_path) as job:
        pids = wait_for(3, tmp_path)
        # The shells and tools on the way into the first host have become mpirun.
        os.kill(int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()), signal.SIGKILL)
        assert job.wait(30) == 128 + signal.SIGKILL
    assert not list(filter(running, pids))


def test_status_shows_hosts_addresses_and_rates(hosts):
    shown = cluster(*named(PAGES.command("bin/cluster status"), hosts))
    assert shown.returncode == 0
    rows = [line.split() for line in shown.stdout.splitlines()[2:]]
    assert rows == [[f"{hosts}{host}", f"10.77.0.{host + 1}", "1Gbit", "1Gbit", "0"] for host in range(3)]


def test_a_second_up(hosts):
    same = cluster("up", "--name", hosts, "--hosts", "3", "--rate", "1000mbit")
    assert (same.returncode, same.stdout.strip()) == (0, f"{hosts} is up already: 3 hosts, --rate 1gbit")
    other = cluster("up", "--name", hosts, "--hosts", "2")
    assert other.returncode == 2
    assert f"`bin/cluster down --name {hosts}` first" in other.stderr


@pytest.mark.parametrize("args", [("--per-host", "9,9,9,9"), ("-n", "5", "--per-host", "1")])
def test_a_job_that_the_hosts_have_no_place_for(hosts, args):
    done = cluster("run", "--name", hosts, *args, "--", "python")
    assert done.returncode == 2
    assert "must be" in done.stderr


def test_a_program_that_is_not_there(hosts):
    done = cluster("run", "--name", hosts, "-n", "1", "--", "no-such-program")
    assert done.returncode == 2
    assert "the program must be a command that is found (got 'no-such-program')" in done.stderr


def test_up_and_down_leave_nothing(name, tmp_path):
    assert cluster("up", "--name", name, "--rate", "none").returncode == 0
    assert "unshaped" in cluster("status", "--name", name).stdout
    assert len(leftovers(name)) == 6
    with waiting(name, tmp_path) as job:
        pids = wait_for(2, tmp_path)
        done = cluster("down", "--name", name)
        assert job.wait(30) != 0
    assert done.returncode == 0, done.stderr
    assert not list(filter(running, pids))
    assert "2 hosts removed" in done.stdout
    assert leftovers(name) == []
    assert "was not up" in cluster("down", "--name", name).stdout


def test_what_an_interrupted_up_left_is_refused_and_removed(name):
    ip("netns", "add", f"mpizero-{name}0")
    ip("link", "add", f"{name}-bridge", "type", "bridge")
    for line in ("up", "status", "run -n 1"):
        done = cluster(*line.split(), "--name", name, *(["--", "true"] if "run" in line else []))
        assert done.returncode == 2, line
        assert f"`bin/cluster down --name {name}`" in done.stderr
    assert cluster("down", "--name", name).returncode == 0
    assert leftovers(name) == []


def test_hosts_that_are_not_whole_are_refused(name):
    assert cluster("up", "--name", name).returncode == 0
    ip("link", "delete", f"{name}-port1")
    for line in ("up", "status"):
        done = cluster(line, "--name", name)
        assert done.returncode == 2, line
        assert f"`bin/cluster down --name {name}`" in done.stderr
    assert f"must be whole ({name}-port1 is missing)" in done.stderr


def test_an_up_that_fails_half_way_leaves_nothing(name, tmp_path):
    program = tmp_path / "tc"
    program.write_text("#!/bin/sh\necho no such kind of qdisc >&2\nexit 2\n")
    program.chmod(0o755)
    done = cluster("up", "--name", name, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 2
    assert f"`tc qdisc add dev {name}-port0 root tbf" in done.stderr
    assert "failed (no such kind of qdisc)" in done.stderr
    assert leftovers(name) == []


LOST = """
import os, pathlib, socket, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
hosts = world.gather(socket.gethostname())
if world.rank == 0:
    print(os.environ.get("MPIZERO_RESTART"), *hosts, flush=True)
    pathlib.Path("up").touch()
while "MPIZERO_RESTART" not in os.environ:
    world.Barrier()
    time.sleep(0.02)
"""


def test_a_lost_host_is_left_out_of_a_restart(name, tmp_path):
    """All of a host's processes die at once, and it does not answer again; mpirun may say 0 of it."""
    assert cluster("up", "--name", name, "--rate", "none").returncode == 0
    up, agent = tmp_path / "up", f"/run/mpizero-cluster/{name}/agent"
    program, *words, script = PAGES.command("bin/mzrun")
    (tmp_path / script).write_text(LOST)
    words[words.index("a:2,b:2")] = f"{name}0:2,{name}1:2"
    flags = f"--prtemca plm_ssh_agent {agent} --bind-to none"
    line = [sys.executable, str(ROOT / program), "--timeout", LIMIT, "--mpi-args", flags, *words, script]
    env = {**os.environ, "OMPI_MCA_btl_tcp_if_include": "net0", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    inside = [agent, f"{name}0", shlex.join(line)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(inside, env=env, cwd=tmp_path, **pipes) as job:
        try:
            deadline = time.monotonic() + 60
            while not up.exists() and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in ip("netns", "pids", f"mpizero-{name}1").split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", f"mpizero-{name}1")
            out, err = job.communicate(timeout=90)
        finally:
            job.kill()
    assert job.returncode == 0, err
    starts = [line for line in out.splitlines() if line.startswith(("None ", "1 "))]
    assert starts == [f"None {name}0 {name}0 {name}1 {name}1", f"1 {name}0 {name}0"]
    assert f"; restart 1 of 5 on 2 ranks, without {name}1" in err
