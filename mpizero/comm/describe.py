"""What the loaded MPI library is, and whether it takes GPU memory, told without a GPU.

[Note: GPU awareness] Four ways to know, the surest first: the library's own list of memory kinds (MPI 4.1), its answer
to `MPIX_Query_cuda_support`, variables by which a site turns it on, and the user's word, `MPIZERO_CUDA_AWARE`, which
overrides all. A "no" of the second can be relied on; a "yes" only says that the support was compiled in, since the
layers below the library may lack it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.comm.launch import NAMES, vendor_of_text
from mpizero.comm.raw import mpi

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MpiFacts", "describe", "gpu_awareness", "launcher_rank", "machine"]

OVERRIDE = "MPIZERO_CUDA_AWARE"
HINTS = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA", "PSP_CUDA", "I_MPI_OFFLOAD")
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
)
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True, kw_only=True)
class MpiFacts:
    """Hold what there is to know about the loaded MPI library."""

    vendor: str
    """A key of `launch.NAMES`, or "unknown"."""

    name: str
    """The vendor's name for it."""

    version: str
    """The library's version, "" where its text has none."""

    text: str
    """The library's own version text, whole."""

    standard: str
    """The version of the MPI standard that it implements, such as "4.1"."""

    thread_level: str
    """SINGLE, FUNNELED, SERIALIZED or MULTIPLE: what was granted, not what was asked for."""

    gpu_aware: bool | None
    """Whether it takes GPU memory; None where nothing tells. See [Note: GPU awareness]."""

    gpu_source: str
    """How that was found out."""


def describe() -> MpiFacts:
    """Return the facts of the MPI library that mpi4py loads; starts MPI where it has not been started.

    Raises:
        MpiNotFoundError: where no MPI library can be loaded.
    """
    module = mpi()
    text = module.Get_library_version().replace("\0", "").strip()
    vendor = vendor_of_text(text)
    version = re.search(r"\d+\.\d+[\w.]*", text)
    levels = [getattr(module, f"THREAD_{level}") for level in THREAD_LEVELS]
    aware, source = gpu_awareness(_memory_kinds(module), answer=_cuda_answer())
    return MpiFacts(
        vendor=vendor,
        name=NAMES.get(vendor, "an unknown MPI"),
        version=version.group() if version else "",
        text=text,
        standard=".".join(map(str, module.Get_version())),
        thread_level=THREAD_LEVELS[levels.index(module.Query_thread())],
        gpu_aware=aware,
        gpu_source=source,
    )


@cache
def machine() -> dict[str, str]:
    """Return what a measurement on this machine depends on: the processor's model, and the MPI library."""
    facts = describe()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"processor": model or platform.machine(), "mpi": f"{facts.name} {facts.version}"}


def gpu_awareness(
    kinds: str | None, *, answer: bool | None, variables: Mapping[str, str] | None = None
) -> tuple[bool | None, str]:
    """Return whether MPI takes GPU memory, None if unknown, and how that was found out. See [Note: GPU awareness].

    Args:
        kinds: the library's `mpi_memory_alloc_kinds`, None where it has none.
        answer: what `MPIX_Query_cuda_support` returned, None where there is no such function.
        variables: the environment, `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    override = variables.get(OVERRIDE, "")
    hints = [f"{name}={variables[name]}" for name in HINTS if variables.get(name, "0") not in {"", "0"}]
    listed = kinds is not None and re.search(r"\b(cuda|rocm|level_zero)\b", kinds) is not None
    ladder = (
        (override in {"0", "1"}, override == "1", f"{OVERRIDE}={override} says so"),
        (listed, True, f"the library lists mpi_memory_alloc_kinds={kinds}"),
        (answer is True, True, "MPIX_Query_cuda_support() of the library returns 1: compiled in, not tried"),
        (bool(hints), True, f"the environment has {', '.join(hints)}: asked for, not tried"),
        (answer is False, False, "MPIX_Query_cuda_support() of the library returns 0"),
        (bool(kinds), False, f"the library lists mpi_memory_alloc_kinds={kinds}, no GPU among them"),
        (True, None, f"the library does not tell; {OVERRIDE}=1 or 0 does"),
    )
    return next((aware, source) for applies, aware, source in ladder if applies)


def launcher_rank(variables: Mapping[str, str] | None = None) -> int | None:
    """Return this process's number as its launcher gave it, None outside of a job; needs no MPI.

    Args:
        variables: the environment to look at, `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    ranks = (variables.get(name, "") for name in RANK_VARIABLES)
    return next((int(rank) for rank in ranks if rank.isdecimal()), None)


def _memory_kinds(module: Any) -> str | None:
    info = module.COMM_WORLD.Get_info()
    try:
        kinds: str | None = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    return kinds


def _cuda_answer() -> bool | None:
    """Ask the library that this process has loaded; mpi4py loads it out of the reach of a look-up by name alone."""
    for path in _loaded_libraries():
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            query = library.MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype, query.argtypes = ctypes.c_int, []
        return bool(query())
    return None


def _loaded_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = (re.search(r"(/\S*/libmpi[^/]*\.so\S*)$", line) for line in lines)
    return sorted({match.group(1) for match in found if match})
