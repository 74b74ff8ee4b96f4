"""What `plan` says of a step's memory and messages, beside what a sharded model takes and does."""

import gc
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import mpizero as mz
from mpizero.plan import STAGES, Setup, Widths, step_of
from mpizero.shard import runtime_of
from mpizero.shard.flat import FlatParams
from mpizero.shard.gradients import Gradients
from mpizero.shard.reductions import Reductions
from mpizero.shard.shapes import shape_of
from mpizero.testing.memory import live_bytes

pytestmark = [pytest.mark.mpi, pytest.mark.timeout_s(240)]

WIDTH, UNITS = 192, 3
BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": (mz.Precision(), Widths()),
    "bf16": (mz.Precision(param=BF16), Widths(param=2)),
    "bf16, gradients fp32": (mz.Precision(param=BF16, reduce=torch.float32), Widths(param=2, reduce=4)),
    "bf16, norms fp32": (mz.Precision(param=BF16, keep_fp32=(nn.LayerNorm,)), Widths(param=2)),
    "fp16": (mz.Precision(param=torch.float16), Widths(param=2)),
}
USUAL = ("fp32", "bf16", "bf16, norms fp32")
OPTIONS = (
    {"bucket_bytes": 1},
    {"node_shared": False, "bucket_bytes": 1},
    {"node_shared": False},
    {"node_shared": False, "bucket_bytes": 1, "micro_batches": 2},
    {"node_shared": False, "bucket_bytes": 200_000, "prefetch": 2},
    {"node_shared": False, "bucket_bytes": 1, "reshard_after_forward": True, "prefetch": 0},
    {"group": 2, "node_shared": False, "bucket_bytes": 1},
    {"group": 2, "micro_batches": 2},
)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """Have torch import what its first step needs before a measurement, which looks at all objects made since."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.AdamW([param]).step()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    """Units between matrices of the root's own, so that its gradients are the first and the last to arrive."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(UNITS))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Watch:
    """Measures after everything that takes memory, and keeps the most of each phase."""

    def __init__(self, held):
        self.held, self.phase, self.most = held, "", {}

    def look(self):
        self.most[self.phase] = max(self.most.get(self.phase, 0), self.held())

    def enter(self, phase):
        self.phase = phase
        self.look()

    @contextmanager
    def patched(self, monkeypatch):
        with monkeypatch.context() as patch:
            for cls, name in ((FlatParams, "_begin"), (Gradients, "keep"), (Reductions, "_launch")):
                patch.setattr(cls, name, self.after(getattr(cls, name)))
            yield

    def after(self, inner):
        def call(*args, **kwargs):
            found = inner(*args, **kwargs)
            self.look()
            return found

        return call


def step(model, optimizer, micro_batches, watch):
    for number in range(micro_batches):
        watch.enter("forward")
        loss = model(torch.ones(1, WIDTH)).float().square().mean()
        watch.look()
        watch.enter("backward")
        with nullcontext() if number == micro_batches - 1 else mz.no_sync(model):
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def compared(world, monkeypatch, held, case):
    """Yield (what, measured, planned) of a case: between steps by kind, and at the peaks of forward and backward."""
    stage, precision, options = case
    chosen, widths = PRECISIONS[precision]
    micro_batches = options.get("micro_batches", 1)
    options = {key: value for key, value in options.items() if key != "group" or (world.size % 2 == 0 < stage)}
    setup = Setup(ranks=world.size, per_node=world.node.size, stage=stage, widths=widths, on_gpu=False, **options)
    planned = step_of(shape_of(Tower(), units={Layer}, precision=chosen), setup)
    passed = {key: value for key, value in options.items() if key != "micro_batches"}
    if "group" in options:
        passed["group"] = world.split(world.rank // 2)
    before = held()
    model = mz.shard(Tower(), world, stage=stage, units={Layer}, precision=chosen, **passed)
    optimizer, watch = torch.optim.AdamW(model.parameters()), Watch(held)
    step(model, optimizer, micro_batches, watch)  # learns the order of gathers
    gc.collect()
    watch.most.clear()
    with watch.patched(monkeypatch):
        step(model, optimizer, micro_batches, watch)
    gc.collect()
    watch.enter("between steps")
    report, rest = mz.memory_report(model, optimizer), planned.phases["between steps"]
    for kind in ("parameters", "gradients", "optimizer"):
        yield kind, getattr(report.measured, kind), getattr(rest.state, kind)
    yield "room", report.room, rest.room
    # A window counts whole on each rank that maps it, and is charged in equal parts.
    windows = [
        (flat.full.untyped_storage().nbytes(), flat.comm.size) for flat in runtime_of(model).flats if flat.window
    ]
    others = sum(nbytes - nbytes / ranks for nbytes, ranks in windows)
    for phase, most in watch.most.items():
        yield phase, most - before - others, planned.phases[phase].total


def check(world, monkeypatch, cases):
    with live_bytes() as held:
        for case in cases:
            rows = list(compared(world, monkeypatch, held, case))
            gc.collect()
            mine = np.array([measured for _, measured, _ in rows], np.float64)
            most = mz.all_gather(mine, world).reshape(world.size, -1).max(axis=0).tolist()  # of shards, one has padding
            off = {what: planned / found - 1 for (what, _, planned), found in zip(rows, most, strict=True) if found}
            print("deviation", *case, *(f"{what} {value:+.4f}" for what, value in off.items()))
            for (what, _, planned), found in zip(rows, most, strict=True):
                assert planned == pytest.approx(found, rel=0.02), (what, case)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("stage", STAGES)
def test_planned_bytes_are_the_measured_ones(world, monkeypatch, stage):
    """Within 2% of all storages that are alive on the busiest rank, with options in turn."""
    others = OPTIONS[1:]
    options = [OPTIONS[0], *(others[(2 * stage + place) % len(others)] for place in (0, 1))]
    precisions = [USUAL[(stage + place) % len(USUAL)] for place in range(len(USUAL))]
    check(world, monkeypatch, [(stage, *pair) for pair in zip(precisions, options, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_planned_bytes_with_all_options(world, monkeypatch, stage, precision):
    check(world, monkeypatch, [(stage, precision, options) for options in OPTIONS])
