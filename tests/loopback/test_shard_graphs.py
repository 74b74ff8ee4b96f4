"""Ways through the graph other than the plain step: recomputation, several graphs, frozen units, reuse.

Each is compared with the same model in one process on the joined batch, at every stage, on thread ranks.
"""

import copy

import pytest
import torch
from helpers.chains import (
    RANKS,
    Chain,
    Unit,
    batch,
    check_gradients,
    joined,
    steps_agree,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.comm import run_loopback
from mpizero.shard import runtime_of

each_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
pytestmark = pytest.mark.filterwarnings("ignore:stage 3 with one unit")


@each_stage
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("span", ["unit", "all", "inside"])
def test_activation_checkpointing(stage, reentrant, span):
    """S11: right; at most one gather in forward and one in backward per unit and step."""

    class Inside(Unit):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    class Saving(Chain):
        def forward(self, x):
            if span != "all":
                return super().forward(x)
            return self.last(
                checkpoint(lambda x: self.units[1](self.units[0](x)), self.first(x), use_reentrant=reentrant)
            )

        def through(self, unit, x):
            return checkpoint(unit, x, use_reentrant=reentrant) if span == "unit" else unit(x)

    kind = Inside if span == "inside" else Unit
    original = Saving(kind)

    def body(comm):
        plain = copy.deepcopy(original)
        model = mz.shard(copy.deepcopy(plain), comm, stage=stage, units={kind})
        events = []
        runtime_of(model).trace = lambda event, unit: events.append((event, unit))
        for m, x in ((plain, joined()), (model, batch(comm.rank))):
            m(x).square().mean().backward()
        check_gradients(comm, model, plain)
        if stage == 3:
            for number in range(2):
                assert events.count(("gather", f"units.{number}")) == 2

    run_loopback(RANKS, body)


@each_stage
def test_a_unit_used_twice_in_a_forward(stage):
    class Twice(Chain):
        def through(self, unit, x):
            return unit(x) + unit(unit(x))

    steps_agree(Twice, stage)


@each_stage
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_used_twice_under_checkpointing(stage, reentrant, frozen):
    """Reentrant, each use is a backward of its own: gradients come after their unit seemed complete."""

    class Twice(Chain):
        def __init__(self):
            super().__init__()
            for unit in self.units:
                unit.norm.requires_grad_(not frozen)

        def through(self, unit, x):
            return checkpoint(unit, checkpoint(unit, x, use_reentrant=reentrant), use_reentrant=reentrant)

    steps_agree(Twice, stage)


@each_stage
def test_a_unit_used_before_and_after_another(stage):
    """Its gradients are not complete when the other one is gathered: it is reduced once, after its first call."""
    events = []

    class Around(Chain):
        def forward(self, x):
            one, two = self.units
            return self.last(one(two(one(self.first(x)))))

    def run(model, x):
        if hasattr(model, "_mpizero_runtime"):
            runtime_of(model).trace = lambda event, unit: events.append((event, unit))
        model(x).square().mean().backward()

    steps_agree(Around, stage, run)
    assert events.count(("reduce", "units.0")) == events.count(("reduce", "units.1")) == 2 * RANKS


@each_stage
def test_a_unit_that_calls_itself(stage):
    class Recursive(Unit):
        def forward(self, x, depth=2):
            return super().forward(self(x, depth - 1) if depth else x)

    steps_agree(lambda: Chain(Recursive), stage, units=[Recursive])


@each_stage
def test_two_forwards_before_one_backward(stage):
    steps_agree(Chain, stage, lambda m, x: (m(x).square().mean() + m(2 * x).square().mean()).backward())


@each_stage
def test_two_forwards_before_two_backwards(stage):
    def run(model, x):
        losses = [model(scale * x).square().mean() for scale in (1, 2)]
        for loss in losses:
            loss.backward()

    steps_agree(Chain, stage, run)


@each_stage
def test_backward_twice_through_a_retained_graph(stage):
    def run(model, x):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    steps_agree(Chain, stage, run)


@each_stage
def test_gradients_with_respect_to_the_input_alone(stage):
    """Nothing is lost when a backward asks for no parameter's gradient."""

    def run(model, x):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).sum(), leaf)
        (model(x) * grad).square().mean().backward()

    steps_agree(Chain, stage, run)


@each_stage
def test_the_units_need_not_run_in_the_order_of_their_names(stage):
    class Backwards(Chain):
        def forward(self, x):
            x = self.last(x)
            for unit in reversed(self.units):
                x = unit(x)
            return self.first(x)

    steps_agree(lambda: Backwards(count=3), stage)


@each_stage
def test_nested_units(stage):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.mix = Unit(), Unit(), nn.Linear(6, 6)

        def forward(self, x):
            return self.two(self.mix(self.one(x)))

    steps_agree(lambda: Chain(Outer), stage, units=[Outer, Unit])


@each_stage
def test_frozen_parameters_are_there_for_as_long_as_backward_needs_them(stage):
    """A siamese unit: two calls, and frozen weights that are read after the unit's own gradients are complete."""

    class Adapter(Unit):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.norm.requires_grad_(requires_grad=False)
            self.linear.requires_grad_(requires_grad=False)

        def forward(self, x):
            return super().forward(x) * self.scale

    class Siamese(Chain):
        def through(self, unit, x):
            return unit(x) - unit(x.flip(1))

    steps_agree(lambda: Siamese(Adapter), stage, units=[Adapter])


@each_stage
@pytest.mark.parametrize("which", ["first", "last", "middle"])
def test_a_wholly_frozen_unit(stage, which):
    def make():
        model = Chain(count=3)
        {"first": model.first, "last": model.last, "middle": model.units[1]}[which].requires_grad_(requires_grad=False)
        return model

    steps_agree(make, stage)


@each_stage
def test_detached_uses_of_a_weight(stage):
    """A stop-gradient copy of the weight is read after the weight's own gradient has come."""

    class Detached(Unit):
        def forward(self, x):
            return torch.tanh(self.linear(nn.functional.linear(self.norm(x), self.linear.weight.detach())))

    steps_agree(lambda: Chain(Detached), stage, units=[Detached])


@each_stage
def test_hooks_of_the_users_see_full_parameters(stage):
    def make():
        model = Chain()
        for unit in model.units:
            unit.register_forward_pre_hook(lambda m, args: (args[0] + m.linear.weight.sum(),))
            unit.register_forward_hook(lambda m, _, out: out * m.linear.weight.mean())
        return model

    steps_agree(make, stage)


@each_stage
def test_sparse_gradients_of_an_embedding(stage):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.table, self.unit = nn.Embedding(9, 6, sparse=True), Unit()

        def forward(self, x):
            return self.unit(self.table((x[:, 0] * 100).long() % 9))

    original = Looking()

    def body(comm):
        plain = copy.deepcopy(original)
        model = mz.shard(copy.deepcopy(plain), comm, stage=stage, units={Unit})
        for m, x in ((plain, joined()), (model, batch(comm.rank))):
            m(x).square().mean().backward()
        plain.table.weight.grad = plain.table.weight.grad.to_dense()
        check_gradients(comm, model, plain)

    run_loopback(RANKS, body)


@each_stage
def test_recurrent_layers_and_lists_of_parameters(stage):
    """Modules that hold their parameters a second time, in lists of their own."""

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.rnn, self.weight = nn.LSTM(6, 6, batch_first=True), nn.Parameter(torch.randn(6, 6))
            self.all = [self.weight]

        def forward(self, x):
            return self.rnn(x[:, None])[0][:, 0] @ self.all[0]

    steps_agree(Lists, stage, units=[nn.LSTM])
