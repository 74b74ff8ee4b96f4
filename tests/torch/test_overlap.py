"""Gathers ahead of need and reductions under way, by loads and by messages, where nothing is shared on the node."""

from contextlib import nullcontext, suppress

import pytest
import torch
from helpers.chains import check_at_rest
from helpers.small import STAGES, FailingGradient, Unit, batch, close, joined, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

UNITS = 3


@pytest.fixture(scope="module", params=["loads", "messages"])
def comm(request, world):
    """A communicator whose ranks load each other's memory, and one that sends messages, by the progress thread."""
    if request.param == "loads":
        yield world
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIZERO_LOADS", "0")
        made = mz.Communicator(world.mpi)
        assert made.board is None
        assert made.private.board is None
    yield made
    made.close()


class Stop(BaseException):
    """Ends a forward as KeyboardInterrupt does: torch's forward hooks do not hear of it."""


class Net(nn.Module):
    """Three units between matrices of the root's own, in an order that may change, and that fails where it is told."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))
        self.order, self.fails, self.saves = range(UNITS), None, None

    def forward(self, x):
        x = self.first(x)
        for number in self.order:
            if self.fails in (ArithmeticError, Stop) and number == 1:
                raise self.fails
            unit = self.units[number]
            x = unit(x) if self.saves is None else checkpoint(unit, x, use_reentrant=self.saves)
            if self.fails == "backward" and number == 1:
                x = FailingGradient.apply(x)
        return self.last(x)


def both(comm, stage=3, make=Net, **options):
    options = {"node_shared": False, "bucket_bytes": 1, **options}
    return seeded(make), mz.shard(seeded(make), comm, stage=stage, units={Unit}, **options)


def step(model, x_of, number, body=None):
    """Take one step of SGD; `body(model, x)` replaces one forward and backward."""
    x = x_of(number)
    if body is None:
        model(x).square().mean().backward()
    else:
        body(model, x)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.zero_grad()


def steps_agree(comm, plain, model, bodies):
    """Take steps beside one process on the joined batch, with nothing left behind after each."""
    for number, body in enumerate(bodies):
        step(plain, lambda number: joined(comm, number), number, body)
        step(model, lambda number: batch(comm.rank, number), number, body)
        if body is not forward_after_backward:  # its calls count until the next backward
            check_at_rest(model)
        assert not runtime_of(model)._calls
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


def traced(model):
    events = []
    runtime_of(model).trace = lambda event, unit: events.append(f"{event} {unit.removeprefix('units.')}")
    return events


FORWARD = "gather Net, gather 0, release 0, gather 1, release 1, gather 2, release 2, hide Net"
BACKWARD = """show Net, gather 2, release 2, reduce 2, gather 1, release 1, reduce 1, gather 0, release 0, reduce 0"""
AHEAD = """gather Net, gather 0, show 0, gather 1, release 0, show 1, gather 2, release 1, show 2, release 2, hide Net,
    gather 2"""
BACK = """show Net, show 2, gather 1, release 2, reduce 2, show 1, gather 0, release 1, reduce 1, show 0, release 0,
    reduce 0"""


def words(text):
    return [part.strip() for part in text.split(",")]


def test_the_order_of_events(comm):
    """The first step waits for each gather; the second begins each one unit ahead, the first of backward in forward."""
    if comm.size == 1:
        return
    _, model = both(comm)
    events = traced(model)
    for number, expected in enumerate((f"{FORWARD}, {BACKWARD}", f"{AHEAD}, {BACK}", f"{AHEAD}, {BACK}")):
        events.clear()
        step(model, lambda number: batch(comm.rank, number), number)
        assert [event for event in events if event not in {"release Net", "reduce Net"}] == words(expected)
        assert events[-1] == "reduce Net"
        assert events.count("reduce Net") == 1
        assert events.index("release Net") > len(words(expected)) // 2


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("again", [True, False, None])
def test_how_much_lives_and_is_under_way(comm, prefetch, again):
    """Beside the root, as many units are gathered as are used and begun ahead; two reductions at most go on."""
    plain, model = both(comm, prefetch=prefetch, reshard_after_forward=again)
    runtime, gathered, reducing = runtime_of(model), [], []

    def look(event, unit):
        begun = event == "gather" and unit != "Net"  # not yet there
        gathered.append(begun + sum(any(flat.live for flat in unit.flats) for unit in runtime.units[1:]))
        reducing.append(len(runtime.reductions._jobs))
        assert gathered[-1] <= (UNITS if again is False or comm.size == 1 else 1 + prefetch), (event, unit)

    runtime.trace = look
    steps_agree(comm, plain, model, [None] * 3)
    if comm.size > 1:
        assert max(gathered) == min(UNITS, UNITS if again is False else 1 + prefetch)
        assert max(reducing) <= 2


def reorder(order):
    def body(model, x):
        model.order = order
        model(x).square().mean().backward()

    return body


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_another_order_than_foreseen(comm, stage, prefetch):
    """Units in another order, left out by all ranks, and used twice: what was begun in vain is let go."""
    plain, model = both(comm, stage, prefetch=prefetch)
    orders = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 2), (1,), (0, 1, 2, 0), (2, 1, 0)]
    steps_agree(comm, plain, model, [reorder(order) for order in orders])


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    model(x).square().mean().backward()


def evaluate_with_grad(model, x):
    model.eval()
    model(x)
    model.train()
    model(x).square().mean().backward()


def two_forwards(model, x):
    (model(x).square().mean() + model(2 * x).square().mean()).backward()


def evaluation_in_between(model, x):
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x)
    loss.backward()


def failing(where):
    def body(model, x):
        model.fails = where
        with suppress(ArithmeticError, Stop):
            model(x).sum().backward()
        model.fails = None
        model(x)  # after Stop, which no hook hears of, the model is at rest from the next call on
        model.zero_grad()
        model(x).square().mean().backward()

    return body


def fails_in_the_loss(model, x):
    with suppress(ArithmeticError):
        model(x).sum()
        raise ArithmeticError
    model(x).square().mean().backward()


def forward_after_backward(model, x):
    model(x).square().mean().backward()
    model(x)


BODIES = {
    "evaluation": evaluate,
    "evaluation with grad": evaluate_with_grad,
    "two forwards": two_forwards,
    "evaluation in between": evaluation_in_between,
    "forward raises": failing(ArithmeticError),
    "forward is stopped": failing(Stop),
    "backward raises": failing("backward"),
    "loss raises": fails_in_the_loss,
    "forward after backward": forward_after_backward,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shared", [False, None])
def test_whatever_happens_training_goes_on(comm, stage, shared):
    """Each event in the first step, when no order is known, and in a later one, then a step as usual."""
    for prefetch, name in enumerate(BODIES):
        plain, model = both(comm, stage, prefetch=prefetch % 3, node_shared=shared)
        steps_agree(comm, plain, model, [BODIES[name], None, BODIES[name], None])


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_right_after_a_forward_that_was_stopped(comm, stage):
    """No rank waits for a reader that is none any more."""
    for shared in (False, None):
        plain, model = both(comm, stage, node_shared=shared)
        for m, x in ((plain, joined(comm)), (model, batch(comm.rank))):
            m(x).square().mean().backward()
            m.fails = Stop
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            with pytest.raises(Stop):
                m(x)
            m.fails = None
            optimizer.step()
            m.zero_grad()
        steps_agree(comm, plain, model, [None])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gathers_once_more(comm, reentrant):
    """S11: at most one gather in forward and one in backward per unit and step, from the first step on."""

    class Whole(Net):
        def forward(self, x):
            if self.saves != "whole":
                return super().forward(x)
            inner = super().forward
            self.saves = None
            try:
                return checkpoint(inner, x, use_reentrant=reentrant)
            finally:
                self.saves = "whole"

    for span in ("unit", "whole"):
        plain, model = both(comm, make=Whole)
        for m in (plain, model):
            m.saves = reentrant if span == "unit" else None
        events = traced(model)

        def body(m, x, model=model, events=events, span=span):
            events.clear()
            x.requires_grad_()
            y = checkpoint(m, x, use_reentrant=reentrant) if span == "whole" else m(x)
            forward = list(events)
            y.square().mean().backward()
            if m is not model or comm.size == 1:
                return
            backward = events[len(forward) :]
            for unit in ("0", "1", "2", "Net"):
                assert (forward + backward).count(f"gather {unit}") <= 2
                assert backward.count(f"gather {unit}") <= 1, (unit, forward, backward)

        steps_agree(comm, plain, model, [body] * 3)


@pytest.mark.parametrize("stage", STAGES)
def test_two_losses_through_a_recomputed_unit_that_is_half_frozen(comm, stage):
    """S11, S14: the second call brings its gradients after all of the first have come."""
    plain, model = both(comm, stage)
    for m in (plain, model):
        m.saves = True
        for unit in m.units:
            unit.linear.requires_grad_(requires_grad=False)
    steps_agree(comm, plain, model, [two_forwards] * 3)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_written_and_trained_again(comm, stage):
    """S14: a value that was written while frozen, or just before freezing, is seen; gradients count once."""

    def change(frozen, factor):
        def body(model, x):
            for name, param in model.named_parameters():
                if name.startswith("units.1.") and name.endswith("weight"):
                    with torch.no_grad():
                        param.mul_(factor)
                    param.requires_grad_(requires_grad=not frozen)
            model(x).square().mean().backward()

        return body

    for shared in (False, None):
        plain, model = both(comm, stage, node_shared=shared)
        steps_agree(comm, plain, model, [change(on, 0.5 + on) for on in (True, False, True, False)] + [None])


@pytest.mark.parametrize("stage", STAGES)
def test_two_models_in_turn(comm, stage):
    """One forward between the other's forward and backward, with orders of their own."""
    pairs = [both(comm, stage, bucket_bytes=1 << 20), both(comm, stage, prefetch=3)]
    for number in range(3):
        for index, x in enumerate((joined(comm, number), batch(comm.rank, number))):
            one, two = (pair[index] for pair in pairs)
            loss = one(x).square().mean()
            two(x).square().mean().backward()
            loss.backward()
            for m in (one, two):
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                m.zero_grad()
    for plain, model in pairs:
        check_at_rest(model)
        for name, value in mz.full_parameters(model).items():
            close(value, plain.get_parameter(name))


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_ahead_and_in_no_sync(comm, stage):
    """S16: what is kept back does not disturb what is begun ahead."""

    def body(model, x):
        for micro in range(4):
            kept = hasattr(model, "_mpizero_runtime") and micro in (0, 2)
            with mz.no_sync(model) if kept else nullcontext():
                model(x * (micro + 1)).square().mean().backward()

    plain, model = both(comm, stage)
    steps_agree(comm, plain, model, [body] * 2)
