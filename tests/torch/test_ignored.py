"""Ignored parameters, methods and loops beside forward, and optimizers that need whole matrices."""

import pytest
import torch
from helpers.small import STAGES, Net, Unit, batch, seeded
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, ShardError
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_ignored_parameters(world, stage):
    """They start from rank 0's values, lie in no flat buffer, keep local gradients, and are whole in every view."""
    model = seeded(Net, seed=world.rank)
    ignored = [model.first.weight, model.units[0].norm.bias]
    mz.shard(model, world, stage=stage, units={Unit}, ignored_params=ignored)
    start = seeded(Net)
    assert ignored[0] is model.first.weight
    assert torch.equal(ignored[0], start.first.weight)
    names = [slot.name for flat in runtime_of(model).flats for slot in flat.layout.slots]
    assert not {"first.weight", "units.0.norm.bias"} & set(names)
    full = mz.full_parameters(model)
    assert list(full) == [name for name, _ in start.named_parameters()]
    for name, param in start.named_parameters():
        assert torch.equal(full[name], param)

    x = batch(world.rank)
    model(x).square().mean().backward()
    start(x).square().mean().backward()  # this rank's batch alone
    assert torch.allclose(ignored[0].grad, start.first.weight.grad, atol=1e-6)
    assert torch.allclose(ignored[1].grad, start.units[0].norm.bias.grad, atol=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert torch.allclose(ignored[0], start.first.weight - 0.1 * start.first.weight.grad, atol=1e-6)
    with mz.unsharded(model):
        state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in start.state_dict().items()}
    assert torch.equal(state["first.weight"], ignored[0])


def test_ignored_parameters_of_another_model(world):
    with pytest.raises(ArgumentError, match="ignored_params must be parameters of the model"):
        mz.shard(seeded(Net), world, ignored_params=[nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("node_shared", [False, None])
def test_a_sampling_loop_inside_unsharded(world, node_shared):
    """As many steps as each rank likes, by forward and by other methods, as the plain model gives; then training."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, units={Unit}, node_shared=node_shared)
    results = []
    with mz.unsharded(model), torch.no_grad():
        for one in (plain, model):
            x = batch(world.rank)
            for _ in range(2 + 3 * world.rank):
                x = torch.cat([one(x), one.encode(x)[:, :2]], dim=1).tanh()
            results.append(x)
    assert torch.equal(results[0], results[1])
    assert all(unit.state.value == "sharded" for unit in runtime_of(model).units)
    model(batch(world.rank)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("name", ["Muon", "LBFGS", "Adafactor"])
def test_optimizers_of_torch_that_need_whole_matrices(world, name):
    """S22: refused by name at stages 1 to 3, before anything is changed."""
    model = mz.shard(seeded(lambda: nn.Linear(8, 6, bias=False)), world, stage=3)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    model(torch.ones(2, 8)).sum().backward()
    before = mz.full_parameters(model)["weight"]
    closure = (lambda: torch.tensor(0.0),) if name == "LBFGS" else ()
    if world.size > 1:
        with pytest.raises(ShardError, match=rf"must be element-wise \(got {name}, which may need whole matrices"):
            optimizer.step(*closure)
        assert torch.equal(mz.full_parameters(model)["weight"], before)
