"""The node's shared parameters: readers that are waited for, generations, writes, and the memory given back."""

import gc
import time
from pathlib import Path

import pytest
import torch
from helpers.small import BF16, Net, Unit, batch, close, joined, same_everywhere, seeded, train
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, ShardError
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

PAUSE = 0.03
"""Seconds in which a rank that waits for nobody would be far ahead."""

cut = pytest.mark.parametrize("stage", [1, 2, 3])
precisions = pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def _several_ranks_of_one_node(world):
    if world.size == 1 or len(set(world.nodes)) > 1:
        pytest.skip("ranks of one node, two or more of them, share parameters")


def shared(world, stage=3, make=Net, **options):
    model = mz.shard(seeded(make), world, stage=stage, units={Unit}, node_shared=True, **options)
    assert runtime_of(model).window is not None
    return model


def checksum(model):
    with torch.no_grad():
        return [param.double().abs().sum().item() for param in model.parameters()]


def backward(model, world, step=0):
    model(batch(world.rank, step)).float().square().mean().backward()


def write(model, factor):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


@cut
@precisions
@pytest.mark.parametrize("reader", [0, -1])
@pytest.mark.parametrize("change", ["step", "write"])
def test_who_reads_inside_unsharded_is_waited_for(world, stage, precision, reader, change):
    """A step, and a write in place, of the others come after it; none reads what is half written."""
    model, rank = shared(world, stage, precision=precision), reader % world.size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        backward(model, world, step)
        with mz.unsharded(model):
            if world.rank == rank:
                before = checksum(model)
                time.sleep(PAUSE)
                assert checksum(model) == before
        optimizer.step() if change == "step" else write(model, 1.5)
        optimizer.zero_grad()
    with mz.unsharded(model):
        for param in model.parameters():
            assert same_everywhere(world, param.float())


class Slow(Net):
    """A forward in which one rank takes its time between two uses of the same parameters."""

    pause = 0.0

    def forward(self, x):
        first = super().forward(x)
        if self.pause:
            time.sleep(self.pause)
            assert torch.equal(super().forward(x), first)
        return first


@cut
@precisions
@pytest.mark.parametrize("change", ["step", "write"])
def test_who_reads_in_a_slow_forward_is_waited_for(world, stage, precision, change):
    """An evaluation between the gradients and the step: the step of fast ranks leaves it alone."""
    model = shared(world, stage, Slow, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for reader in (0, world.size - 1):
        backward(model, world)
        model.pause = PAUSE if world.rank == reader else 0.0
        with torch.no_grad():
            model(batch(9))
        model.pause = 0.0
        optimizer.step() if change == "step" else write(model, 1.5)
        optimizer.zero_grad()


@cut
def test_ranks_do_not_wait_in_a_circle(world, stage):
    """Each rank is slow in turn, with evaluations of different models in between."""
    models = [shared(world, stage, Slow), shared(world, stage, Slow)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for turn in range(2 * world.size):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.pause = PAUSE / 10 if (world.rank + number) % world.size == turn % world.size else 0.0
            backward(model, world, turn)
            with torch.no_grad():
                models[1 - number](batch(9))
            optimizer.step()
            optimizer.zero_grad()


@cut
@precisions
@pytest.mark.parametrize("alike", [True, False])
def test_a_step_between_forward_and_backward(world, stage, precision, alike):
    """S23: raises on all ranks, also on one that did not step itself: others changed what its forward saw."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)  # one rank holds all of it

        def forward(self, x):
            return self.linear(x)

    model = mz.shard(seeded(Tiny), world, stage=stage, node_shared=True, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, width=1)).sum().backward()
    loss = model(batch(0, width=1)).float().square().sum()
    if world.rank > 0 or alike:
        optimizer.step()
    mz.barrier(world)
    with pytest.raises(ShardError, match="must be left alone between forward and backward"):
        loss.backward()
    optimizer.zero_grad()
    train(model, lambda step: batch(world.rank, step, 1))


@cut
@precisions
def test_writes_in_place_reach_all_ranks(world, stage, precision):
    """Between steps, at any time; of frozen parameters too."""

    def half(plain):
        for unit in plain.units:
            unit.linear.requires_grad_(requires_grad=False)
        return plain

    model = mz.shard(half(seeded(Net)), world, stage=stage, units={Unit}, node_shared=True, precision=precision)
    plain = half(seeded(Net))
    for round_ in range(3):
        train(model, lambda step, round_=round_: batch(world.rank, 2 * round_ + step))
        train(plain, lambda step, round_=round_: joined(world, 2 * round_ + step))
        write(model, 1.25)
        write(plain, 1.25)
        limit = 1e-5 if precision is None else 3e-2
        with mz.unsharded(model):
            for name, param in model.named_parameters():
                close(param, plain.get_parameter(name), limit)
                assert same_everywhere(world, param.float())
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name), limit)


@cut
@precisions
def test_the_same_bits_as_without(world, stage, precision):
    """Sharing is a matter of memory: bits are those of full copies on every rank."""
    found = []
    for node_shared in (True, False):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, precision=precision, node_shared=node_shared)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            backward(model, world, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(mz.full_parameters(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_where_no_window_can_be_had(world, monkeypatch):
    """True raises on all ranks, before the model is touched; None goes on without."""
    monkeypatch.setattr(type(world), "window", lambda *_: None)
    for stage in (1, 2, 3):
        model = seeded(Net)
        with pytest.raises(ArgumentError, match="node_shared must be False or None where"):
            mz.shard(model, world, stage=stage, units={Unit}, node_shared=True)
        mz.shard(model, world, stage=stage, units={Unit})
        assert runtime_of(model).window is None
        plain = train(seeded(Net), lambda step: joined(world, step))
        train(model, lambda step: batch(world.rank, step))
        for name, value in mz.full_parameters(model).items():
            close(value, plain.get_parameter(name))


def mapped():
    """Return the bytes of shared memory that this process maps: what no rank maps any more, the node has back."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "/dev/shm/mpizero-" in line]  # noqa: S108
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


class Large(nn.Module):
    """4 MiB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


LARGE = 4 << 20
"""Bytes of its parameters in fp32."""


@pytest.mark.parametrize(("stage", "precision"), [(1, None), (3, BF16)], ids=["fp32", "bf16"])
def test_the_memory_is_given_back(world, stage, precision):
    """When a model is dropped, in the midst of another's training; models do not share."""
    other = shared(world, stage, precision=precision)
    train(other, lambda step: batch(world.rank, step))
    nbytes = LARGE // (1 if precision is None else 2)

    def live(make):
        before = mapped()
        model = make()
        model(torch.ones(1, 512)).float().sum().backward()
        loss = other(batch(world.rank)).float().square().mean()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        taken = mapped() - before
        del model
        left = mapped() - before
        loss.backward()
        return taken, left

    def make():
        return mz.shard(seeded(Large), world, stage=stage, units={nn.Linear}, node_shared=True, precision=precision)

    live(make)  # what the communicator keeps is there from now on
    taken, left = live(make)
    assert taken >= nbytes - LARGE // 16
    assert left <= LARGE // 16
    train(other, lambda step: batch(world.rank, step))


def test_an_error_on_entry_leaves_no_reader(world):
    """S9, S23: ranks that enter different calls are told, and no step waits for them afterwards."""
    model = shared(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, world)
    enter = mz.unsharded(model).__enter__
    with pytest.raises(ShardError, match="all ranks must make the same call"):
        enter() if world.rank < world.size - 1 else model(batch(world.rank))
    optimizer.step()
    optimizer.zero_grad()
    train(model, lambda step: batch(world.rank, step))
