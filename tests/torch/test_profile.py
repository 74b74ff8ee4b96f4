"""Profiles of real steps: what is recorded, and that figures and trace hold together. No seconds are asserted."""

import json
import math

import pytest
import torch
from helpers.small import STAGES, Net, Unit, batch, seeded, train

import mpizero as mz
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

STEPS = 2


def profiled(world, stage):
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False)
    with mz.profile(model) as found:
        train(model, lambda step: batch(world.rank, step), STEPS)
    return model, found


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_step_is_told_by_time_and_unit(world, stage):
    model, found = profiled(world, stage)

    assert len(found.steps) == STEPS
    for step in found.steps:
        assert min(step.forward, step.backward, step.optimizer) > 0
        assert step.compute + step.exposed == pytest.approx(step.seconds)
        assert step.hidden == pytest.approx(max(step.communication - step.exposed, 0))
        assert max(step.exposed, step.communication, step.forward + step.backward + step.optimizer) <= step.seconds
        if world.size > 1:
            assert {unit for unit, traffic in step.units.items() if traffic.reductions} == {
                unit.name for unit in runtime_of(model).units
            }
            assert all(traffic.reduced_bytes for traffic in step.units.values())
    if world.size > 1 and stage == 3:
        assert all(traffic.gathers and traffic.gathered_bytes for traffic in found.steps[1].units.values())


def test_nothing_is_recorded_without_a_profile(world):
    model, found = profiled(world, 2)
    before = found.spans
    train(model, lambda step: batch(world.rank, step), 1)

    assert found.spans == before
    assert runtime_of(model).observer is None


def test_the_trace_of_all_ranks_is_one_file(world, tmp_path):
    model, found = profiled(world, 3)
    found.export(tmp_path / "trace.json")
    counts = mz.all_gather(torch.tensor([len(found.spans)]), world).tolist()

    assert found.summary().startswith(f"rank {world.rank} of {world.size}, medians of {STEPS} steps")
    if world.rank == 0:
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert [sum(event["pid"] == rank for event in spans) for rank in range(world.size)] == counts
        names = {event["name"] for event in spans}
        assert {"forward", "backward", "step"} <= {event["cat"] for event in spans}
        if world.size > 1:
            units = [unit.name for unit in runtime_of(model).units]
            assert {f"{kind} {unit}" for kind in ("gather", "reduce") for unit in units} <= names
            assert not math.isnan(found.steps[0].hidden_share)
