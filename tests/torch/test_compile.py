"""Blocks compiled by torch: the same bits, and our hooks in no graph."""

import pytest
import torch
from helpers.small import Unit, batch, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.shard import runtime_of

pytestmark = [
    pytest.mark.sizes(2),
    pytest.mark.mpi,
    # torch, compiling, looks at `.grad` of inputs that are no leaves; it warns of itself in a plain model as well.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LARGEST = 2
"""Ranks up to which these tests run: compiling takes seconds of every rank, and knows nothing of the others."""


@pytest.fixture(autouse=True)
def few(world):
    if world.size > LARGEST:
        pytest.skip("compiling is the same at any number of ranks")


class Chain(nn.Module):
    """Two units that share one graph, and a root with matrices of its own."""

    recompute = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.units = nn.ModuleList(Unit() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            x = unit(x) if self.recompute is None else checkpoint(unit, x, use_reentrant=self.recompute)
        return self.last(x)


class Counting:
    """Be a backend that runs graphs as they are and counts them."""

    def __init__(self):
        self.graphs, self.nodes = 0, 0
        torch._dynamo.reset()

    def __call__(self, graph, _):
        self.graphs += 1
        self.nodes += len(graph.graph.nodes)
        return graph.forward


def trained(model, world, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model(batch(world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return mz.full_parameters(model)


def equal(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(("recompute", "node_shared"), [(None, False), (False, False), (True, False), (None, None)])
def test_blocks_compiled_before_and_after_shard(world, recompute, node_shared):
    """At stage 3: the bits of the model that is not compiled, whole graphs, none of them made anew in later steps."""
    options = {"stage": 3, "units": {Unit}, "node_shared": node_shared}
    plain = mz.shard(seeded(Chain), world, **options)
    plain.recompute = recompute
    expected = trained(plain, world)
    for before in (True, False):
        model, backend = seeded(Chain), Counting()
        model.recompute = recompute
        if not before:
            mz.shard(model, world, **options)
        for unit in model.units:
            unit.compile(backend=backend, fullgraph=True)
        if before:
            mz.shard(model, world, **options)
        equal(trained(model, world), expected)
        # One graph serves all units; reentrant checkpoints run forward once without grad, once with it.
        assert backend.graphs == (2 if recompute else 1)
        assert runtime_of(model).units[1].state.value == "sharded"


def test_graphs_that_autograd_differentiates_as_a_whole(world):
    """At stage 3 what such a graph saved is released and gathered again; and the same at stages 0 to 2."""
    expected = trained(mz.shard(seeded(Chain), world, units={Unit}), world)
    torch._dynamo.reset()
    for stage in (3, 0, 1, 2):
        model = mz.shard(seeded(Chain), world, stage=stage, units={Unit}, node_shared=False)
        for unit in model.units:
            unit.compile(backend="aot_eager", fullgraph=True)
        equal(trained(model, world), expected)


def test_a_root_that_is_compiled(world):
    """Units inside it break the graph, and nothing of their hooks is compiled; the names stay."""
    expected = trained(mz.shard(seeded(Chain), world, units={Unit}, node_shared=False), world)
    model, backend = mz.shard(seeded(Chain), world, units={Unit}, node_shared=False), Counting()
    model.compile(backend=backend)
    equal(trained(model, world, steps=2), trained(mz.shard(seeded(Chain), world, units={Unit}), world, steps=2))
    once = backend.graphs, backend.nodes
    model(batch(world.rank, 5)).sum().backward()
    assert (backend.graphs, backend.nodes) == once
    assert 1 <= once[0] <= 3
    assert list(expected) == [name for name, _ in model.named_parameters()]


def test_an_error_inside_a_compiled_block(world):
    """The unit is released, and the next step goes as if nothing had been."""
    model, backend = mz.shard(seeded(Chain), world, units={Unit}, node_shared=False), Counting()
    for unit in model.units:
        unit.compile(backend=backend)
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
        model.units[0](torch.ones(2, 3))
    assert all(unit.state.value == "sharded" for unit in runtime_of(model).units)
    equal(trained(model, world), trained(mz.shard(seeded(Chain), world, units={Unit}), world))
