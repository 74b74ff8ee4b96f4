"""The instruments that the tests of sharding use: they say what is so, and see it when it is not."""

import copy
import gc
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.comm import run_loopback  # noqa: E402
from mpizero.errors import ShardError  # noqa: E402
from mpizero.plan import sent_per_step  # noqa: E402
from mpizero.testing.counts import counted, theory_of  # noqa: E402
from mpizero.testing.covering import covering, one_at_a_time, whole_product  # noqa: E402
from mpizero.testing.memory import live_bytes, over_formula  # noqa: E402
from mpizero.testing.order import recorded  # noqa: E402
from mpizero.testing.parity import differing  # noqa: E402

AXES = {"a": (1, 2, 3), "b": "xyz", "c": (False, True), "d": (None, 0), "e": ("p", "q", "r", "s")}
WIDTH = 40
RECORD = 20
"""Bytes of an agreement that carries nothing else."""


def tuples_of(cases, strength):
    return {tuple((name, case[name]) for name in names) for case in cases for names in combinations(AXES, strength)}


@pytest.mark.parametrize("strength", [2, 3])
def test_a_covering_has_every_tuple_in_fewer_cases(strength):
    cases, whole = covering(AXES, strength), whole_product(AXES)
    assert tuples_of(cases, strength) == tuples_of(whole, strength)
    assert len(whole) == math.prod(map(len, AXES.values()))
    assert len(cases) < len(whole) * (0.2 if strength == 2 else 0.5)
    assert cases[0] == {name: values[0] for name, values in AXES.items()}


def test_a_covering_of_few_axes_is_the_product():
    two = {name: AXES[name] for name in "ab"}
    assert covering(two) == whole_product(two)
    assert len(whole_product(two)) == 9


def test_one_at_a_time_changes_one_value():
    plain, *others = one_at_a_time(AXES)
    assert len(others) == sum(len(values) - 1 for values in AXES.values())
    assert all(sum(case[name] != plain[name] for name in AXES) == 1 for case in others)


def test_all_processes_have_the_same_covering():
    """Ranks must collect the same tests: no order may hang on Python's salted hash."""
    code = f"from mpizero.testing.covering import covering; print(covering({AXES!r}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert said == {f"{covering(AXES)}\n"}


class Tower(nn.Module):
    """Equal units, the second with a frozen bias, and a root of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.layers[1][0].bias.requires_grad_(requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


TOWER = Tower()
BF16 = mz.Precision(param=torch.bfloat16)


def trained(comm, stage, steps, precision=None, optimizer=torch.optim.SGD):
    """Return the model and a function that makes one step."""
    model = mz.shard(
        copy.deepcopy(TOWER), comm, stage=stage, units={nn.Sequential}, precision=precision, bucket_bytes=1
    )
    stepper = optimizer([param for param in model.parameters() if param.requires_grad], lr=0.1)
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16 if precision else torch.float32)

    def step():
        model(x).float().sum().backward()
        stepper.step()
        stepper.zero_grad()

    for _ in range(steps):
        step()
    return model, stepper, step


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counts_are_those_of_the_theory(stage, precision):
    def body(comm):
        model, _, step = trained(comm, stage, 1, precision)
        with counted(model) as counts:
            step()
        theory = theory_of(model)
        moved = counts.moved
        assert (counts.gathers, counts.reductions) == (theory.gathers, theory.reductions)
        params = len(list(model.parameters()))  # frozen ones may be unfrozen
        theory = theory.with_agreements([RECORD, RECORD, params] + [RECORD] * (stage > 0))
        assert (moved.messages_sent, moved.bytes_sent) == (theory.messages(comm.rank), theory.nbytes(comm.rank))
        return theory, moved

    for theory, moved in run_loopback(3, body):
        assert moved.bytes_sent == pytest.approx(theory.formula, rel=0.1)  # padding to 64 elements, small agreements


def test_the_theory_is_the_formula_of_plan():
    """Without frozen parameters, and with them left out at the stages that do not gather them."""
    numel = sum(param.numel() for param in TOWER.parameters() if param.requires_grad)
    for stage in (0, 1, 2):
        for theory in run_loopback(2, lambda comm, stage=stage: theory_of(trained(comm, stage, 0)[0])):
            assert theory.formula == pytest.approx(sent_per_step(numel, 2, stage))
    (theory, _) = run_loopback(2, lambda comm: theory_of(trained(comm, 3, 0)[0]))
    root = sum(param.numel() for param in TOWER.last.parameters())  # gathered once: it stays until its backward
    frozen = sum(param.numel() for param in TOWER.parameters()) - numel
    assert theory.formula == pytest.approx(sent_per_step(numel, 2, 3) + (2 * frozen - root) * 4 / 2)


def test_the_theory_of_accumulation():
    """What no_sync keeps back is not reduced, and makes the reduction that takes it along fp32."""

    def body(comm):
        model, _, _ = trained(comm, 2, 1, BF16)
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
        with counted(model) as counts:
            for kept in (True, False, False):
                with mz.no_sync(model) if kept else nullcontext():
                    model(x).float().sum().backward()
        return counts, theory_of(model, backwards=3, kept=1)

    for counts, theory in run_loopback(2, body):
        assert counts.reductions == theory.reductions == Counter(dict.fromkeys(counts.reductions, 2))
        widths = sorted(one.itemsize for one in theory.collectives if one.operation == "reduce_scatter")
        assert widths == [2] * 4 + [4] * 4


def test_a_count_sees_one_gather_more():
    def body(comm):
        model, _, step = trained(comm, 3, 1)
        with counted(model) as counts:
            step()
            with torch.no_grad():
                model.layers[2](torch.ones(2, WIDTH))
        return counts.gathers - theory_of(model).gathers

    assert run_loopback(2, body) == [Counter({"layers.2": 1})] * 2


def test_one_rank_sends_nothing():
    def body(comm):
        model, _, step = trained(comm, 3, 1)
        with counted(model) as counts:
            step()
        return counts, theory_of(model)

    ((counts, theory),) = run_loopback(1, body)
    assert counts.gathers == theory.gathers == Counter()
    assert counts.moved.bytes_sent == theory.nbytes(0) == theory.formula == 0


def test_the_record_is_in_the_order_of_events_and_blocks_nest():
    def body(comm):
        model, _, step = trained(comm, 3, 1)
        with recorded(model) as outer, torch.no_grad():
            with recorded(model) as inner:
                model(torch.ones(2, WIDTH))
            model.layers[2](torch.ones(2, WIDTH))
        step()
        return outer, inner

    for outer, inner in run_loopback(2, body):
        gathers = [line for line in inner.lines() if line.startswith("gather")]
        assert gathers == ["gather Tower", *(f"gather layers.{number}" for number in range(3))]
        assert inner.counts("release") == Counter({"Tower": 1, **{f"layers.{n}": 1 for n in range(3)}})
        assert inner.lines().index("release layers.1") > inner.lines().index("gather layers.1")
        assert outer.events == [*inner.events, ("gather", "layers.2"), ("release", "layers.2")]
        assert outer.lines({"reduce"}) == []


def test_recording_needs_a_sharded_model():
    with pytest.raises(ShardError, match="was called on"), recorded(Tower()):
        pass


def test_live_bytes_are_those_of_storages_each_once():
    old = torch.ones(1000)
    with live_bytes() as live:
        whole = torch.ones(100)
        views = [whole[:50], whole[50:].view(5, 10)]
        assert live() == 400
        kept = nn.Parameter(torch.ones(3, dtype=torch.float64))
        assert live() == 424
        del whole, kept
        gc.collect()
        assert live() == 400
        views.clear()
        gc.collect()
        assert live() == 0
    assert old.numel() == 1000


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_memory_over_the_formula(stage, precision):
    def body(comm):
        model, optimizer, _ = trained(comm, stage, 1, precision, torch.optim.Adam)
        honest = over_formula(model, optimizer)
        with mz.no_sync(model):
            model(torch.ones(2, WIDTH)).float().sum().backward()
        return honest, over_formula(model, optimizer)

    for honest, keeping in run_loopback(2, body):
        for kind in ("gradients", "optimizer", "total"):
            assert honest[kind] == pytest.approx(1, abs=0.1)  # padding, of units of 1640 parameters
        assert keeping["gradients"] > 1.9  # a full gradient that no_sync keeps is beside the formula
        assert keeping["optimizer"] == honest["optimizer"]


def test_differing_sees_bits_shapes_and_missing_names():
    zero = torch.zeros(2)
    tensors = {"same": zero, "sign": zero, "shape": zero, "only": zero, "nothing": torch.ones(0, 2)}
    others = {"same": zero.clone(), "sign": -zero, "shape": zero.view(1, 2), "nothing": torch.ones(0, 2)}
    assert differing(tensors, others) == ["sign", "shape", "only"]
    assert differing(others, {**tensors, "new": zero}) == ["sign", "shape", "only", "new"]
