"""hpc/slurm on a Slurm of two hosts that bin/slurm makes, where root may and Slurm is installed; see test_hpc too."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.hosts import why_not
from helpers.pages import Left

from mpizero.comm.launch import vendor_of_library

ROOT = Path(__file__).parents[2]
PAGES = Left("tests/cli/test_slurm.py")
MPICH = Path(os.environ.get("MPIZERO_TEST_MPICH", ROOT / ".venv-mpich" / "lib" / "libmpi.so.12"))
"""MPICH's library; mpi4py's wheel loads it in place of its environment's own."""
STEPS = 10
PATIENCE = 240
GIT = """#!/bin/sh
test "$1 $2" = "clone URL-OF-MPIZERO" && mkdir "$3" && cp -r {root}/hpc "$3" &&
    ln -s {root}/bin {root}/examples {root}/mpizero {root}/constraints.txt "$3"
"""
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python" && cp "${{0%/*}}/mpizero" "$3/bin" ;;
"-m pip") shift && PYTHONPATH={root}/tests:{root} exec {python} -m helpers.parsing "$@" ;;
*) exec {python} "$@" ;;
esac
"""
"""What stands for git, which copies this checkout, and for the login node's Python, whose pip only parses."""
TRAIN = """
import os, pathlib, sys, time
if sys.argv[1:]:
    print("trained with", *sys.argv[1:], os.environ["CUDA_DEVICE_ORDER"], flush=True)
    sys.exit()
import mpizero as mz
again, rank = int(os.environ["MPIZERO_RESTART"]), mz.world().rank
stop = mz.stop_requested()
print("waits" if not again else "goes on", flush=True)
while not again and not stop:
    time.sleep(0.02)
    stop = mz.stop_requested()
if again and rank == 0:
    pathlib.Path("run").mkdir()
    pathlib.Path("run", "done").touch()
print("ends, stopped", stop, flush=True)
"""
"""A reader's own program: with arguments one that needs GPUs, without one that is stopped and then reaches its end."""
LOSS = re.compile(r"validation loss +[\d.]+ -> ([\d.]+)")


@pytest.fixture(scope="module")
def slurm():
    """Be the name of a cluster with Slurm; its hosts and daemons are gone afterwards."""
    reason = why_not("slurmctld", "slurmd", "munged", "sbatch")
    reason = reason or ("" if vendor_of_library()[0] == "openmpi" else "needs Open MPI")
    if reason:
        pytest.skip(reason)
    pytest.importorskip("torch")
    name = "s" + "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=5))
    before = Path("/etc/hosts").read_text()
    line = named(PAGES.command("bin/slurm up"), name)
    made = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    yield name
    subprocess.run(named(PAGES.command("bin/slurm down"), name), check=True, timeout=60)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if name.encode() in read(path)]
    assert not Path("/run/mpizero-cluster", name).exists()
    assert Path("/etc/hosts").read_text() == before


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


@pytest.fixture(scope="module")
def clone(slurm, tmp_path_factory):
    """Follow hpc/README.md as far as `sbatch`; return the checkout, which has .venv-hpc."""
    folder = tmp_path_factory.mktemp("login")
    words = {"root": ROOT, "python": sys.executable}
    tools = {"git": GIT, "python3": PYTHON, "mpizero": '#!/bin/sh\nexec {python} -m mpizero "$@"\n'}
    (folder / "tools").mkdir()
    for name, text in tools.items():
        (folder / "tools" / name).write_text(text.format(**words))
        (folder / "tools" / name).chmod(0o755)
    lines = PAGES.command("git clone"), PAGES.command("cd mpizero"), PAGES.command("hpc/install.sh")
    typed = ["bash", "-euc", "\n".join(map(shlex.join, lines))]
    path = os.pathsep.join([str(folder / "tools"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    done = subprocess.run(typed, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"-e {folder}/mpizero[torch,openmpi]" in done.stderr.replace("'", "")
    assert ".venv-hpc is ready for site plain" in done.stdout
    (folder / "mpizero" / "train.py").write_text(TRAIN)
    return folder / "mpizero"


def named(words, name):
    """Return a page's `bin/slurm COMMAND ...` for a cluster of another name."""
    program, command, *rest = words
    assert program == "bin/slurm"
    return [sys.executable, str(ROOT / program), command, "--name", name, *rest]


class LoginNode:
    """Where commands are typed: the first host, in the checkout that `clone` has made."""

    def __init__(self, slurm, checkout):
        self.slurm, self.checkout = slurm, checkout

    def typed(self, *words, **variables):
        """Return how a command is run there: a line, with environment and folder."""
        tools = [str(self.checkout.parent / "tools"), str(Path(sys.executable).parent), os.environ["PATH"]]
        env = {**os.environ, "PATH": os.pathsep.join(tools), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        line = named(["bin/slurm", "run", "--", *words], self.slurm)
        return line, {"env": {**env, **variables}, "cwd": self.checkout}

    def run(self, *words, check=True, **variables):
        line, where = self.typed(*words, **variables)
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=check, **where)

    def submit(self, words, *more, options=("--ntasks-per-node=1",), **variables):
        """Submit by a page's words, with more options and arguments; return the job's number and its output's file."""
        program, *rest = words
        assert program == "sbatch"
        number = self.run(program, "--parsable", *options, *rest, *map(str, more), **variables).stdout.strip()
        return number, self.checkout / f"slurm-{number}.out"


@pytest.fixture(scope="module")
def login(slurm, clone):
    return LoginNode(slurm, clone)


def wait_for(output, *marks, times=1):
    """Wait until a job's output has one of the marks, so many times; return all of it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        said = output.read_text() if output.exists() else ""
        if any(said.count(mark) >= times for mark in marks):
            return said
        time.sleep(0.05)
    raise AssertionError(output.read_text() if output.exists() else "nothing was written")


def training(text, *more):
    return ["examples/train_gpt.py", "--steps", STEPS, "--batch", 1, "--exact", 2, "--data", text, *more]


def by_srun():
    """Return the variables that have srun start MPICH's ranks; none where there is no MPICH."""
    if not MPICH.exists():
        return {}
    return {"MPIZERO_SITE": "mpich", "MPI4PY_LIBMPI": str(MPICH), "MPIZERO_BIND": "say"}


@contextmanager
def looked_at(folder):
    """Inside the `with` block somebody looks at the jobs' output; the list gets what was seen."""
    look, seen = PAGES.command("tail"), []
    line = ["bash", "-c", f"exec {' '.join(look)}"]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
        yield seen
        tail.terminate()
        seen.append(tail.communicate()[0])


@contextmanager
def waited_for(line, **where):
    """Inside the `with` block `sbatch --wait` waits. It looks after 2, 10 and 42 s: that is not worth while here."""
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, start_new_session=True, **where) as process:
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def jobs(login, clone, text):
    """Return what three jobs say, and what somebody saw who looked at the first.

    They are a training by mpirun that is signalled in between, one, by srun, that is not, and the script that is in
    docs/restarts.md, signalled too.
    """
    number, signalled = login.submit(
        PAGES.command("sbatch hpc/slurm/cpu.sbatch"), *training(text, "--save", "runs/here")
    )
    (clone / "own.sbatch").write_text(PAGES.script("docs/restarts.md"))
    own_number, own = login.submit(["sbatch", "own.sbatch"], options=())
    whole, program = clone / "whole.out", PAGES.command("bin/slurm run -- sbatch")[3:]
    program[1:1] = [f"--output={whole}", "--ntasks-per-node=1"]
    line, where = login.typed(*program, *map(str, training(text)), **by_srun())
    with waited_for(line, **where):
        wait_for(signalled, "step ", "rror")
        with looked_at(clone) as seen:
            # What --signal=B:USR1@300 has Slurm do five minutes ahead of the end.
            login.run("scancel", "--batch", "--signal=USR1", number)
            wait_for(own, "waits", "rror")
            login.run("scancel", "--batch", "--signal=USR1", own_number)
            wait_for(signalled, "goes back into the queue", "rror")
            wait_for(signalled, "validation loss", times=2)
        said = wait_for(whole, f"{STEPS} steps", "rror")
    return signalled.read_text(), said, wait_for(own, "stopped False", "rror", times=2), seen[0]


def test_a_job_of_mpirun_that_is_signalled_saves_resumes_and_ends_with_the_losses_of_an_undisturbed_one(jobs):
    signalled, whole, _, shown = jobs
    assert "validation loss" in shown
    assert "site plain: mpirun -n 2 --map-by ppr:1:node" in signalled
    assert signalled.count("SIGUSR1 goes on to the ranks") == 1
    done = [int(steps) for steps in re.findall(r"stage 3 on 2 ranks, (\d+) steps", signalled)]
    assert sum(done) == STEPS
    assert 1 <= done[0] < STEPS
    # exact: the same bits, whoever started the ranks.
    assert LOSS.findall(signalled)[-1] == LOSS.findall(whole)[-1]


def test_a_script_of_ones_own_is_signalled_put_back_and_ends(jobs, clone):
    lines = [line.strip() for line in jobs[2].splitlines() if "waits" in line or "goes on" in line or "ends" in line]
    assert sorted(lines) == sorted(["waits", "ends, stopped True", "goes on", "ends, stopped False"] * 2)
    assert (clone / "run" / "done").exists()


def test_a_job_of_srun_trains_with_mpich(jobs):
    if not by_srun():
        pytest.skip(f"needs MPICH at {MPICH}, which `bin/check` without arguments installs")
    said = jobs[1]
    assert "srun --mpi=pmi2 --nodes=2 --ntasks=2" in said
    assert said.count("bind.sh: rank 0 of 1 on ") == 2
    assert f"stage 3 on 2 ranks, {STEPS} steps" in said


def test_a_wrong_type_of_mpi_is_said_before_any_rank_starts(login, text):
    script = PAGES.command("sbatch hpc/slurm/cpu.sbatch")
    _, output = login.submit(script, *training(text), MPIZERO_LAUNCHER="srun --mpi=none")
    said = wait_for(output, "remedy")
    assert "srun --mpi=none does not start ranks of Open MPI" in said
    assert "write `srun --mpi=pmix`" in said
    assert "ranks on 2 nodes" not in said


def test_the_same_on_the_login_node(login):
    done = login.run(*PAGES.command(".venv-hpc/bin/mpizero doctor"), check=False)
    assert done.returncode == 1
    assert "srun --mpi=pmi2 does not start ranks of Open MPI" in done.stdout + done.stderr


def test_a_whole_look_and_a_measurement_are_jobs_like_any_other(login):
    _, doctor = login.submit(PAGES.command("sbatch hpc/slurm/cpu.sbatch -m mpizero doctor"))
    _, perf = login.submit(PAGES.command("sbatch hpc/slurm/cpu.sbatch bin/all_reduce_perf"))
    assert "2 ranks on 2 hosts" in wait_for(doctor, "GB/s are", "rror")
    assert "# ranks 2  hosts 2  ranks per host 1" in wait_for(perf, "# Out of bounds values : 0 OK", "rror")
    shown = login.run(*PAGES.command("bin/slurm run -- sinfo")[3:]).stdout
    assert re.search(r"^all\* .* 2 +\w+ s\w+\[0-1\]$", shown, re.MULTILINE), shown


def test_every_rank_is_alone_says_so_with_what_to_write(login):
    line = ["srun", "--mpi=pmi2", "-n", "2", sys.executable, "-c", "import mpizero; mpizero.world()"]
    done = login.run(*line, check=False)
    assert done.returncode != 0
    assert "the number of ranks must be 2, as the launcher says" in done.stderr
    assert "srun started the ranks with --mpi=pmi2, which this library does not speak" in done.stderr
    assert "write `srun --mpi=pmix`" in done.stderr


def test_a_gpu_job_without_gpus_ends_at_once(login):
    """The hosts only pretend to have GPUs: Slurm hands them out, bind.sh finds none."""
    options = ("--ntasks-per-node=2", "--gpus-per-node=2")
    _, output = login.submit(["sbatch", "hpc/slurm/gpu.sbatch", "-c", "print('trained')"], options=options)
    said = wait_for(output, "bind.sh: 2 ranks on ")
    assert "see 0 GPUs, one for each is needed" in said
    assert "--gpus-per-node=2" in said
    assert "\ntrained" not in said


def test_a_gpu_job_with_gpus_that_a_folder_plays(login, tmp_path):
    for number in range(4):
        gpu = tmp_path / f"bus/pci/devices/0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        for name, value in {"vendor": "0x10de", "class": "0x030200", "numa_node": "-1"}.items():
            (gpu / name).write_text(f"{value}\n")
    _, output = login.submit(PAGES.command("sbatch --nodes"), options=(), MPIZERO_SYS=str(tmp_path))
    wait_for(output, "trained with --lr 3e-4 PCI_BUS_ID", times=8)


@pytest.mark.slow
def test_a_job_near_its_time_limit_saves_and_resumes(login, text, tmp_path):
    """Slurm looks at time limits every 30 s: of a minute's job that is to be told 20 s ahead, some time before that."""
    options = ("--ntasks-per-node=1", "--time=1", "--signal=B:USR1@20")
    script = PAGES.command("sbatch hpc/slurm/cpu.sbatch")
    _, output = login.submit(script, *training(text, "--save", tmp_path, "--steps", 1000), options=options)
    said = wait_for(output, "goes back into the queue")
    saved = int((tmp_path / "latest").read_text().strip().removeprefix("step-"))
    assert saved >= 1
    assert f"stage 3 on 2 ranks, {saved} steps" in said
    wait_for(output, "site plain: mpirun", times=2)
