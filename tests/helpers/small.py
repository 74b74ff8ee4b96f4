"""A small sharded net, and its training beside one process on the joined batch."""

import torch
from torch import nn

import mpizero as mz

STAGES = (0, 1, 2, 3)
BF16 = mz.Precision(param=torch.bfloat16)


class FailingGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise ArithmeticError("in backward")


class Unit(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Two units between matrices of the root's own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.units = nn.ModuleList(Unit() for _ in range(2))
        self.register_buffer("scale", torch.rand(7) + 0.5)

    def forward(self, x):
        x = self.first(x) * self.scale.to(x.dtype)
        for unit in self.units:
            x = unit(x)
        return self.last(x)

    def encode(self, x):
        return self.first(x) + self.units[0].linear(x)


class Skipping(Net):
    """Be a `Net` that may leave a unit out, which it is told by number."""

    skip = None

    def forward(self, x):
        x = self.first(x)
        for number, unit in enumerate(self.units):
            x = x if number == self.skip else unit(x)
        return self.last(x)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def batch(rank, step=0, width=7):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def joined(world, step=0, width=7):
    return torch.cat([batch(rank, step, width) for rank in range(world.size)])


def close(value, expected, limit=1e-5):
    value, expected = value.detach().float(), expected.detach().float()
    error = torch.linalg.vector_norm(value - expected)
    assert error <= limit * max(float(torch.linalg.vector_norm(expected)), 1e-2)  # weights are of the size of 0.1


def train(model, x_of, steps=2, clip=None, lr=0.1):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for step in range(steps):
        model(x_of(step)).square().mean().backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trains_as_one(world, make, stage, *, units=(Unit,), steps=2, width=7):
    """Train sharded and, in one process, on the joined batch; compare all parameters. Returns the sharded model."""
    plain, model = seeded(make), mz.shard(seeded(make), world, stage=stage, units=set(units) or None)
    train(plain, lambda step: joined(world, step, width), steps)
    train(model, lambda step: batch(world.rank, step, width), steps)
    full = mz.full_parameters(model)
    assert list(full) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    for name, value in full.items():
        close(value, plain.get_parameter(name))
    return model, plain


def same_everywhere(world, value):
    """Return whether a tensor has the same bits on all ranks."""
    rows = mz.all_gather(value.detach().reshape(1, -1).clone(), world)
    return bool((rows == rows[0]).all())
