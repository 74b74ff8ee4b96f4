"""Ways through a sharded model other than the plain step: odd outputs, recomputation, exceptions, several graphs.

Each is compared with the same model in one process on the joined batch, at every stage, on thread ranks.
"""

import copy
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.comm import run_loopback
from mpizero.errors import ArgumentError, ShardError
from mpizero.shard import runtime_of

RANKS = 3
each_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
pytestmark = pytest.mark.filterwarnings("ignore:stage 3 with one unit")


class Unit(nn.Module):
    """A norm (whose backward reads its weight itself, not a view) and a matrix."""

    def __init__(self, width=6):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Chain(nn.Module):
    """Units in a row between two matrices of the root's own; subclasses say how they are called."""

    def __init__(self, unit=Unit, count=2):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.units = nn.ModuleList(unit() for _ in range(count))

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            x = self.through(unit, x)
        return self.last(x)

    def through(self, unit, x):
        return unit(x)


def batch(rank, step=0):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def joined(ranks=RANKS, step=0):
    return torch.cat([batch(rank, step) for rank in range(ranks)])


def whole_gradients(comm, model):
    """Return the reduced gradients as whole tensors; None where a parameter has none."""
    runtime = runtime_of(model)
    found = {}
    for unit in runtime.units:
        for flat in unit.trainable:
            whole = torch.zeros(flat.layout.length)
            for index, shard in enumerate(flat.shards):
                if shard.grad is not None:
                    flat.piece_of(whole[flat.own], index).copy_(shard.grad)
            if flat.lifetime.cut:
                whole = mz.all_gather(whole[flat.own].clone(), comm)
            for slot, member, shard in zip(flat.layout.slots, flat.members, flat.shards, strict=True):
                value = None if shard.grad is None else whole[slot.offset : slot.stop].view(slot.shape).clone()
                found.update(dict.fromkeys(member.names, value))
    return found


def check_gradients(comm, model, plain):
    for name, value in whole_gradients(comm, model).items():
        expected = plain.get_parameter(name).grad
        assert (value is None) == (expected is None), name
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: name + text)
    check_at_rest(model)


def check_at_rest(model):
    """Nothing of a step is left behind."""
    runtime = runtime_of(model)
    for unit in runtime.units:
        assert unit.state.value == "sharded"
        assert unit.calls == unit.entered == unit.open == 0
        for flat in unit.flats:
            assert flat.incoming is None
            assert flat.live is not flat.lifetime.release_parameters


def steps_agree(make, stage, run=lambda model, x: model(x).square().mean().backward(), ranks=RANKS, units=(Unit,)):
    """Compare the gradients of two steps with one process on the joined batch."""
    original = make()

    def body(comm):
        plain = copy.deepcopy(original)
        model = mz.shard(copy.deepcopy(plain), comm, stage=stage, units=set(units))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for step in range(2):
            run(plain, joined(ranks, step))
            run(model, batch(comm.rank, step))
            check_gradients(comm, model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model

    return run_loopback(ranks, body)


# What a unit returns


@dataclass
class Result:
    value: torch.Tensor
    extra: dict


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


OUTPUTS = {
    "tuple": (lambda y: (y, 3), lambda out: out[0]),
    "list": (lambda y: [y, None], lambda out: out[0]),
    "dict": (lambda y: {"y": [y]}, lambda out: out["y"][0]),
    "dataclass": (lambda y: Result(value=y, extra={}), lambda out: out.value),
    "nested": (lambda y: Result(value=y.detach(), extra={"y": (y,)}), lambda out: out.extra["y"][0]),
    "namespace": (lambda y: SimpleNamespace(y=y), lambda out: out.y),
    "slots": (Slotted, lambda out: out.value),
    "function": (lambda y: lambda: y, lambda out: out()),
    "views": (lambda y: y.chunk(2, dim=-1), lambda out: torch.cat(out, -1)),
}


@each_stage
@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_unit_may_return_anything_that_holds_tensors(stage, kind):
    pack, unpack = OUTPUTS[kind]

    class Packing(Unit):
        def forward(self, x):
            return pack(super().forward(x))

    class Unpacking(Chain):
        def through(self, unit, x):
            return unpack(unit(x))

    steps_agree(lambda: Unpacking(Packing), stage, units=[Packing])


@each_stage
@pytest.mark.parametrize("where", ["attribute", "argument"])
def test_results_that_leave_a_unit_by_a_side_door(stage, where):
    """An auxiliary loss kept on the module, or appended to an argument; made after the output, so met before it."""

    class Aux(Unit):
        def forward(self, x, losses=None):
            y = super().forward(x)
            aux = self.norm(x).square().mean()
            if where == "attribute":
                self.aux = aux
            else:
                losses.append(aux)
            return y

    class WithAux(Chain):
        def forward(self, x):
            self.losses = []
            return super().forward(x)

        def through(self, unit, x):
            return unit(x, self.losses) if where == "argument" else unit(x)

    def run(model, x):
        y = model(x)
        losses = model.losses if where == "argument" else [unit.aux for unit in model.units]
        (y.square().mean() + sum(losses)).backward()

    steps_agree(lambda: WithAux(Aux), stage, run, units=[Aux])


@each_stage
def test_a_container_given_to_a_unit_is_the_callers_own_in_bf16(stage):
    class Appending(Unit):
        def forward(self, x, seen):
            seen.append(x.dtype)
            return super().forward(x)

    class Passing(Chain):
        def through(self, unit, x):
            return unit(x, self.seen)

    original = Passing(Appending)

    def body(comm):
        model = copy.deepcopy(original)
        mz.shard(model, comm, stage=stage, units={Appending}, precision=mz.Precision(param=torch.bfloat16))
        model.seen = []
        model(batch(comm.rank)).sum().backward()
        assert model.seen == [torch.bfloat16] * 2

    run_loopback(2, body)


# Ways through the graph


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


# Exceptions


class FailingGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise ArithmeticError("in backward")


class Fragile(Chain):
    fails_in = ""

    def through(self, unit, x):
        if unit is self.units[1] and self.fails_in == "forward":
            raise ArithmeticError("in forward")
        x = unit(x)
        return FailingGradient.apply(x) if unit is self.units[0] and self.fails_in == "backward" else x


@each_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("then", ["forward", "unsharded", "accumulate", "retained"])
def test_a_model_works_after_an_exception(stage, where, then):
    def run(model, x):
        retained = model(x).square().mean()
        if then == "accumulate":
            model(3 * x).square().mean().backward()
        model.fails_in = where
        with suppress(ArithmeticError):
            model(x).sum().backward()
        model.fails_in = ""
        for param in model.parameters():
            param.grad = None
        if then == "unsharded" and hasattr(model, "_mpizero_runtime"):
            with mz.unsharded(model):
                pass
        if then == "accumulate":
            model(x).square().mean().backward()
        if then == "retained":
            retained.backward()
        else:
            model(x).square().mean().backward()

    steps_agree(Fragile, stage, run)


@each_stage
def test_zero_grad_forgets_what_no_sync_kept(stage):
    def run(model, x):
        if hasattr(model, "_mpizero_runtime"):
            with mz.no_sync(model):
                model(5 * x).square().mean().backward()
            model.zero_grad()
        model(x).square().mean().backward()

    steps_agree(Chain, stage, run)


@each_stage
@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_on_the_parameters_themselves(stage, first):
    """A sum over elements of `parameters()` has the right gradient on every shard, whenever autograd delivers it."""

    def run(model, x):
        def penalty():
            return 0.1 * sum(param.square().sum() for param in model.parameters())

        before = penalty() if first else 0  # autograd comes to what was computed first last, after the reductions
        loss = model(x).square().mean()
        (loss + (before if first else penalty())).backward()

    steps_agree(Chain, stage, run)


@each_stage
def test_gradients_set_by_the_user_are_added_to(stage):
    def run(model, x):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        model(x).square().mean().backward()

    steps_agree(Chain, stage, run)


@each_stage
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_keeps_working(stage, to_none):
    def run(model, x):
        model(2 * x).square().mean().backward()
        model.zero_grad(set_to_none=to_none)
        model(x).square().mean().backward()

    steps_agree(Chain, stage, run)


# Ranks that do not do the same


def test_ranks_that_use_different_units_at_stage_3():
    """S8: gathers of equal size meet in silence; the next agreement, before any step, names the units."""

    class Choosing(Chain):
        def forward(self, x):
            return self.last(self.units[self.choice](self.first(x)))

    original = Choosing()

    def body(comm):
        model = mz.shard(copy.deepcopy(original), comm, stage=3, units={Unit})
        model.choice = comm.rank
        with pytest.raises(ShardError, match=r"same units in the same order.*rank 0: 'units.0'; rank 1: 'units.1'"):
            model(batch(comm.rank)).sum().backward()
        model.choice = 0
        for param in model.parameters():
            param.grad = None
        model(batch(comm.rank)).sum().backward()

    run_loopback(2, body)


def test_one_rank_inside_no_sync():
    def body(comm):
        model = mz.shard(copy.deepcopy(original), comm, stage=3, units={Unit})
        said = "rank 0: backward outside no_sync; rank 1: backward inside no_sync"
        with mz.no_sync(model) if comm.rank else nullcontext(), pytest.raises(ShardError, match=said):
            model(batch(comm.rank)).sum().backward()

    original = Chain()
    run_loopback(2, body)


def test_a_parameter_in_a_tuple_is_refused():
    model = Unit()
    model.both = (model.linear.weight,)
    with pytest.raises(ArgumentError, match="attribute 'both' of Unit must be a list"):
        run_loopback(1, lambda comm: mz.shard(model, comm))
