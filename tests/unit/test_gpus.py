"""Which GPU a rank takes, which it sees, and its warnings; with a CuPy and a torch that are told what to say."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mpizero.comm import gpus
from mpizero.comm.gpus import allocator, choose_device, choose_gpu, find_gpus, local_rank, memory_warnings
from mpizero.errors import LaunchError

OPENMPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
HIDING = {"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_PER_TASK": "1"}


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, None),
        (OPENMPI, 5),
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"PMI_LOCAL_RANK": "3"}, 3),
        ({"PALS_LOCAL_RANKID": "4"}, 4),
        ({"JSM_NAMESPACE_LOCAL_RANK": "5"}, 5),
        ({"FLUX_TASK_LOCAL_ID": "6"}, 6),
        ({"SLURM_LOCALID": "7", "SLURM_STEP_NUM_TASKS": "8"}, 7),
        # sbatch says 0 in its script, and mpirun's ranks inherit it.
        ({"SLURM_LOCALID": "0"}, None),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", **OPENMPI}, 5),
        ({"MPI_LOCALRANKID": "-1"}, None),
    ],
)
def test_local_rank(variables, number):
    assert local_rank(variables) == number


@pytest.mark.parametrize(
    ("count", "variables", "device"),
    [(1, OPENMPI, 0), (4, OPENMPI, 1), (8, OPENMPI, 5), (4, {}, 0), (1, {"PMI_SIZE": "4"}, 0)],
)
def test_the_device_is_the_local_rank_modulo_those_visible(count, variables, device):
    assert choose_device(count, variables) == device


def test_without_a_device_or_a_local_rank_the_reason_is_said():
    with pytest.raises(LaunchError, match=r"GPUs that this process sees must be at least 1 \(got 0\): no driver"):
        choose_device(0, {}, why_none="no driver")
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES may hide them"):
        choose_device(0, OPENMPI)
    with pytest.raises(LaunchError, match=r"number on its host must be told by the launcher.*torch\.cuda\.set_device"):
        choose_device(2, {"PMI_SIZE": "4", "PMI_RANK": "1"})


def test_ranks_of_a_job_choose_in_turn():
    """Under this environment's own mpirun; the names of its variables are not the test's."""
    code = "from mpizero.comm.gpus import choose_device; print('device', choose_device(2))"
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", "3", "-m", "timeit", "-n", "1", "-r", "1", code]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=100)
    assert [done.stdout.count(f"device {number}") for number in (0, 1)] == [2, 1], done.stdout + done.stderr


class CUDARuntimeError(RuntimeError):
    pass


@pytest.fixture
def machine(monkeypatch):
    """A driver, and a CuPy that sees as many GPUs as asked; returns the devices that were made current."""

    def machine(count, error=""):
        used = []

        def get_device_count():
            if error:
                raise CUDARuntimeError(error)
            return count

        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cuda.runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=get_device_count,
            getDeviceProperties=lambda number: {"name": f"G{number}".encode()},
            deviceGetPCIBusId=lambda number: f"0000:0{number}:00.0",
        )
        cuda.Device = lambda number: SimpleNamespace(use=lambda: used.append(("cupy", number)))
        cupy.cuda = cuda
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        monkeypatch.setattr(gpus, "_driver", lambda: True)
        monkeypatch.setattr(gpus, "find_spec", lambda _: object())
        return used

    return machine


@pytest.fixture
def torch(monkeypatch, machine):
    def torch(count, visible=0):
        used = machine(count)
        cuda = SimpleNamespace(
            is_available=lambda: bool(visible or count),
            device_count=lambda: visible or count,
            set_device=lambda number: used.append(("torch", number)),
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        return used

    return torch


def test_the_gpu_becomes_current_for_cupy_and_torch(torch, monkeypatch):
    used = torch(4)
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    assert choose_gpu() == 1
    assert used == [("cupy", 1), ("torch", 1)]


def test_torch_alone_is_enough(torch, monkeypatch):
    used = torch(0, visible=4)
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    assert choose_gpu() == 1
    assert used == [("torch", 1)]


def test_gpus_are_found_or_the_reason_is(machine, monkeypatch):
    machine(2)
    found, why = find_gpus()
    assert [(gpu.name, gpu.bus) for gpu in found] == [("G0", "0000:00:00.0"), ("G1", "0000:01:00.0")]
    assert why == ""
    machine(0)
    assert find_gpus() == ((), "CUDA finds none")
    machine(0, "cudaErrorNoDevice: no CUDA-capable device is detected")
    assert find_gpus() == ((), "cudaErrorNoDevice: no CUDA-capable device is detected")
    monkeypatch.setattr(gpus, "find_spec", lambda _: None)
    assert "CuPy is not installed: `pip install 'mpizero[cuda13]'`" in find_gpus()[1]
    monkeypatch.setattr(gpus, "_driver", lambda: False)
    assert "no NVIDIA driver" in find_gpus()[1]
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(LaunchError, match="no NVIDIA driver"):
        choose_gpu()


def test_a_cupy_that_does_not_load_is_told(machine, monkeypatch):
    machine(1)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert find_gpus()[1].startswith("CuPy does not load (")


class MemoryAsyncPool:
    def malloc(self, nbytes):
        return nbytes


def malloc_managed(nbytes):
    return nbytes


def test_cupys_allocator_is_named(machine, monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert allocator() == ""
    machine(1)
    for current, name in ((MemoryAsyncPool().malloc, "MemoryAsyncPool"), (malloc_managed, "malloc_managed")):
        sys.modules["cupy"].cuda.get_allocator = lambda current=current: current
        assert allocator() == name
    sys.modules["cupy"].cuda.get_allocator = lambda: len  # a function of C, whose __self__ is its module
    assert allocator() == "len"


@pytest.mark.parametrize(
    ("variables", "text", "remedy"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            "expandable_segments:True",
            "out of it",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: true"}, "PYTORCH_ALLOC_CONF has expand", "mz.empty"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "IPC handle", "backend:cudaMallocAsync out"),
        (
            HIDING,
            "with SLURM_GPUS_PER_TASK=1: each rank sees its own",
            "--gpu-bind=none, and call mpizero.choose_gpu()",
        ),
        ({**HIDING, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "SLURM_GPUS_PER_TASK", "--gpus-per-node"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPU_BIND": "per_task:1"}, "SLURM_GPU_BIND", "--gpus-per-node"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, "SLURM_TRES", "--gpus-per-node"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_TRES_BIND": "gres/gpu:per_task:1"}, "SLURM_TRES", "--gpus-per-node"),
        ({"UCX_TLS": "rc,sm,self"}, "UCX_TLS=rc,sm,self leaves out CUDA", "cuda"),
        ({"UCX_TLS": "rc,cuda_ipc"}, "segmentation fault", "cuda_copy"),
        ({"UCX_TLS": "^cuda,tcp"}, "leaves out CUDA", "unset it"),
        ({"UCX_MEMTYPE_CACHE": "y"}, "UCX_MEMTYPE_CACHE is on", "n where"),
    ],
)
def test_warnings_of_the_environment(variables, text, remedy):
    (found,) = memory_warnings(variables)
    assert text in found[0]
    assert remedy in found[1]


@pytest.mark.parametrize("pool", ["MemoryAsyncPool", "malloc_async", "malloc_managed"])
def test_warnings_of_cupys_allocator(pool):
    ((text, remedy),) = memory_warnings({}, pool=pool)
    assert f"CuPy's allocator is {pool}" in text
    assert "default pool" in remedy


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,backend:native"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {**HIDING, "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        {**HIDING, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
        {**HIDING, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPU_BIND": "none", "SLURM_TRES_BIND": "gres/gpu:none"},
        {"CUDA_VISIBLE_DEVICES": "3", "SLURM_TRES_PER_TASK": "cpu=4"},
        {"UCX_TLS": "rc,cuda"},
        {"UCX_TLS": "rc,cuda_copy,cuda_ipc"},
        {"UCX_TLS": "all"},
        {"UCX_TLS": "^ib"},
        {"UCX_TLS": ""},
        {"UCX_MEMTYPE_CACHE": "n"},
    ],
)
def test_no_warning_without_a_reason(variables):
    assert memory_warnings(variables, pool="MemoryPool") == []


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 2),
        ({"PALS_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2"}, None),
    ],
)
def test_local_size(variables, size):
    assert gpus.local_size(variables) == size
