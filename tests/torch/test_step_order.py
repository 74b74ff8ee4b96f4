"""The order of collectives that a simulated step assumes is the order that a sharded model has."""

import pytest
import torch
from helpers.small import Unit, batch, seeded
from torch import nn

import mpizero as mz
from mpizero.collectives.links import Cluster, Link, place
from mpizero.plan import ModelShape, UnitShape
from mpizero.plan.instructions import POST
from mpizero.plan.program import program_of
from mpizero.plan.training import Speeds, Training
from mpizero.testing.order import recorded

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

UNITS = 4


class Net(nn.Module):
    """Units between two layers of the root's own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.units = nn.Sequential(*(Unit() for _ in range(UNITS)))

    def forward(self, x):
        return self.last(self.units(self.first(x)))


def shape_of(model):
    """The model as `plan` describes it."""
    shapes = {f"units.{i}": [p.shape for p in unit.parameters()] for i, unit in enumerate(model.units)}
    shapes[""] = [p.shape for layer in (model.first, model.last) for p in layer.parameters()]
    units = [
        UnitShape(name=name, parameters=tuple((str(i), tuple(s)) for i, s in enumerate(found)), flops=1.0)
        for name, found in shapes.items()
    ]
    return ModelShape(name="net", units=tuple(units))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "prefetch": 0},
        {"stage": 3, "prefetch": 3},
        {"stage": 3, "reshard_after_forward": False},
        {"stage": 3, "reshard_after_forward": True, "prefetch": 2},
    ],
    ids=str,
)
def test_the_program_has_the_order_of_the_runtime(world, options):
    if world.size == 1:
        return
    plain = seeded(Net)
    model = mz.shard(seeded(Net), world, units={Unit}, bucket_bytes=1, node_shared=False, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        with recorded(model) as record:
            model(batch(world.rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [line.replace(" Net", " root") for line in record.lines(("gather", "reduce"))]
    link = Link(alpha=1e-6, beta=1e-9)
    where = Cluster(size=world.size, nodes=place(world.size, 1), local=link, remote=link)
    training = Training(model=shape_of(plain), working_bytes=4, bucket_bytes=1, **options)
    program = program_of(training, where, Speeds(flops=1e9), group=world.size, choice="auto")
    begun = [program.jobs[item.job].label for item in program.instructions if item.kind == POST]
    assert [label for label in begun if label != "meet"] == [
        line for line in seen if options["stage"] or not line.startswith("gather")
    ]
