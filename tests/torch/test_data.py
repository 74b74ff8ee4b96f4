"""Batches that do not come out even, and torch's loaders and samplers beside mpizero."""

import numpy as np
import pytest
import torch
from helpers.loading import Counted, Noise
from helpers.small import STAGES, Net, Unit, batch, close, seeded
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError, ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

each_stage = pytest.mark.parametrize("stage", STAGES)


def batches_of(rank, *, least=1):
    """As many batches as the rank's number says."""
    return [batch(rank, step) for step in range(least + 2 * (rank % 3))]


@each_stage
def test_join(world, stage):
    """S7: uneven batches: each step's gradient is the mean over the ranks that have a batch."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for step in range(max(len(batches_of(rank)) for rank in range(world.size))):
        rows = [batches_of(rank)[step] for rank in range(world.size) if step < len(batches_of(rank))]
        plain(torch.cat(rows)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    for x, weight in mz.join(batches_of(world.rank), world):
        (model(x).square().mean() * weight).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


def test_join_yields(world):
    """S7: whatever lies between the steps, on the communicator itself, goes its own way."""
    counts = [1 + rank % 3 for rank in range(world.size)]
    mine = list(range(counts[world.rank]))
    got = []
    for item, weight in mz.join(iter(mine), world):
        got.append((item, weight))
        work = mz.all_reduce(np.ones(5), world, async_op=True)
        if world.rank % 2:
            assert work.wait()[0] == world.size
        else:
            pending = work
    if not world.rank % 2:
        pending.wait()
    having = [sum(count > step for count in counts) for step in range(max(counts))]
    weights = [world.size / n if step < len(mine) else 0.0 for step, n in enumerate(having)]
    items = [min(step, len(mine) - 1) for step in range(max(counts))]
    assert got == list(zip(items, weights, strict=True))


def test_a_rank_without_a_batch(world):
    """S7: an error on all ranks that names it, or the template; nothing at all where no rank has any."""
    last = world.size - 1
    mine = [] if world.rank == last else [1, 2]
    assert list(mz.join([], world)) == []
    if world.size == 1:
        return
    with pytest.raises(ArgumentError, match=rf"at least one on every rank \(got 'none on rank {last}'\).*template="):
        list(mz.join(mine, world))
    expected = [(7, 0.0), (7, 0.0)] if world.rank == last else [(i, world.size / last) for i in (1, 2)]
    assert list(mz.join(mine, world, template=7)) == expected


def token_batch(rank, step=0):
    """Hidden states and labels; rank 0 has 3 valid tokens, rank 1 has 29, rank 2 none."""
    made = torch.Generator().manual_seed(100 * step + rank)
    x, labels = torch.randn(32, 7, generator=made), torch.randint(0, 5, (32,), generator=made)
    labels[[3, 29, 0, 11][rank % 4] :] = -100
    return x, labels


@each_stage
def test_global_mean(world, stage):
    """S21: one rank 3 valid tokens, another 29, over one and over two micro-batches."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit})
    parts = [token_batch(rank, step) for step in range(2) for rank in range(world.size)]
    x, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    cross_entropy(plain(x[: 32 * world.size]), labels[: 32 * world.size]).backward()
    x0, labels0 = token_batch(world.rank)
    total = cross_entropy(model(x0), labels0, reduction="sum")
    loss = mz.global_mean(total, (labels0 != -100).sum(), world)
    assert loss.dtype == total.dtype
    loss.backward()
    check_steps(model, plain)
    cross_entropy(plain(x), labels).backward()
    mine = [token_batch(world.rank, step) for step in range(2)]
    factor = mz.global_mean(1.0, sum(int((labels != -100).sum()) for _, labels in mine), world)
    for x, labels in mine:
        (cross_entropy(model(x), labels, reduction="sum") * factor).backward()
    check_steps(model, plain)


def check_steps(model, plain):
    for m in (model, plain):
        torch.optim.SGD(m.parameters(), lr=0.5).step()
        m.zero_grad()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


def test_counts_that_make_no_mean(world):
    last = world.size - 1
    with pytest.raises(ArgumentError, match=r"count must be above 0 on some rank \(got '0 on all ranks'\)"):
        mz.global_mean(torch.zeros(()), 0, world)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=rf"at least 0 on every rank \(got '.* on rank {last}'\)"):
            mz.global_mean(torch.zeros(()), wrong if world.rank == last else 1, world)
    with pytest.raises(ArgumentTypeError, match="total must be a tensor"):
        mz.global_mean([1.0], 1, world)
    for wrong in ("many", torch.ones(2)):
        with pytest.raises(ArgumentTypeError, match="count must be a number"):
            mz.global_mean(torch.zeros(()), wrong, world)
    assert mz.global_mean(torch.tensor(6.0), 3, world) == 2.0


@each_stage
def test_torchs_distributed_sampler(world, stage):
    """It needs no torch.distributed when it is told rank and size; the ranks' batches make up the global batch."""
    data = Noise(12 * world.size)
    sampler = DistributedSampler(data, num_replicas=world.size, rank=world.rank, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3 + epoch))
        for x, indices in zip(loader, order.split(4 * world.size), strict=True):
            for m, rows in ((plain, data.values[indices]), (model, x)):
                m(rows).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@pytest.mark.parametrize("stage", [1, 3])
def test_uneven_batches_without_join(world, stage):
    """S7: an error on all ranks that says what each one called, and the unit's name."""
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    if world.size == 1:
        return
    model(batch(world.rank)).sum().backward()
    with pytest.raises(ShardError, match=r"rank 0: full_parameters; rank 1: forward of 'Net'"):
        mz.full_parameters(model) if world.rank == 0 else model(batch(0))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_workers(world, context):
    """S20: two workers import mpizero and start no MPI; the ranks' collectives go on meanwhile."""
    if world.size != 2:  # a spawned worker loads torch anew, which takes seconds
        return
    if context == "spawn" and world.rank:
        mz.barrier(world)
        return
    loader = DataLoader(Counted(8), batch_size=2, num_workers=2, multiprocessing_context=context)
    rows = []
    for row in loader:
        rows.append(row)
        if context == "fork":
            assert mz.all_reduce(np.ones(1), world)[0] == world.size
    if context == "spawn":
        mz.barrier(world)
    index, is_worker, has_mpi = torch.cat(rows).T
    assert index.tolist() == list(range(8))
    assert is_worker.all()
    assert bool(has_mpi.any()) == (context == "fork")  # a forked process is a copy, MPI's module and all
