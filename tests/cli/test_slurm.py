"""hpc/slurm on a Slurm of two hosts that bin/slurm makes, where root may and Slurm is installed; see test_hpc too."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.hosts import why_not

from mpizero.comm.launch import vendor_of_library

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, str(ROOT / "bin" / "slurm")]
MPICH = Path(os.environ.get("MPIZERO_TEST_MPICH", ROOT / ".venv-mpich" / "lib" / "libmpi.so.12"))
"""MPICH's library; mpi4py's wheel loads it in place of its environment's own."""
STEPS = 10
PATIENCE = 240
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
    made = subprocess.run([*LINE, "up", "--name", name], capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    yield name
    subprocess.run([*LINE, "down", "--name", name], check=True, timeout=60)
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
def submit(slurm, tmp_path_factory):
    """Submit a job script and return the number of its job and the file of its output."""

    def submit(script, *words, options=("--ntasks-per-node=1",), **variables):
        output = tmp_path_factory.mktemp("job") / "out"
        base = {"MPIZERO_SITE": "plain", "MPIZERO_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        line = ["sbatch", "--parsable", f"--output={output}", *options, f"hpc/slurm/{script}", *map(str, words)]
        done = on_login_node(slurm, *line, PYTHONPATH=str(ROOT), **{**base, **variables})
        return done.stdout.strip(), output

    return submit


def on_login_node(name, *line, **variables):
    env = {**os.environ, **variables}
    words = [*LINE, "run", "--name", name, "--", *line]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)


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


@pytest.fixture(scope="module")
def jobs(slurm, submit, text, tmp_path_factory):
    """Return what two trainings say: one by mpirun that is signalled in between, one, by srun, that is not."""
    run = tmp_path_factory.mktemp("run")
    number, signalled = submit("cpu.sbatch", *training(text, "--save", run))
    _, whole = submit("cpu.sbatch", *training(text), **by_srun())
    wait_for(signalled, "step ", "rror")
    # What --signal=B:USR1@300 has Slurm do five minutes ahead of the end.
    on_login_node(slurm, "scancel", "--batch", "--signal=USR1", number)
    wait_for(signalled, "goes back into the queue", "rror")
    said = wait_for(whole, f"{STEPS} steps", "rror")
    return wait_for(signalled, "validation loss", times=2), said


def test_a_job_of_mpirun_that_is_signalled_saves_resumes_and_ends_with_the_losses_of_an_undisturbed_one(jobs):
    signalled, whole = jobs
    assert "site plain: mpirun -n 2 --map-by ppr:1:node" in signalled
    assert signalled.count("SIGUSR1 goes on to the ranks") == 1
    done = [int(steps) for steps in re.findall(r"stage 3 on 2 ranks, (\d+) steps", signalled)]
    assert sum(done) == STEPS
    assert 1 <= done[0] < STEPS
    # exact: the same bits, whoever started the ranks.
    assert LOSS.findall(signalled)[-1] == LOSS.findall(whole)[-1]


def test_a_job_of_srun_trains_with_mpich(jobs):
    if not by_srun():
        pytest.skip(f"needs MPICH at {MPICH}, which `bin/check` without arguments installs")
    said = jobs[1]
    assert "srun --mpi=pmi2 --nodes=2 --ntasks=2" in said
    assert said.count("bind.sh: rank 0 of 1 on ") == 2
    assert f"stage 3 on 2 ranks, {STEPS} steps" in said


def test_a_wrong_type_of_mpi_is_said_before_any_rank_starts(submit, text):
    _, output = submit("cpu.sbatch", *training(text), MPIZERO_LAUNCHER="srun --mpi=none")
    said = wait_for(output, "remedy")
    assert "srun --mpi=none does not start ranks of Open MPI" in said
    assert "write `srun --mpi=pmix`" in said
    assert "ranks on 2 nodes" not in said


def test_every_rank_is_alone_says_so_with_what_to_write(slurm):
    line = ["srun", "--mpi=pmi2", "-n", "2", sys.executable, "-c", "import mpizero; mpizero.world()"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        on_login_node(slurm, *line, PYTHONPATH=str(ROOT))
    assert "the number of ranks must be 2, as the launcher says" in caught.value.stderr
    assert "srun started the ranks with --mpi=pmi2, which this library does not speak" in caught.value.stderr
    assert "write `srun --mpi=pmix`" in caught.value.stderr


def test_a_gpu_job_without_gpus_ends_at_once(submit):
    """The hosts only pretend to have GPUs: Slurm hands them out, bind.sh finds none."""
    options = ("--ntasks-per-node=2", "--gpus-per-node=2")
    _, output = submit("gpu.sbatch", "-c", "print('trained')", options=options)
    said = wait_for(output, "bind.sh: 2 ranks on ")
    assert "see 0 GPUs, one for each is needed" in said
    assert "--gpus-per-node=2" in said
    assert "\ntrained" not in said


@pytest.mark.slow
def test_a_job_near_its_time_limit_saves_and_resumes(submit, text, tmp_path):
    """Slurm looks at time limits every 30 s: of a minute's job that is to be told 20 s ahead, some time before that."""
    options = ("--ntasks-per-node=1", "--time=1", "--signal=B:USR1@20")
    _, output = submit("cpu.sbatch", *training(text, "--save", tmp_path, "--steps", 1000), options=options)
    said = wait_for(output, "goes back into the queue")
    saved = int((tmp_path / "latest").read_text().strip().removeprefix("step-"))
    assert saved >= 1
    assert f"stage 3 on 2 ranks, {saved} steps" in said
    wait_for(output, "site plain: mpirun", times=2)
