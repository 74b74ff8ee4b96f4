"""Cases from the field that train, by their ids in the docstrings, on real ranks."""

import warnings

import pytest
import torch
from helpers.small import (
    BF16,
    STAGES,
    Net,
    Skipping,
    Unit,
    batch,
    close,
    joined,
    same_everywhere,
    seeded,
    train,
    trains_as_one,
)
from torch import nn

import mpizero as mz
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.mark.sizes(1, 2, 3, 5, 8)
def test_clip_norm_is_global(world):
    """S1: Linear(7, 5), max_norm 0.1: the global norm, equal on all ranks, and the parameters after the step."""
    plain, expected = seeded(lambda: nn.Linear(7, 5)), []
    clip = nn.utils.clip_grad_norm_
    train(plain, lambda step: joined(world, step), clip=lambda: expected.append(clip(plain.parameters(), 0.1)))
    first = None
    for stage in STAGES:
        model, norms = mz.shard(seeded(lambda: nn.Linear(7, 5)), world, stage=stage), []
        train(model, lambda step: batch(world.rank, step), clip=lambda: norms.append(mz.clip_grad_norm_(model, 0.1)))  # noqa: B023
        for name, value in mz.full_parameters(model).items():
            close(value, plain.get_parameter(name))
        close(torch.stack(norms), torch.stack(expected))
        assert torch.stack(norms).min() > 0.1
        first = first or norms
        assert norms == first
        assert same_everywhere(world, torch.stack(norms))


@each_stage
def test_all_ranks_start_from_rank_0(world, stage):
    """S3: another seed on each rank before the model is built."""
    model = mz.shard(seeded(Net, seed=world.rank), world, stage=stage, units={Unit})
    expected = seeded(Net, seed=0)
    for name, value in mz.full_parameters(model).items():
        assert torch.equal(value, expected.get_parameter(name))
    assert torch.equal(model.scale, expected.scale)


@pytest.mark.sizes(1, 2, 3, 5, 8)
def test_odd_buffers_are_broadcast(world):
    """S3: a buffer whose elements share memory, one that is not contiguous, and an empty one."""
    model = nn.Linear(2, 2)
    rank = float(world.rank)
    model.register_buffer("expanded", torch.tensor([rank]).expand(4))
    model.register_buffer("turned", torch.full((2, 3), rank).t())
    model.register_buffer("empty", torch.empty(0))
    mz.shard(model, world)
    assert torch.equal(model.expanded, torch.zeros(4))
    assert torch.equal(model.turned, torch.zeros(3, 2))


@each_stage
def test_a_unit_whose_output_is_not_used(world, stage):
    """S10: used in step 1, not in step 2: no crash, at rest afterwards, gradients right."""

    class Branch(Net):
        used = True

        def forward(self, x):
            x = self.first(x)
            side = self.units[0](x)
            return self.last(self.units[1](x) + (side if self.used else 0))

    plain, model = seeded(Branch), mz.shard(seeded(Branch), world, stage=stage, units={Unit})
    for m, x_of in ((plain, lambda step: joined(world, step)), (model, lambda step: batch(world.rank, step))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step, m.used in enumerate([True, False, True]):
            m(x_of(step)).square().mean().backward()
            params = m.parameters() if m is plain else runtime_of(m).units[1].flats[0].shards
            if not m.used and m is model:
                assert all(param.grad is None for param in params)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))
    assert all(unit.state.value == "sharded" for unit in runtime_of(model).units)


@pytest.mark.sizes(1, 2, 3, 5, 8)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_used_on_some_ranks_only(world, stage):  # noqa: C901
    """S8: what a rank did not use counts as zero there; what no rank used has no gradient."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.chosen = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)), 0

        def forward(self, x):
            return torch.tanh(self.experts[self.chosen](x))

    class Routed(Net):
        def __init__(self):
            super().__init__()
            self.units = nn.ModuleList(Experts() for _ in range(3))

    model, plain = mz.shard(seeded(Routed), world, stage=stage, units={Experts}), seeded(Routed)
    for step in range(2):
        for rank in range(world.size):  # one rank's experts after another's, as one process
            for number, unit in enumerate(plain.units):
                unit.chosen = (rank + number) % 2
            (plain(batch(rank, step)).square().mean() / world.size).backward()
        for number, unit in enumerate(model.units):
            unit.chosen = (world.rank + number) % 2
        model(batch(world.rank, step)).square().mean().backward()
    names = [name for name, _ in plain.named_parameters()]
    for name, shard in zip(names, model.parameters(), strict=True):
        assert (shard.grad is None) == (plain.get_parameter(name).grad is None), name
    for m in (model, plain):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@pytest.mark.sizes(1, 2, 3, 5, 8)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_units_used_on_some_ranks_only(world, stage):
    """S8: at stages 0 to 2 a whole unit may be left out."""
    model, plain = mz.shard(seeded(Skipping), world, stage=stage, units={Unit}), seeded(Skipping)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for rank in range(world.size):
            plain.skip = rank % 3
            (plain(batch(rank, step)).square().mean() / world.size).backward()
        model.skip = world.rank % 3
        model(batch(world.rank, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@pytest.mark.sizes(1, 2, 3, 5, 8)
@each_stage
def test_awkward_shapes(world, stage):
    """S12: Linear(3, 32001), parameters of shape (), (1,) and (0,)."""

    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(3, 32001)
            self.scalar, self.one = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(1))
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.wide(x) * self.scalar + self.one + self.none.sum()

    trains_as_one(world, Awkward, stage, units=(), width=3)


@pytest.mark.sizes(1, 2, 3, 5, 8)
def test_more_ranks_than_elements(world):
    """S12: ranks without a single element still take part."""
    for stage in STAGES:
        trains_as_one(world, lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), stage, units=[nn.Linear], width=1)


@each_stage
def test_tied_weights_in_different_units(world, stage):
    """S13: one storage under the lowest unit that contains both, both names known, still tied after training."""

    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.units[1].linear.weight = self.units[0].linear.weight

    model, plain = trains_as_one(world, Tied, stage)
    full = mz.full_parameters(model)
    assert torch.equal(full["units.0.linear.weight"], full["units.1.linear.weight"])
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    owners = [u.name for u in runtime_of(model).units for f in u.flats for m in f.members if len(m.names) == 2]
    assert owners == ["Tied"]


@each_stage
def test_frozen_half_of_a_unit(world, stage):
    """S14: no gradient and no reduction for frozen parameters; kept exactly."""

    class Frozen(Net):
        def __init__(self):
            super().__init__()
            for unit in self.units:
                unit.linear.requires_grad_(requires_grad=False)

    model, _ = trains_as_one(world, Frozen, stage)
    start, full = seeded(Frozen), mz.full_parameters(model)
    for name, shard in model.named_parameters():
        assert shard.requires_grad == ("units" not in name or "linear" not in name)
        if not shard.requires_grad:
            assert shard.grad is None
            assert torch.equal(full[name], start.get_parameter(name))
    frozen = [flat for unit in runtime_of(model).units for flat in unit.flats if not flat.trainable]
    assert len(frozen) == 2
    assert all(flat.gradients is None for flat in frozen)


@each_stage
def test_two_parameter_groups(world, stage):
    """S15: no decay on biases and norms, told by the number of dimensions, which shards keep."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit})
    for m, x in ((plain, joined(world)), (model, batch(world.rank))):
        groups = [
            {"params": [p for p in m.parameters() if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        assert len(groups[0]["params"]) == 4
        optimizer = torch.optim.SGD(groups, lr=0.1)
        m(x).square().mean().backward()
        optimizer.step()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_twenty_steps_at_every_stage(world, precision):
    """S6: the same bits for every stage and bucket of 1 KiB, 1 MiB and 100 MiB; 1 B has every buffer go alone."""
    results = []
    sizes = (1 << 10, 1 << 20, 100 << 20, 1)
    for stage in STAGES:
        for bucket_bytes, node_shared in ((sizes[stage], None), (sizes[stage - 1], False)):
            options = {"bucket_bytes": bucket_bytes, "node_shared": node_shared}
            model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, precision=precision, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(20):
                model(batch(world.rank, step)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(((stage, bucket_bytes), mz.full_parameters(model)))
    for case, found in results[1:]:
        for name, value in found.items():
            assert torch.equal(value, results[0][1][name]), (case, name)


@pytest.mark.sizes(1, 2)
@each_stage
@pytest.mark.parametrize("kept", [False, True])
def test_tiny_gradients_of_many_micro_batches(world, stage, kept):
    """S5: 256 micro-batches in bf16, each gradient 2**-8 of the first, which a sum in bf16 would not see."""
    model = mz.shard(seeded(lambda: nn.Linear(3, 2, bias=False)), world, stage=stage, precision=BF16)
    for micro in range(257):
        x = torch.full((1, 3), 1.0 if micro == 0 else 2.0**-8)
        if kept and micro < 256:
            with mz.no_sync(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
    for param in model.parameters():
        assert param.grad.dtype == torch.float32
        assert torch.equal(param.grad, torch.full_like(param, 2.0))


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_no_sync_at_every_stage(world, precision):
    """S16: 4 micro-batches; for the same use of no_sync all stages have the same bits."""
    results = {}
    for stage in STAGES:
        for kept in (0, 3):
            model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, precision=precision)
            for micro in range(4):
                if micro < kept:
                    with mz.no_sync(model):
                        model(batch(world.rank, micro)).float().square().mean().backward()
                else:
                    model(batch(world.rank, micro)).float().square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            results[stage, kept] = mz.full_parameters(model)
    for stage in STAGES:
        for kept in (0, 3):
            for name, value in results[stage, kept].items():
                assert torch.equal(value, results[0, kept][name]), (stage, kept, name)
                close(value, results[0, 3 - kept][name], 1e-5 if precision is None else 1e-2)


@pytest.mark.sizes(1, 2, 3, 5, 8)
@each_stage
def test_no_sync_is_exact_on_integer_gradients(world, stage):
    """S16: with and without no_sync are equal where sums are exact."""
    gradients = []
    for kept in (0, 3):
        model = mz.shard(seeded(lambda: nn.Linear(70, 3)), world, stage=stage)
        for micro in range(4):
            x = (batch(world.rank, micro, 70) * 8).round() * world.size
            if micro < kept:
                with mz.no_sync(model):
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_only_the_root_is_a_unit(world):
    """S17: works, and warns that nothing is saved at the peak."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mz.shard(
            seeded(lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))), world, stage=3, node_shared=False
        )
    said = [str(warning.message) for warning in caught if "saves no memory at the peak" in str(warning.message)]
    assert len(said) == (world.size > 1 and world.rank == 0)
    train(model, lambda step: batch(world.rank, step))
