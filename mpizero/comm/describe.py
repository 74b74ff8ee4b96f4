"""What the loaded MPI library is, and whether it takes GPU memory, told without a GPU.

[Note: GPU awareness] A ladder, whose first rung that applies gives the answer:

1. the user's word, `MPIZERO_CUDA_AWARE`;
2. the verdict of the canary (`comm/canary.py`), where it was run: the only rung that tries it;
3. the library's own list of memory kinds, `mpi_memory_alloc_kinds` of MPI 4.1, if CUDA is on it;
4. a yes of `MPIX_Query_cuda_support` or `MPIX_GPU_query_support`, which only says that the support was compiled in: the
   layers below the library may lack it;
5. variables by which a site asks for it;
6. a no of the same functions, or a list without CUDA.

Messages of device memory rely on a yes of the first three alone. On a wrong yes the process would end by a segmentation
fault, on a wrong no data take the road through the host.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpizero.comm.launch import NAMES, vendor_of_text
from mpizero.comm.raw import mpi
from mpizero.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Awareness",
    "MpiFacts",
    "Verdict",
    "describe",
    "gpu_awareness",
    "launcher_rank",
    "machine",
    "takes_device_memory",
]

OVERRIDE = "MPIZERO_CUDA_AWARE"
HINTS = (
    "MPICH_GPU_SUPPORT_ENABLED",
    "MV2_USE_CUDA",
    "MVP_USE_CUDA",
    "PSP_CUDA",
    "I_MPI_OFFLOAD",
    "OMPI_MCA_opal_cuda_support",
)
OFF = {"", "0", "n", "no", "off", "false"}
CUDA_OF_MPICH = 0
"""MPIX_GPU_SUPPORT_CUDA in the headers of MPICH and what descends from it."""
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

    gpu_sure: bool = False
    """Whether messages may rely on it."""

    ucx: str = ""
    """Where the UCX lies that this process has loaded, "" where it has none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Say whether messages of device memory work here, and why it is thought so."""

    passed: bool
    why: str
    """One clause, for an error or a table."""


class Awareness(NamedTuple):
    """Say whether MPI takes GPU memory (None: unknown), how that was found out, and whether it may be relied on."""

    aware: bool | None
    source: str
    sure: bool


def describe(canary: Verdict | None = None) -> MpiFacts:
    """Return the facts of the MPI library that mpi4py loads; starts MPI where it has not been started.

    Not collective, and sends nothing. Ranks may find different things where their hosts differ, so that what they do
    about them has to be agreed on.

    Args:
        canary: from `canary.verdict_of_all`, None where it was not run.

    Raises:
        MpiNotFoundError: where no MPI library can be loaded.
        ArgumentError: where `MPIZERO_CUDA_AWARE` is neither 0 nor 1.
    """
    module = mpi()
    text = module.Get_library_version().replace("\0", "").strip()
    vendor = vendor_of_text(text)
    version = re.search(r"\d+\.\d+[\w.]*", text)
    levels = [getattr(module, f"THREAD_{level}") for level in THREAD_LEVELS]
    told = gpu_awareness(_memory_kinds(module), answers=_answers(), override=settings().cuda_aware, canary=canary)
    return MpiFacts(
        vendor=vendor,
        name=NAMES.get(vendor, "an unknown MPI"),
        version=version.group() if version else "",
        text=text,
        standard=".".join(map(str, module.Get_version())),
        thread_level=THREAD_LEVELS[levels.index(module.Query_thread())],
        gpu_aware=told.aware,
        gpu_source=told.source,
        gpu_sure=told.sure,
        ucx=next(iter(_loaded_libraries("libucp")), ""),
    )


def takes_device_memory(facts: MpiFacts) -> bool:
    """Return whether messages may be given device pointers; see [Note: GPU awareness].

    True by `MPIZERO_CUDA_AWARE=1`, a canary that passed, or a library that lists CUDA among its memory kinds. Support
    that was compiled in, or asked for by a site, and not tried is not enough: `MPIZERO_CANARY=1` tries it.

    Args:
        facts: from `describe`.
    """
    return facts.gpu_aware is True and facts.gpu_sure


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
    kinds: str | None,
    *,
    answers: Mapping[str, bool],
    variables: Mapping[str, str] | None = None,
    override: bool | None = None,
    canary: Verdict | None = None,
) -> Awareness:
    """Return whether MPI takes GPU memory and how that was found out. See [Note: GPU awareness].

    Args:
        kinds: the library's `mpi_memory_alloc_kinds`, None where it has none.
        answers: what those of the library's functions that can be asked have said, by their names.
        variables: the environment, `os.environ` by default.
        override: `MPIZERO_CUDA_AWARE`, None where it is not set.
        canary: the canary's verdict, None where it was not run.
    """
    variables = os.environ if variables is None else variables
    hints = [f"{name}={variables[name]}" for name in HINTS if variables.get(name, "").lower() not in OFF]
    listed = kinds is not None and re.search(r"\bcuda\b", kinds) is not None
    yes = [name for name, said in answers.items() if said]
    no = [name for name, said in answers.items() if not said]
    passed = canary is not None and canary.passed
    ladder = (
        (override is not None, override, f"{OVERRIDE}={int(override or 0)} says so", True),
        (canary is not None, passed, "" if canary is None else canary.why, True),
        (listed, True, f"the library lists mpi_memory_alloc_kinds={kinds}", True),
        (bool(yes), True, f"{', '.join(yes)} of the library says yes: compiled in, not tried", False),
        (bool(hints), True, f"the environment has {', '.join(hints)}: asked for, not tried", False),
        (bool(no), False, f"{', '.join(no)} of the library says no", True),
        (bool(kinds), False, f"the library lists mpi_memory_alloc_kinds={kinds}, no CUDA among them", True),
        (True, None, "the library does not tell", False),
    )
    return next(Awareness(aware, source, sure) for applies, aware, source, sure in ladder if applies)


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


def _answers() -> dict[str, bool]:
    """Ask the library that this process has loaded; mpi4py loads it out of the reach of a look-up by name alone."""
    found: dict[str, bool] = {}
    for path in _loaded_libraries("libmpi"):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        for name, said in _asked(library):
            found[name] = found.get(name, False) or said
    return found


def _asked(library: ctypes.CDLL) -> Iterator[tuple[str, bool]]:
    if hasattr(library, "MPIX_Query_cuda_support"):
        query = library.MPIX_Query_cuda_support
        query.restype, query.argtypes = ctypes.c_int, []
        yield "MPIX_Query_cuda_support()", bool(query())
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        query = library.MPIX_GPU_query_support
        query.restype, query.argtypes = ctypes.c_int, [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        failed = query(CUDA_OF_MPICH, ctypes.byref(flag))
        yield "MPIX_GPU_query_support(CUDA)", not failed and bool(flag.value)


def _loaded_libraries(name: str) -> list[str]:
    """Return the paths of the shared libraries in this process whose file names begin so."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = (re.search(rf"(/\S*/{name}[^/]*\.so\S*)$", line) for line in lines)
    return sorted({match.group(1) for match in found if match})
