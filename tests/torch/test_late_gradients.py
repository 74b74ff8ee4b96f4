"""Gradients that arrive after backward has entered a unit further down."""

import pytest
import torch
from helpers.small import batch, seeded
from torch import nn

import mpizero as mz

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


class Skip(nn.Module):
    """Return its argument itself, so that backward enters this unit and the one before it by the same tensor."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(7, 7)

    def forward(self, x):
        return x


def block():
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh())


CHAINS = {
    "the root returns its last unit's result": lambda: nn.Sequential(nn.Linear(7, 7), block(), block()),
    "a unit returns its argument": lambda: nn.Sequential(block(), block(), Skip(), nn.Linear(7, 5)),
}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("chain", CHAINS)
def test_two_units_entered_by_one_tensor(world, chain, bucket_bytes):
    """The unit entered first is not reduced before its gradients are there, or is reduced again."""
    found = []
    for stage in (0, 3):
        model = seeded(CHAINS[chain])
        mz.shard(model, world, stage=stage, units={nn.Sequential, Skip}, node_shared=False, bucket_bytes=bucket_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(batch(world.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(mz.full_parameters(model))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
