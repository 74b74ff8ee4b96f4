"""Chains of units on thread ranks, and their gradients beside one process on the joined batch."""

import copy

import torch
from torch import nn

import mpizero as mz
from mpizero.comm import run_loopback
from mpizero.shard import runtime_of

RANKS = 3


class Unit(nn.Module):
    """A norm (whose backward reads its weight itself, not a view) and a matrix."""

    def __init__(self, width=6):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Chain(nn.Module):
    """Units in a row between two matrices of the root's own; subclasses say how they are called."""

    def __init__(self, unit=Unit, count=2):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.units = nn.ModuleList(unit() for _ in range(count))

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            x = self.through(unit, x)
        return self.last(x)

    def through(self, unit, x):
        return unit(x)


def batch(rank, step=0):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def joined(ranks=RANKS, step=0):
    return torch.cat([batch(rank, step) for rank in range(ranks)])


def whole_gradients(comm, model):
    """Return the reduced gradients as whole tensors; None where a parameter has none."""
    runtime = runtime_of(model)
    found = {}
    for unit in runtime.units:
        for flat in unit.trainable:
            whole = torch.zeros(flat.layout.length)
            for index, shard in enumerate(flat.shards):
                if shard.grad is not None:
                    flat.piece_of(whole[flat.own], index).copy_(shard.grad)
            if flat.lifetime.cut:
                whole = mz.all_gather(whole[flat.own].clone(), comm)
            for slot, member, shard in zip(flat.layout.slots, flat.members, flat.shards, strict=True):
                value = None if shard.grad is None else whole[slot.offset : slot.stop].view(slot.shape).clone()
                found.update(dict.fromkeys(member.names, value))
    return found


def check_gradients(comm, model, plain):
    for name, value in whole_gradients(comm, model).items():
        expected = plain.get_parameter(name).grad
        assert (value is None) == (expected is None), name
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: name + text)
    check_at_rest(model)


def check_at_rest(model):
    """Nothing of a step is left behind."""
    runtime = runtime_of(model)
    for unit in runtime.units:
        assert unit.state.value == "sharded"
        assert unit.calls == unit.entered == unit.open == 0
        for flat in unit.flats:
            assert flat.gradients is None or flat.gradients.incoming is None
            assert flat.live is not flat.lifetime.release_parameters


def steps_agree(make, stage, run=lambda model, x: model(x).square().mean().backward(), ranks=RANKS, units=(Unit,)):
    """Compare the gradients of two steps with one process on the joined batch."""
    original = make()

    def body(comm):
        plain = copy.deepcopy(original)
        model = mz.shard(copy.deepcopy(plain), comm, stage=stage, units=set(units))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for step in range(2):
            run(plain, joined(ranks, step))
            run(model, batch(comm.rank, step))
            check_gradients(comm, model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model

    return run_loopback(ranks, body)
