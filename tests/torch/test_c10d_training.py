"""torch's own trainers on the backend: steps equal to those of one process."""

import copy

import pytest
import torch
from helpers.c10d import job  # noqa: F401
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2, 4),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # torch 2.6, on any CPU mesh
]
fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch knows no CPU tensors, on any backend"
)

STEPS, BATCH = 3, 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))


def data(rank, step):
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model


def alone(world):
    """Return the model after the same steps on all ranks' batches, in one process."""
    batches = [torch.cat([data(rank, step) for rank in range(world.size)]) for step in range(STEPS)]
    return trained(net(), batches)


def mine(world):
    return [data(world.rank, step) for step in range(STEPS)]


def bf16_hook(state, bucket):
    return default_hooks.bf16_compress_hook(state, bucket)


def close(model, plain, tolerance=1e-6):
    for x, expected in zip(model.parameters(), plain.parameters(), strict=True):
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bucket", [25, 0.0001], ids=["one bucket", "a bucket each"])
def test_ddp(world, job, bucket):  # noqa: F811
    model = DistributedDataParallel(net() if world.rank == 0 else nn.Sequential(*net()), bucket_cap_mb=bucket)
    close(trained(model, mine(world)).module, alone(world))


@pytest.mark.parametrize("hook", ["bf16", "powerSGD"])
def test_ddp_with_a_hook(world, job, hook):  # noqa: F811
    """Hooks chain futures; PowerSGD's callbacks wait for futures of their own.

    torch takes its bf16 hook, by its name, for NCCL alone; it is a function like another.
    """
    model = DistributedDataParallel(net())
    if hook == "bf16":
        model.register_comm_hook(None, bf16_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=6, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained(model, mine(world))
    close(model.module, alone(world), tolerance=2e-2)
    everywhere = [None] * world.size
    dist.all_gather_object(everywhere, [x.tolist() for x in model.parameters()])
    assert all(of_rank == everywhere[0] for of_rank in everywhere)


@fsdp2
def test_fsdp2(world, job):  # noqa: F811
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    close(trained(model, mine(world)), alone(world))


@fsdp2
def test_hybrid_fsdp2_on_a_mesh(world, job):  # noqa: F811
    half = max(1, world.size // 2)
    mesh = init_device_mesh("cpu", (world.size // half, half), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    close(trained(model, mine(world)), alone(world))


def test_tensor_parallelism(world, job):  # noqa: F811
    """Every rank has all data and a part of each matrix."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batches = [torch.cat([data(rank, step) for rank in range(world.size)]) for step in range(STEPS)]
    close(trained(model, batches), alone(world))


def test_dtensors_change_their_places(world, job):  # noqa: F811
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(21.0).view(7, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert rows.redistribute(mesh, [Shard(1)]).full_tensor().equal(whole)
    assert rows.redistribute(mesh, [Replicate()]).to_local().equal(whole)
    assert rows.sum().full_tensor() == 210


def test_a_model_copied_from_rank_0(world, job):  # noqa: F811
    model = net()
    if world.rank:
        for x in model.parameters():
            nn.init.zeros_(x)
    close(DistributedDataParallel(copy.deepcopy(model)).module, net())
