"""Whole parameters, gradients and optimizer states, read and set."""

import pytest
import torch
from helpers.small import STAGES, Net, Unit, batch, close, joined, seeded
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError, ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

CASES = [*((stage, None) for stage in STAGES), (3, False), ("HYBRID_SHARD", None)]
each_case = pytest.mark.parametrize(("stage", "node_shared"), CASES)


class Odd(Net):
    """Have tied, frozen, scalar and empty parameters too, and one long enough to be cut."""

    def __init__(self):
        super().__init__()
        self.units[1].linear.weight = self.units[0].linear.weight
        self.units[0].norm.requires_grad_(requires_grad=False)
        self.factor, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.long = nn.Parameter(torch.rand(40, 7))

    def forward(self, x):
        return super().forward(x) * self.factor + self.none.sum() + self.long.sum()


def stepped(model, x, steps=2):
    # With a large eps, rounding errors do not become steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


@each_case
def test_read_beside_one_process(world, stage, node_shared):
    """Parameters, gradients, moments and step counts, as a plain model on the joined batch has them."""
    plain, model = seeded(Odd), mz.shard(seeded(Odd), world, stage=stage, units={Unit}, node_shared=node_shared)
    there, here = stepped(plain, joined(world)), stepped(model, batch(world.rank))
    full = mz.full_parameters(model)
    for (name, shard), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mz.full_parameter(shard), full[name])
        grad = mz.full_gradient(shard)
        assert (grad is None) == (param.grad is None)
        if grad is not None:
            assert grad.shape == param.shape
            close(grad, param.grad)
            moment = mz.full_optimizer_state(shard, here, "exp_avg")
            assert moment.shape == param.shape
            close(moment, there.state[param]["exp_avg"])
            assert mz.full_optimizer_state(shard, here, "step") == 2
    by_attribute = mz.full_parameter(model.units[1].linear.weight)
    assert torch.equal(by_attribute, full["units.0.linear.weight"])
    by_attribute.zero_()
    assert full["units.0.linear.weight"].any()


@each_case
def test_set_and_read(world, stage, node_shared):
    """What rank 0 gives is what all ranks then read and compute with; other parameters are left alone."""
    model = mz.shard(seeded(Odd), world, stage=stage, units={Unit}, node_shared=node_shared)
    optimizer = stepped(model, batch(world.rank))
    before = mz.full_parameters(model)
    names = dict(model.named_parameters())
    for number, name in enumerate(("long", "factor", "none", "units.0.linear.weight", "units.0.norm.weight")):
        shape = before[name].shape
        value = torch.rand(shape, generator=torch.Generator().manual_seed(number))
        given = value if world.rank == 0 else None
        mz.set_full_parameter(names[name], given)
        assert torch.equal(mz.full_parameter(names[name]), value)
        if names[name].requires_grad:
            mz.set_full_gradient(names[name], given)
            assert torch.equal(mz.full_gradient(names[name]), value)
            mz.set_full_optimizer_state(names[name], optimizer, "exp_avg", given)
            assert torch.equal(mz.full_optimizer_state(names[name], optimizer, "exp_avg"), value)
            mz.set_full_optimizer_state(names[name], optimizer, "step", 7 if world.rank == 0 else None)
            assert mz.full_optimizer_state(names[name], optimizer, "step") == 7
    after = mz.full_parameters(model)
    assert torch.equal(after["first.weight"], before["first.weight"])
    plain = seeded(Odd)
    for name, param in plain.named_parameters(remove_duplicate=False):
        param.data.copy_(after[name])
    with torch.no_grad():
        close(model(batch(world.rank)), plain(batch(world.rank)))


def test_a_set_gradient_is_stepped_and_added_to(world):
    """The optimizer takes it, and a backward adds to it."""
    model = mz.shard(seeded(lambda: nn.Linear(70, 3)), world, stage=3)
    start = mz.full_parameter(model.weight)
    mz.set_full_gradient(model.weight, torch.ones(3, 70))
    model(torch.ones(2, 70)).sum().backward()
    assert torch.equal(mz.full_gradient(model.weight), torch.full((3, 70), 3.0))
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert torch.equal(mz.full_parameter(model.weight), start - 1.5)


def test_mistakes(world):
    """On all ranks, with the parameter's name."""
    model = mz.shard(seeded(Net), world, stage=3, units={Unit}, node_shared=False)
    optimizer = torch.optim.AdamW(model.parameters())
    first, last = model.first.weight, model.last.weight
    if world.size > 1:
        with pytest.raises(ShardError, match=r"rank 0: full_parameter of 'first.weight'; rank 1: .*'last.weight'"):
            mz.full_parameter(last if world.rank else first)
        with pytest.raises(ShardError, match=r"rank 0: full_gradient of 'first.weight'; rank 1: full_parameter of"):
            (mz.full_parameter if world.rank else mz.full_gradient)(first)
        with pytest.raises(ShardError, match=r"rank 0: full_parameters; rank 1: full_parameter"):
            mz.full_parameter(first) if world.rank else mz.full_parameters(model)
    with pytest.raises(ArgumentTypeError, match=r"a parameter of a sharded model"):
        mz.full_parameter(torch.ones(3))
    for value in (None, torch.ones(5)):
        with pytest.raises(ArgumentError, match=r"of 'first.weight' must be rank 0's tensor of shape \(7, 7\)"):
            mz.set_full_parameter(first, value)
    with pytest.raises(ArgumentError, match=r"one that the optimizer has \(no state"):
        mz.full_optimizer_state(first, optimizer, "exp_avg")
    model(batch(world.rank)).sum().backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match=r"\(step, exp_avg, exp_avg_sq\) \(got 'momentum'\)"):
        mz.set_full_optimizer_state(first, optimizer, "momentum", torch.ones(7, 7))
    with mz.unsharded(model), pytest.raises(ShardError, match=r"outside mpizero.unsharded"):
        mz.set_full_parameter(last, torch.ones(5, 7))
