"""Measured memory against the stage's formula: the storages of all tensors that live in this rank's process."""

import gc

import pytest
import torch
from torch import nn

import mpizero as mz
from mpizero.plan import model_state_bytes
from mpizero.shard import runtime_of
from mpizero.testing.memory import live_bytes

pytestmark = pytest.mark.mpi

WIDTH, UNITS = 384, 8
PRECISIONS = {"fp32": mz.Precision(), "bf16": mz.Precision(param=torch.bfloat16)}


class Tower(nn.Module):
    """Eight units of 147,840 parameters, and as many in the root."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.fixture
def held():
    """A function that returns the bytes of all torch storages made in the test that are alive."""
    with live_bytes() as measure:
        yield measure


def step(model, optimizer, x):
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.sizes(1, 2, 3, 5)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_between_steps_is_the_formulas(world, held, stage, precision):
    """All live storages, within 2% of the stage's formula; and what memory_report says is what was measured.

    Room for gradients that peers can read is beside the formula: the root, and two units.
    """
    x = torch.ones(1, WIDTH, dtype=PRECISIONS[precision].param or torch.float32)
    model = mz.shard(
        Tower(), world, stage=stage, units={nn.Sequential}, precision=PRECISIONS[precision], node_shared=False
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, x)
    gc.collect()
    room = mz.memory_report(model).room
    assert room == 0 or room == pytest.approx(3 * (WIDTH + 1) * WIDTH * x.element_size(), rel=0.01)
    measured = held() - room
    numel = (UNITS + 1) * (WIDTH + 1) * WIDTH
    formula = model_state_bytes(numel, world.size, stage, working_bytes=x.element_size())
    print(
        f"stage {stage} {precision}: measured {measured}, formula {formula.total:.0f}, {measured / formula.total:.5f}"
    )
    assert measured == pytest.approx(formula.total, rel=0.02)
    report = mz.memory_report(model, optimizer)
    assert report.measured.total == pytest.approx(measured, rel=0.001)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(report.formula, kind) == pytest.approx(getattr(formula, kind))
        assert getattr(report.measured, kind) == pytest.approx(getattr(formula, kind), rel=0.02)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_peak_of_a_step_at_stage_3(world, held, precision):
    """At every gather, release and reduction: the shards, at most two gathered units, and one unit's gradients."""
    x = torch.ones(1, WIDTH, dtype=PRECISIONS[precision].param or torch.float32)
    model = mz.shard(
        Tower(),
        world,
        stage=3,
        units={nn.Sequential},
        precision=PRECISIONS[precision],
        node_shared=False,
        bucket_bytes=1,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, x)
    gc.collect()
    at_rest, samples = held(), []
    runtime_of(model).trace = lambda event, unit: samples.append((held(), event, unit))
    step(model, optimizer, x)
    unit = mz.memory_report(model).unit_buffers
    assert unit == pytest.approx((WIDTH + 1) * WIDTH * x.element_size(), rel=0.01)
    peak, event, name = max(samples)
    print(f"peak {precision}: {(peak - at_rest) / unit:.3f} units above rest, at {event} {name}")
    if world.size > 1:
        events = [event for _, event, _ in samples]
        assert events.count("gather") == 2 * UNITS + 1  # the root stays from forward to backward
        assert events.count("reduce") == UNITS + 1
        assert peak <= at_rest + 3.05 * unit  # the root, the unit at work and the one after it
        assert peak >= at_rest + 1.9 * unit  # the instrument sees gathered units at all


@pytest.mark.sizes(1, 2, 3, 5)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_node_holds_one_copy_of_the_parameters(world, held, stage, precision):
    """Each rank is charged its part of the window, and holds nothing else of the model beside its shards."""
    x = torch.ones(1, WIDTH, dtype=PRECISIONS[precision].param or torch.float32)
    model = mz.shard(Tower(), world, stage=stage, units={nn.Sequential}, precision=PRECISIONS[precision])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, x)
    gc.collect()
    report, numel = mz.memory_report(model, optimizer), (UNITS + 1) * (WIDTH + 1) * WIDTH
    assert report.node_shared == (world.size > 1)
    if report.node_shared:
        formula = model_state_bytes(numel, world.size, stage, working_bytes=x.element_size(), node_shared=True)
        window = numel * x.element_size()
        assert held() - report.room - window == pytest.approx(formula.total - formula.parameters, rel=0.02)
        assert report.measured.parameters == pytest.approx(window / world.size, rel=0.02)
        assert report.measured.total == pytest.approx(formula.total, rel=0.02)
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(report.formula, kind) == pytest.approx(getattr(formula, kind))


def test_no_sync_costs_one_full_gradient(world, held):
    """S16: the documented price, 4 bytes per parameter, until the next reduction; at stage 3 too."""
    model = mz.shard(Tower(), world, stage=3, units={nn.Sequential}, node_shared=False)
    x = torch.ones(1, WIDTH)
    model(x).sum().backward()
    gc.collect()
    before = held()
    with mz.no_sync(model):
        model(x).sum().backward()
    gc.collect()
    numel = (UNITS + 1) * (WIDTH + 1) * WIDTH
    assert held() - before == pytest.approx(4 * numel, rel=0.02)
    model(x).sum().backward()
    gc.collect()
    assert abs(held() - before) < 0.02 * numel
