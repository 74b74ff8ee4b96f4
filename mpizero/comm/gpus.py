"""Which GPU a rank uses, which GPUs it sees, and what makes messages of their memory slow or unsafe.

[Note: device by local rank] The GPU has to be chosen before the first CUDA call, and therefore before MPI starts: a
CUDA-aware MPI may make its context on the GPU that is current then. So the rank's number on its host comes from the
launcher's variables. Giving each rank a CUDA_VISIBLE_DEVICES of its own, as Slurm's --gpus-per-task does, chooses too,
but hides the peers' GPUs, whose memory can then not be opened through CUDA IPC.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpizero.comm.launch import under_launcher
from mpizero.errors import LaunchError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Gpu",
    "allocator",
    "choose_device",
    "choose_gpu",
    "find_gpus",
    "local_rank",
    "local_size",
    "memory_warnings",
]

# Those of mpirun and its like before Slurm's: in a batch script SLURM_LOCALID is 0, and mpirun's ranks inherit it.
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
LOCAL_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
STEP = "SLURM_STEP_NUM_TASKS"
"""Set by srun alone."""
HOW_TO_GET_CUPY = "`pip install 'mpizero[cuda13]'`, or `mpizero[cuda12]` for CUDA 12"
TORCH_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NO_HANDLE = "memory without an IPC handle, which the MPI library can send between GPUs of a host only by detours"
OWN_BUFFERS = "mpizero's own buffers, such as those of `mz.empty(..., device='cuda')`, are not concerned"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Be a GPU that this process sees."""

    name: str
    bus: str
    """Its PCI address, by which processes can tell whether they see the same one."""


def local_rank(variables: Mapping[str, str] | None = None) -> int | None:
    """Return this process's number among the ranks on its host as its launcher gave it, None where none did.

    Needs no MPI.

    Args:
        variables: the environment to look at, `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    names = [name for name in LOCAL_RANK_VARIABLES if name != "SLURM_LOCALID" or STEP in variables]
    ranks = (variables.get(name, "") for name in names)
    return next((int(rank) for rank in ranks if rank.isdecimal()), None)


def local_size(variables: Mapping[str, str] | None = None) -> int | None:
    """Return how many ranks the launcher has started on this host, None where it does not say.

    Needs no MPI.

    Args:
        variables: the environment to look at, `os.environ` by default.
    """
    variables = os.environ if variables is None else variables
    # Slurm's 4(x2) is 4 on both hosts; of 4,2 it is not known here which is this one's.
    sizes = (re.fullmatch(r"(\d+)(\(x\d+\))?", variables.get(name, "")) for name in LOCAL_SIZE_VARIABLES)
    return next((int(size.group(1)) for size in sizes if size), None)


def choose_device(count: int, variables: Mapping[str, str] | None = None, *, why_none: str = "") -> int:
    """Return the number of the GPU that this rank should use: its number on its host, modulo the GPUs that it sees.

    Args:
        count: how many GPUs this process sees.
        variables: the environment to look at, `os.environ` by default.
        why_none: where `count` is 0, the reason, for the error.

    Raises:
        LaunchError: where it sees none, or several and the launcher does not tell which rank of its host it is.
    """
    if count < 1:
        remedy = why_none or "CUDA_VISIBLE_DEVICES may hide them, or the batch system has given this job none"
        raise LaunchError(must_be("the number of GPUs that this process sees", "at least 1", count, remedy))
    if count == 1:
        return 0
    number = local_rank(variables)
    if number is None and (under_launcher(variables) or 1) > 1:
        remedy = "choose it in the script: cupy.cuda.Device(number).use() and torch.cuda.set_device(number)"
        rule = "told by the launcher, since there are several GPUs to choose from"
        raise LaunchError(must_be("this rank's number on its host", rule, number, remedy))
    return (number or 0) % count


def choose_gpu() -> int:
    """Choose this rank's GPU by its number on its host, make it current, and return its number.

    To be called before the first CUDA call and before the first collective, since MPI may make a context of its own on
    whatever GPU is current: see [Note: device by local rank]. It becomes current in the calling thread, for CuPy where
    that is installed and for torch where that has been imported. Sends nothing and starts no MPI.

    Returns:
        The number among the GPUs that this process sees: the number on the host modulo their count, 0 if there is one.

    Raises:
        LaunchError: where this process sees no GPU, with the reason; or where there are several and the launcher does
            not say which rank of its host this is.
    """
    torch: Any = sys.modules.get("torch")
    gpus, why = find_gpus()
    count = len(gpus)
    if not count and torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
    device = choose_device(count, why_none=why)
    if gpus:
        import cupy

        cupy.cuda.Device(device).use()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(device)
    return device


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that this process sees, in CUDA's order, and the reason where there are none.

    Loads CuPy, where there is a driver. Makes no CUDA context.
    """
    if not _driver():
        return (), "there is no NVIDIA driver (libcuda.so.1)"
    if find_spec("cupy") is None:
        return (), f"there is an NVIDIA driver, but CuPy is not installed: {HOW_TO_GET_CUPY}"
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        reason = str(error).strip().partition("\n")[0]
        return (), f"CuPy does not load ({reason}): reinstall it with {HOW_TO_GET_CUPY}"
    try:
        numbers = range(runtime.getDeviceCount())
        found = tuple(
            Gpu(name=runtime.getDeviceProperties(number)["name"].decode(), bus=runtime.deviceGetPCIBusId(number))
            for number in numbers
        )
    except runtime.CUDARuntimeError as error:
        return (), str(error)
    return found, "" if found else "CUDA finds none"


def allocator() -> str:
    """Return the kind of memory that CuPy hands out in this process, "" where it has not been loaded.

    "MemoryPool" is CuPy's default, of plain cudaMalloc; "MemoryAsyncPool", "malloc_async" and "malloc_managed" are what
    `memory_warnings` knows. A pool on top of `malloc_managed` cannot be told from the default.
    """
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return ""
    current = cupy.cuda.get_allocator()
    owner = getattr(current, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return str(getattr(current, "__name__", type(current).__name__))
    return type(owner).__name__


def memory_warnings(variables: Mapping[str, str] | None = None, *, pool: str = "") -> list[tuple[str, str]]:
    """Return what makes communication of GPU memory slow or unsafe here, each with its remedy.

    Args:
        variables: the environment to look at, `os.environ` by default.
        pool: from `allocator`.
    """
    variables = os.environ if variables is None else variables
    return [*_torch_memory(variables), *_cupy_memory(pool), *_hidden_gpus(variables), *_ucx(variables)]


def _torch_memory(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in TORCH_VARIABLES:
        text = variables.get(name, "")
        for setting, value in (("expandable_segments", "True"), ("backend", "cudaMallocAsync")):
            if re.search(rf"\b{setting}\s*:\s*{value}\b", text, re.IGNORECASE):
                yield (
                    f"{name} has {setting}:{value}: torch hands out {NO_HANDLE}",
                    f"take {setting}:{value} out of it; {OWN_BUFFERS}",
                )


def _cupy_memory(pool: str) -> Iterator[tuple[str, str]]:
    if pool in {"MemoryAsyncPool", "malloc_async"}:
        remedy = (
            f"leave CuPy its default pool, or `cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)`; {OWN_BUFFERS}"
        )
        yield f"CuPy's allocator is {pool}: it hands out {NO_HANDLE}", remedy
    if pool == "malloc_managed":
        text = "CuPy's allocator is malloc_managed: MPI libraries fail on managed memory or move it page by page"
        yield text, f"leave CuPy its default pool; {OWN_BUFFERS}"


def _hidden_gpus(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    visible = [entry for entry in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    asked = [
        f"{name}={variables[name]}"
        for name, shows in (
            ("SLURM_GPUS_PER_TASK", r"\S"),
            ("SLURM_TRES_PER_TASK", "gpu"),
            ("SLURM_GPU_BIND", r"^(?!none)\S"),
            ("SLURM_TRES_BIND", r"gpu:(?!none)"),
        )
        if re.search(shows, variables.get(name, ""))
    ]
    if len(visible) == 1 and asked and local_size(variables) != 1:
        text = (
            f"CUDA_VISIBLE_DEVICES={visible[0]} with {', '.join(asked)}: each rank sees its own GPU alone, so that "
            "ranks of a host cannot load each other's memory"
        )
        yield (
            text,
            "ask Slurm for --gpus-per-node=N with --gpu-bind=none, and call mpizero.choose_gpu() in the script",
        )


def _ucx(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    transports = variables.get("UCX_TLS", "")
    names = {name.strip() for name in transports.lstrip("^").split(",")}
    copies = bool(names & {"cuda", "cuda_copy"})
    # A list that begins with ^ says what is left out.
    without = copies if transports.startswith("^") else not copies and not names & {"all", "any"}
    if transports and without:
        text = (
            f"UCX_TLS={transports} leaves out CUDA: UCX takes device pointers for host memory, which ends in a "
            "segmentation fault"
        )
        yield text, "unset it, or let it name cuda (cuda_copy, cuda_ipc and gdr_copy in one) too"
    if variables.get("UCX_MEMTYPE_CACHE", "").lower() in {"y", "yes", "1", "on"}:
        yield (
            "UCX_MEMTYPE_CACHE is on: UCX may take device memory that was allocated before MPI started for host memory",
            "unset it, or set it to n where messages of GPU memory crash",
        )


def _driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
