"""What units return, exceptions, and ranks that do not do the same.

Each is compared with the same model in one process on the joined batch, at every stage, on thread ranks.
"""

import copy
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.chains import (
    Chain,
    Unit,
    batch,
    steps_agree,
)
from helpers.small import FailingGradient

import mpizero as mz
from mpizero.comm import run_loopback
from mpizero.errors import ArgumentError, CollectiveTimeoutError, ShardError

each_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
pytestmark = pytest.mark.filterwarnings("ignore:stage 3 with one unit")


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


# Exceptions


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
    """S8: gathers of equal size do not meet in silence; the time-out names the parameters of the unit."""

    class Choosing(Chain):
        def forward(self, x):
            return self.last(self.units[self.choice](self.first(x)))

    original = Choosing()

    def body(comm):
        model = mz.shard(copy.deepcopy(original), comm, stage=3, units={Unit})
        model.choice = comm.rank
        with pytest.raises(CollectiveTimeoutError, match=rf"all_gather .* of parameters units.{comm.rank}.norm.weight"):
            model(batch(comm.rank))

    run_loopback(2, body, timeout=1)


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
