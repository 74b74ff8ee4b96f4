"""Whether a launcher, as a job script names it, starts ranks of the MPI library here: asked before there are any."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mpizero.cli.problems import Problem, problem_of
from mpizero.comm.launch import NAMES, Launcher, check_pair, launcher_at, srun_type, vendor_of_library
from mpizero.errors import ArgumentError, LaunchError, MpiNotFoundError, must_be

__all__ = ["launcher_problems", "srun_problem"]

KNOWN = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun", "jsrun", "flux", "aprun", "ibrun"}
"""Names of programs that start ranks; some say nothing of whose they are."""
PMIX_ALONE = 5
"""The version of Open MPI from which it speaks PMIx and nothing else."""


def launcher_problems(text: str) -> tuple[str, list[Problem]]:
    """Return a line that says what fits, and what is wrong; starts no MPI and no rank.

    Args:
        text: the launcher with the options that choose how ranks meet, such as "srun --mpi=pmi2".

    Raises:
        ArgumentError: where there is no command in it.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:  # of quotes
        raise ArgumentError(must_be("--launcher", f"a command ({error})", text)) from error
    if not words:
        raise ArgumentError(must_be("--launcher", "a command that starts ranks, such as mpirun", text))
    try:
        vendor, library = vendor_of_library(sys.executable)
    except MpiNotFoundError as error:
        problem = problem_of(error)
        return "", [replace(problem, remedy=f"{problem.remedy}; hpc/job.sh loads those that hpc/site/NAME.sh names")]
    # A wheel's launcher lies beside its Python, where hpc/job.sh looks first too.
    path = shutil.which(words[0], path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        remedy = "load the module that has it, name another launcher (MPIZERO_LAUNCHER for hpc/job.sh), or check PATH"
        return "", [Problem(text=f"the launcher {words[0]} is not found", remedy=remedy, fails=True)]
    program, launcher = Path(path).name, None
    if program == "srun":
        found = srun_problem(words, vendor, library, srun_types())
    else:
        launcher = launcher_at(path)
        found = _pair_problem(launcher, vendor, library)
    name = NAMES.get(vendor, "an unknown MPI")
    known = program in KNOWN or (launcher is not None and launcher.vendor in NAMES)
    if found is None and not known:
        what = f"{words[0]} is no launcher that is known here: whether it starts ranks of {name} cannot be told"
        found = Problem(text=what, remedy="name one as mpirun, mpiexec or srun, unless you know it", fails=False)
    return f"{text} starts ranks of {name}, as far as can be told", [] if found is None else [found]


def srun_types() -> list[str]:
    """Return the plugins that `srun --mpi=list` shows; none where srun does not answer."""
    lines = _told_by("srun", "--mpi=list").splitlines()
    # One a line, with or without "srun:" and a title before them; versions of pmix come in a line of their own.
    found = [re.sub(r"^srun: +", "", line).strip() for line in lines]
    return [word for word in found if re.fullmatch(r"[a-z0-9_]+", word)]


def srun_problem(words: list[str], vendor: str, library: str, types: list[str]) -> Problem | None:
    """Return what keeps ranks that srun starts from finding each other, None where nothing is known to.

    Args:
        words: srun's command line.
        vendor: of the MPI library, a key of NAMES, or "unknown".
        library: its version text.
        types: what `srun --mpi=list` shows; empty where it is not known.
    """
    wanted = srun_type(vendor)
    if wanted is None:
        return None
    asked = _asked_type(words)
    if not _speaks(vendor, library, asked):
        effect = "with it every rank is alone in a job of size 1, or MPI does not start"
        text = f"srun --mpi={asked} does not start ranks of {NAMES[vendor]}, the library that mpi4py loads: {effect}"
    elif types and asked not in types and not asked.startswith("pmix_"):
        text = f"this Slurm has no --mpi={asked} (it has {', '.join(types)})"
    else:
        return None
    if not types or wanted in types:
        return Problem(text=text, remedy=f"write `srun --mpi={wanted}`", fails=True)
    remedy = f"this Slurm has no {wanted}: start the ranks with the mpirun of {NAMES[vendor]} (MPIZERO_LAUNCHER=mpirun)"
    return Problem(text=text, remedy=remedy, fails=True)


def _asked_type(words: list[str]) -> str:
    """Return the plugin that a command line asks for, else the one of the environment or of this Slurm."""
    found = re.search(r"--mpi[= ](\S+)", " ".join(words))
    if found:
        return found[1]
    if os.environ.get("SLURM_MPI_TYPE"):
        return os.environ["SLURM_MPI_TYPE"]
    default = re.search(r"^MpiDefault\s*=\s*(\S+)", _told_by("scontrol", "show", "config"), re.MULTILINE)
    return default[1] if default else "none"


def _told_by(program: str, *words: str) -> str:
    """Return what a program of Slurm's writes, "" where it is not there or does not answer."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *words], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _speaks(vendor: str, library: str, asked: str) -> bool:
    """Return False where it is known that a library's ranks cannot meet through one of Slurm's plugins."""
    if asked in {"none", "openmpi"}:
        return False
    if vendor == "openmpi":
        version = re.search(r"v?(\d+)\.\d+", library)
        return asked.startswith("pmix") or (version is not None and int(version[1]) < PMIX_ALONE and asked == "pmi2")
    return asked != "cray_shasta" or vendor == "cray"


def _pair_problem(launcher: Launcher | None, vendor: str, library: str) -> Problem | None:
    if launcher is None:
        return None
    try:
        check_pair(launcher, (vendor, library))
    except LaunchError as error:
        return problem_of(error)
    return None
