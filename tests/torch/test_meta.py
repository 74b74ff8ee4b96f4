"""Models built on the meta device: their values, what nobody gives a value, and the memory it takes."""

import gc

import pytest
import torch
from helpers.small import STAGES, Net, Unit, batch, seeded
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError
from mpizero.shard.flat import FlatParams
from mpizero.testing.memory import live_bytes

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]


class Rotary(nn.Module):
    """Hold frequencies that are computed, in a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.frequencies.copy_(10.0 ** -torch.arange(7.0))


class Model(Net):
    """Tied matrices in different units, a buffer that is computed, a batch norm, and a parameter of the root's own."""

    def __init__(self):
        super().__init__()
        self.rotary, self.norm, self.steps = Rotary(), nn.BatchNorm1d(7), 0
        self.units[1].linear.weight = self.units[0].linear.weight
        del self.scale
        self.bias = nn.Parameter(torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.bias)

    def forward(self, x):
        x = self.first(x) + self.rotary.frequencies + self.bias
        for unit in self.units:
            x = unit(x)
        return self.last(self.norm(x))


def on_meta(make, seed=0):
    torch.manual_seed(seed)
    with torch.device("meta"):
        return make()


def values(model):
    return {**mz.full_parameters(model), **dict(model.named_buffers())}


def equal(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(("stage", "node_shared"), [*((stage, None) for stage in STAGES), (3, False)])
def test_the_values_of_a_real_build(world, stage, node_shared):
    """S4: at every stage what rank 0's seed gives, buffers too; the generator goes on as after a real build."""

    def chain():
        return nn.Sequential(
            nn.Linear(7, 7), Unit(), nn.Sequential(Rotary(), nn.BatchNorm1d(7)), Unit(), nn.Linear(7, 5)
        )

    options = {"stage": stage, "units": {Unit}, "node_shared": node_shared}
    real = mz.shard(seeded(chain), world, **options)
    after = torch.rand(1)
    model = mz.shard(on_meta(chain, seed=world.rank), world, **options)
    if world.rank == 0:
        assert torch.equal(torch.rand(1), after)
    equal(values(model), values(real))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("stage", [0, 3])
def test_tied_parameters_and_part_of_a_model(world, stage):
    """Tied parameters stay tied and have the first module's values; what has values keeps them."""
    model = on_meta(Model)
    model.units[1].norm = nn.LayerNorm(7)
    model.last = nn.Linear(7, 5)
    nn.init.constant_(model.last.weight, 3.0)
    mz.shard(model, world, stage=stage, units={Unit})
    full = mz.full_parameters(model)
    assert full["last.weight"].eq(3).all()
    assert torch.equal(full["units.0.linear.weight"], full["units.1.linear.weight"])
    assert 0 < full["units.0.linear.weight"].abs().max() <= 7**-0.5  # as nn.Linear initialises
    assert len(list(model.parameters())) == len(full) - 1
    model(batch(world.rank)).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_values_from_a_callable(world):
    """`materialize` gets each module with tensors on meta, on rank 0, twice; ignored and frozen parameters too."""
    model, called = on_meta(Net), []
    model.units[0].linear.requires_grad_(requires_grad=False)
    ignored = [model.first.weight]

    def constant(module):
        called.append(module)
        for number, tensor in enumerate([*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            tensor.fill_(number + 1.0)

    mz.shard(model, world, units={Unit}, materialize=constant, ignored_params=ignored)
    assert ignored[0] is model.first.weight
    assert ignored[0].eq(1).all()
    assert model.scale.eq(1).all()
    for name, value in mz.full_parameters(model).items():
        assert value.eq(2 if name.endswith("bias") else 1).all()
    assert bool(called) == (world.rank == 0)
    assert not next(model.units[0].linear.parameters()).requires_grad


def test_what_is_never_initialised_is_listed(world):
    """S4: an error on all ranks that lists it, for floats, whole numbers and plain attributes; the model stays."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gain = nn.Linear(7, 7), nn.Parameter(torch.empty(7))
            self.register_buffer("positions", torch.arange(7))
            self.table = torch.ones(7)

        def forward(self, x):
            return self.inner(x) * self.gain

    model = on_meta(lambda: nn.Sequential(Odd(), nn.Linear(7, 5)))
    with pytest.raises(
        ArgumentError, match=r"initialised by their modules \(got '0.gain, 0.positions, 0.table'\): give"
    ):
        mz.shard(model, world)

    def broken(module):
        raise KeyError(type(module).__name__)

    with pytest.raises(ArgumentError, match=r"0. \(KeyError: 'Odd'\)"):
        mz.shard(model, world, materialize=broken)

    def complete(module):
        if isinstance(module, Odd):
            module.gain = nn.Parameter(torch.ones(7))
            module.positions, module.table = torch.arange(7), torch.ones(7)
        else:
            module.reset_parameters()

    mz.shard(model, world, materialize=complete)
    assert model(batch(world.rank)).isfinite().all()


def test_real_values_on_rank_0_alone(world):
    """Only rank 0's values count: others may leave all on meta."""
    model = mz.shard(seeded(Net) if world.rank == 0 else on_meta(Net), world, units={Unit})
    expected = seeded(Net)
    equal(values(model), {**dict(expected.named_parameters()), **dict(expected.named_buffers())})


def test_peak_is_the_shards_and_one_unit(world, monkeypatch):
    """At stage 3, when a module initialises and when its values are placed: what is there at the end, and a unit."""
    width, units, samples = 256, 8, []

    def tower():
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(units)))

    with live_bytes() as held:

        def measured(module):
            module.reset_parameters()
            samples.append(held())

        def placed(flat, values, spill, place=FlatParams._place):
            place(flat, values, spill)
            samples.append(held())

        monkeypatch.setattr(FlatParams, "_place", placed)
        model = on_meta(tower)
        mz.shard(model, world, stage=3, units={nn.Sequential}, node_shared=False, materialize=measured)
        gc.collect()
        at_rest, unit = held() - mz.memory_report(model).room, 4 * (width + 1) * width
    assert len(samples) == (3 * units if world.rank == 0 else units)
    if world.size > 1:
        assert max(samples) <= at_rest + 1.02 * unit
        assert max(samples) >= unit + at_rest / 4  # the instrument sees units at all
