"""Models in device memory: the bits of the host, whatever a device does late, and memory that does not grow.

torch's CPU tensors are taken for a device's, which `HostRuntime` plays: what collectives queue there runs late and out
of order. What only torch's own streams and allocator can show is in tests/gpu.
"""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.chains import check_at_rest
from helpers.small import BF16, STAGES, Net, Unit, batch, seeded
from torch import nn

import mpizero as mz
from mpizero.arrays import gpus
from mpizero.errors import ArgumentError, ShardError
from mpizero.shard import reductions, runtime_of
from mpizero.testing.host_runtime import HostRuntime, stand_in
from mpizero.testing.memory import live_bytes

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

PRECISIONS = {"fp32": mz.Precision(), "bf16": BF16}
OPTIONS = {
    "default": {},
    "small buckets": {"bucket_bytes": 1},
    "large buckets": {"bucket_bytes": 1 << 24},
    "no prefetch": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2, "reshard_after_forward": True},
}
SEEDS = (1, 2, 3)
WIRES = ("loads", "staged")


@pytest.fixture
def played(world, monkeypatch):
    """A context manager: a device that the host plays, of which it gives the runtime, and a communicator for it."""
    monkeypatch.setattr("mpizero.comm.side.LEAST_WINDOW", 1 << 14)
    monkeypatch.setattr("mpizero.comm.side.MOST_WINDOW", 1 << 14)
    monkeypatch.setattr("mpizero.collectives.staged.SLOT", 1 << 13)

    @contextmanager
    def device(seed=0, wire="loads", restless=0.2):
        monkeypatch.setenv("MPIZERO_DEVICE_WIRE", wire)
        runtime, comm = HostRuntime(10 * seed + world.rank, restless=restless), mz.Communicator(world.mpi)
        with stand_in(runtime):
            yield runtime, comm
        comm.close()

    return device


class Chain(nn.Module):
    """Several units in an order that changes, and matrices of the root's own."""

    def __init__(self, units=5):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.units = nn.ModuleList(Unit() for _ in range(units))

    def forward(self, x, order=None):
        x = self.first(x)
        for number in range(len(self.units)) if order is None else order:
            x = self.units[number](x)
        return self.last(x)


def step(model, optimizer, rank, number):
    """One step of two micro-batches, of which every other step keeps the first one back; return the norm."""
    with mz.no_sync(model) if number % 2 else nullcontext():
        model(batch(rank, 2 * number)).float().square().mean().backward()
    model(batch(rank, 2 * number + 1)).float().square().mean().backward()
    norm = mz.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def trained(comm, *, steps=3, **options):
    """Train, and return all that must have the same bits everywhere."""
    model = mz.shard(seeded(Net, comm.rank), comm, units={Unit}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = [step(model, optimizer, comm.rank, number) for number in range(steps)]
    return {**mz.full_parameters(model), "norms": torch.stack(norms)}


@pytest.fixture(scope="module")
def on_host(world):
    """What training on the host gives, by precision: at every stage and with all options the same bits."""
    return {name: trained(world, stage=0, precision=precision) for name, precision in PRECISIONS.items()}


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_bits_of_the_host(played, on_host, stage, precision):
    """With no_sync, clipping and an fp32 master, by a device that runs early, late, and out of order."""
    for seed, wire in zip(SEEDS, (*WIRES, "loads"), strict=True):
        with played(seed, wire) as (_, comm):
            same(trained(comm, stage=stage, precision=PRECISIONS[precision]), on_host[precision])


@pytest.mark.parametrize("options", list(OPTIONS)[1:])
def test_buckets_and_prefetch(played, on_host, options):
    with played(len(options)) as (_, comm):
        for name, precision in PRECISIONS.items():
            same(trained(comm, stage=3, precision=precision, **OPTIONS[options]), on_host[name])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_is_flat_over_50_steps(world, played, stage):
    """The device's bytes for collectives, and those of all tensors: the second half of 50 steps takes no more."""
    x = batch(world.rank)
    with played(4) as (runtime, comm), live_bytes() as held:
        model = mz.shard(seeded(Net), comm, stage=stage, units={Unit}, precision=BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        allocated, tensors = [], []
        for number in range(50):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            allocated.append(runtime.allocated)
            if number in {9, 49}:
                runtime.finish()
                gpus().stand_in.let_go()
                gc.collect()
                tensors.append(held())
    assert max(allocated[25:]) <= max(allocated[:25])
    assert tensors[1] <= tensors[0]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_in_flight_are_bounded(world, played, prefetch):
    """Gathered beside the root: the unit at work, and at most `prefetch` more, also where the order changes."""
    with played(5) as (_, comm):
        model = mz.shard(seeded(Chain), comm, units={Unit}, prefetch=prefetch, bucket_bytes=1)
        runtime, seen = runtime_of(model), []

        def note(_, __):
            seen.append(sum(own.full.untyped_storage().nbytes() > 0 for own in runtime.flats[1:]))

        runtime.trace = note
        for order in (None, None, (4, 1, 3, 0, 2), (0, 1, 4, 2, 3), None):
            model(batch(world.rank), order).sum().backward()
            check_at_rest(model)
    assert max(seen) == 1 + prefetch


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_in_flight_are_bounded(world, played, stage):
    """Two that hold gradients apart; where nothing is cut and precision is the master's, they are reduced in place."""
    with played(6) as (_, comm):
        model = mz.shard(seeded(Chain), comm, stage=stage, units={Unit}, precision=BF16, bucket_bytes=1)
        runtime, seen = runtime_of(model), []
        runtime.trace = lambda *_: seen.append(len(runtime.reductions._jobs))
        model(batch(world.rank)).float().sum().backward()
    assert 1 <= max(seen) <= reductions.AT_ONCE


def test_what_is_the_hosts_alone(world, played):
    """Node-shared parameters, room that peers load, and reductions driven by the caller are off."""
    with played() as (_, comm):
        with pytest.raises(ArgumentError, match=r"node_shared.*False or None for a model on a GPU.*True"):
            mz.shard(seeded(Net), comm, units={Unit}, node_shared=True)
        for stage in STAGES:
            model = mz.shard(seeded(Net), comm, stage=stage, units={Unit}, bucket_bytes=1)
            report = mz.memory_report(model)
            assert (report.node_shared, report.room, report.device) == (False, 0, "cpu")
            assert not runtime_of(model).comm.driven_by_caller
    on_host = mz.shard(seeded(Net), world, units={Unit})
    assert runtime_of(on_host).comm.driven_by_caller == (world.board is not None)


def test_norms_batches_and_scales(world, played):
    """What reads a device's values or puts some there: SyncBatchNorm, GradScaler, EMA, whole parameters."""

    def results(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), Unit(), nn.Linear(7, 5))
        model = mz.shard(mz.convert_sync_batchnorm(model, comm), comm, units={Unit})
        optimizer, scaler, ema = torch.optim.Adam(model.parameters()), mz.GradScaler(init_scale=8.0), mz.EMA(model, 0.5)
        for number in range(2):
            scaler.scale(model(batch(world.rank, number)).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            ema.update()
        first = next(model.parameters())
        found = [mz.full_parameter(first), mz.full_optimizer_state(first, optimizer, "exp_avg")]
        mz.set_full_parameter(first, found[1] if world.rank == 0 else None)
        mz.set_full_optimizer_state(first, optimizer, "step", 5.0)
        found.append(mz.full_optimizer_state(first, optimizer, "step"))
        with ema.swapped():
            found += mz.full_parameters(model).values()
        with mz.unsharded(model), torch.no_grad():
            found.append(model.eval()(batch(0)))
        return [*found, *model.buffers()]

    expected = results(world)
    for seed, wire in enumerate(WIRES):
        with played(seed, wire) as (_, comm):
            assert all(map(torch.equal, results(comm), expected))


@pytest.mark.sizes(2)
@pytest.mark.parametrize("numbering", ["interleaved", "blocked"])
def test_exact(world, played, numbering):
    if world.size == 3:
        return

    def results(comm):
        model = mz.shard(seeded(Net), comm, units={Unit}, exact=True)
        rows = torch.cat([batch(number) for number in range(4)])
        for micro in mz.micro_batches(model, rows, 4, numbering=numbering):
            (model(micro) * torch.rand(5)).square().mean().backward()
        return [mz.clip_grad_norm_(model, 0.1), *map(mz.full_gradient, model.parameters())]

    expected = results(world)
    with played(7) as (_, comm):
        assert all(map(torch.equal, results(comm), expected))


@pytest.mark.sizes(4)
def test_hybrid_sharding(world, played):
    """Groups of two, whose sums are added up between two gradients, where the device has come to them."""
    if world.size != 4:
        return

    def results(comm):
        group = comm.split(comm.rank // 2)
        found = trained(comm, steps=2, group=group, precision=BF16, node_shared=False)
        group.close()
        return found

    expected = results(world)
    with played(8) as (_, comm):
        same(results(comm), expected)


def test_a_mistake_is_told_of_on_all_ranks(world, played):
    """A device's model on one rank and the host's on another; forwards that differ."""
    differs = pytest.raises(ArgumentError, match=r"(model on a GPU on rank 0|model in host memory on rank)")
    with stand_in(HostRuntime()) if world.rank == 0 else nullcontext(), differs:
        mz.shard(seeded(Net), world, units={Unit})
    with played() as (_, comm):
        model = mz.shard(seeded(Net), comm, units={Unit})
        with pytest.raises(ShardError, match="all ranks must make the same call"):
            model.train(world.rank == 0)(batch(0))
