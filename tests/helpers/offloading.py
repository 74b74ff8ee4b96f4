"""A small model to offload, its training and its comparison with another."""

import torch
from helpers.small import Unit

import mpizero as mz
from mpizero.arrays.disk import BLOCK

SMALL = 16 * BLOCK
"""Bytes of a group: several of a small model's."""
WIDTH = 90
OPTIMIZERS = {
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
}


class Wide(torch.nn.Sequential):
    """Be a model whose parameters, of which one is a number, are cut over several groups."""

    def __init__(self):
        super().__init__(torch.nn.Linear(5, WIDTH), Unit(WIDTH), Unit(WIDTH), torch.nn.Linear(WIDTH, 3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x, layers=None):
        for layer in list(self)[:layers]:
            x = layer(x)
        return x * self.scale


def sharded(world, offload=None, **options):
    torch.manual_seed(1)
    return mz.shard(Wide(), world, units={Unit}, offload=offload, **options)


def built(model, name, *, offloaded, **more):
    cls, options = OPTIMIZERS[name]
    # Two groups, of which one does not decay.
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return mz.offloaded(cls, model, groups, **options, **more) if offloaded else cls(groups, **options)


def train(model, optimizer, world, steps, *, clip=False, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + world.rank)
    for _ in range(steps):
        model(torch.randn(3, 5, generator=generator)).float().square().sum().backward()
        if clip:
            mz.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model, optimizer, other, other_optimizer):
    found, expected = mz.full_parameters(other), mz.full_parameters(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for group, its in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        for param, twin in zip(group["params"], its["params"], strict=True):
            state, twins = optimizer.state[param], other_optimizer.state[twin]
            assert state.keys() == twins.keys()
            assert [key for key in state if not same(state[key], twins[key])] == []


def same(value, other):
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
