"""Moving averages of shards, beside the same average of a model in one process."""

import pytest
import torch
from helpers.small import BF16, STAGES, Net, Unit, batch, close, joined, same_everywhere, seeded, train

import mpizero as mz
from mpizero.errors import ArgumentError, ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

each_stage = pytest.mark.parametrize("stage", STAGES)
DECAY = 0.75


def frozen_net():
    model = Net()
    model.first.weight.requires_grad_(requires_grad=False)
    return model


def sharded(world, stage, precision=None):
    return mz.shard(seeded(frozen_net), world, stage=stage, units={Unit}, precision=precision)


def steps(world, model, ema=None, *, start=0, evaluate=None):
    """Three steps with momentum, with or without averages, with or without an evaluation after each."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(start, start + 3):
        model(batch(world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        if evaluate is not None:
            evaluate()
    return {name: value.clone() for name, value in mz.full_parameters(model).items()}


def test_averages_are_those_of_one_process(world):
    """At every stage, to the bit equal to stage 0's, and close to what one process gets."""
    plain = seeded(frozen_net)
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    first = None
    for step in range(3):
        train(plain, lambda _, step=step: joined(world, step), steps=1)
        for name, param in plain.named_parameters():
            expected[name].lerp_(param.detach(), 1 - DECAY)
    for stage in STAGES:
        model = sharded(world, stage)
        ema = mz.EMA(model, DECAY)
        for step in range(3):
            train(model, lambda _, step=step: batch(world.rank, step), steps=1)
            ema.update()
        with ema.swapped():
            got = {name: value.clone() for name, value in mz.full_parameters(model).items()}
        first = first or got
        for name, value in got.items():
            close(value, expected[name])
            assert torch.equal(value, first[name])
            assert same_everywhere(world, value)
        assert not torch.equal(got["last.weight"], mz.full_parameters(model)["last.weight"])


@pytest.mark.parametrize(("stage", "precision"), [*((stage, None) for stage in STAGES), (0, BF16), (3, BF16)], ids=str)
def test_evaluation_inside_swapped_uses_the_averages(world, stage, precision):
    """By forward and inside unsharded, after each step; training goes on as if nothing had been, bit for bit."""
    untouched = steps(world, sharded(world, stage, precision))
    model, x = sharded(world, stage, precision), batch(99)
    ema = mz.EMA(model, DECAY)
    shadow = seeded(frozen_net)
    before = {name: param.detach().clone() for name, param in shadow.named_parameters()}

    def evaluate():
        now = mz.full_parameters(model)
        for name, average in before.items():
            average.lerp_(now[name], 1 - DECAY)
        shadow.load_state_dict({**shadow.state_dict(), **before})
        limit = 1e-5 if precision is None else 3e-2
        with torch.no_grad():
            training = model(x)
            with ema.swapped() as inside:
                assert inside is model
                close(model(x), shadow(x), limit)
                with mz.unsharded(model):
                    if world.rank == 0:
                        close(model(x), shadow(x), limit)
            assert not torch.equal(training, shadow(x).to(training.dtype))
            assert torch.equal(model(x), training)

    touched = steps(world, model, ema, evaluate=evaluate)
    for name, value in untouched.items():
        assert torch.equal(touched[name], value), name


@each_stage
def test_state_dict(world, stage):
    model = sharded(world, stage)
    ema = mz.EMA(model, DECAY)
    steps(world, model, ema)
    state = ema.state_dict()
    assert list(state["averages"]) == [name for name, param in model.named_parameters() if param.requires_grad]
    assert "first.weight" not in state["averages"]
    other = mz.EMA(model, 0.5)
    other.load_state_dict(state)
    steps(world, model, start=3)
    ema.update()
    other.update()
    assert (other.decay, other.num_updates) == (DECAY, 4)
    for name, value in ema.state_dict()["averages"].items():
        assert torch.equal(value, other.state_dict()["averages"][name])
    kept = state["averages"]["last.weight"].clone()
    with pytest.raises(ArgumentError, match=r"average of 'last.bias' must be of shape"):
        other.load_state_dict({**state, "averages": {**state["averages"], "last.bias": torch.zeros(77)}})
    with pytest.raises(ArgumentError, match=r"same parameters.*nothing.weight"):
        other.load_state_dict({**state, "averages": {**state["averages"], "nothing.weight": kept}})
    assert torch.equal(other.state_dict()["averages"]["last.weight"], kept)


@each_stage
def test_what_swapped_refuses(world, stage):
    model = sharded(world, stage)
    ema = mz.EMA(model, DECAY)
    steps(world, model, ema)
    before = {name: value.clone() for name, value in mz.full_parameters(model).items()}
    with ema.swapped():
        for call in (ema.update, ema.state_dict, ema.swapped().__enter__, lambda: ema.load_state_dict({})):
            with pytest.raises(ShardError, match="outside its swapped block"):
                call()
    with mz.unsharded(model), pytest.raises(ShardError, match="outside mpizero"), ema.swapped():
        pass
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    with pytest.raises(ShardError, match=r"left alone inside EMA\.swapped"), ema.swapped(), torch.no_grad():
        next(param for param in model.parameters() if param.requires_grad).add_(1)
    for name, value in mz.full_parameters(model).items():
        assert torch.equal(value, before[name])


def test_bad_arguments(world):
    model = sharded(world, 3)
    with pytest.raises(ArgumentError, match="decay must be from 0 to 1"):
        mz.EMA(model, 1.5)
    with pytest.raises(ShardError, match=r"mpizero.shard was called on"):
        mz.EMA(seeded(Net))
    with mz.unsharded(model), pytest.raises(ShardError, match="outside mpizero"):
        mz.EMA(model)
    frozen = seeded(Net).requires_grad_(requires_grad=False)
    with pytest.raises(ArgumentError, match="with trainable parameters"):
        mz.EMA(mz.shard(frozen, world, units={Unit}))
