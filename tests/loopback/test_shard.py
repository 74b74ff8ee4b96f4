"""The instruments for `shard` on thread ranks: parity, exact counts of messages and bytes, the literal order of events.

Measured memory, the fourth, needs a process per rank: tests/torch/test_memory.py.
"""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mpizero as mz
from mpizero.collectives import build, even_offsets
from mpizero.comm import run_loopback
from mpizero.plan import sent_per_step
from mpizero.shard import runtime_of

STAGES = (0, 1, 2, 3)
PRECISIONS = {"fp32": mz.Precision(), "bf16": mz.Precision(param=torch.bfloat16)}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=3e-3, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=3e-3, fused=True),
}
VOCABULARY, WIDTH, ROWS, LENGTH, STEPS = 13, 7, 4, 5, 3

pytestmark = pytest.mark.filterwarnings("ignore:stage 3 with one unit")


class Block(nn.Module):
    """Odd shapes, parameters of shape (), (1,) and (0,), and a frozen matrix beside the trained ones."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)
        self.frozen = nn.Linear(15, 15).requires_grad_(requires_grad=False)
        self.gain, self.shift = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.full((1,), 0.1))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        hidden = torch.tanh(self.frozen(torch.tanh(self.up(x))))
        return x + self.gain * self.down(hidden) + self.shift + self.nothing.sum()


class Model(nn.Module):
    """A head tied to the embedding, a cut bias of 321 elements, one parameter that no forward uses, a buffer."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.wide, self.narrow = nn.Linear(WIDTH, 321), nn.Linear(321, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale.to(self.embedding.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.narrow(torch.tanh(self.wide(x))))


def seeded(make, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


MODEL = seeded(Model)


def tokens(step, rank):
    return torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def grouped(model):
    """S15: no decay where a parameter has fewer than two dimensions, which shards keep."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def train(model, optimizer, parts_of, clip, backward_inside=nullcontext):
    """Train with two micro-batches a step; every other step keeps the first one back."""
    norms = []
    for step in range(STEPS):
        for micro in range(2):
            with backward_inside() if step % 2 and micro == 0 else nullcontext():
                (loss_of(model, parts_of(2 * step + micro)) / 2).backward()
        norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def train_sharded(comm, stage, precision, optimizer):
    model = mz.shard(copy.deepcopy(MODEL), comm, stage=stage, units={Block}, precision=PRECISIONS[precision])
    stepper = OPTIMIZERS[optimizer](grouped(model))
    norms = train(
        model,
        stepper,
        lambda number: tokens(number, comm.rank),
        lambda: mz.clip_grad_norm_(model, 0.5),
        lambda: mz.no_sync(model),
    )
    return {**mz.full_parameters(model), "norms": norms}


def train_joined(ranks, optimizer):
    model = copy.deepcopy(MODEL)
    stepper = OPTIMIZERS[optimizer](grouped(model))
    norms = train(
        model,
        stepper,
        lambda number: torch.cat([tokens(number, rank) for rank in range(ranks)]),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )
    named = model.named_parameters(remove_duplicate=False)
    return {**{name: param.detach() for name, param in named}, "norms": norms}


@functools.cache
def trained(ranks, stage, precision, optimizer):
    return run_loopback(ranks, lambda comm: train_sharded(comm, stage, precision, optimizer))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


PARITY = [
    *((ranks, "fp32", optimizer) for ranks in (1, 2, 3, 4) for optimizer in OPTIMIZERS),
    *((ranks, "bf16", optimizer) for ranks in (2, 3) for optimizer in OPTIMIZERS),
    (4, "bf16", "adamw-fused"),
    (5, "fp32", "adamw-fused"),
    (8, "bf16", "adamw-fused"),
]


@pytest.mark.parametrize(("ranks", "precision", "optimizer"), PARITY)
def test_all_stages_have_the_same_bits(ranks, precision, optimizer):
    """S6, S12, S13, S14, S15, S16: every parameter, and the norm of every step, on every rank."""
    reference = trained(ranks, 0, precision, optimizer)[0]
    for stage in STAGES:
        for rank, result in enumerate(trained(ranks, stage, precision, optimizer)):
            different = [name for name, value in result.items() if bits(value) != bits(reference[name])]
            assert not different, (stage, rank)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_as_one_process_on_the_joined_batch(ranks, optimizer):
    result, plain = trained(ranks, 3, "fp32", optimizer)[0], train_joined(ranks, optimizer)
    assert result.keys() == plain.keys()
    limit = 1e-5 if optimizer == "sgd" else 1e-3
    for name, value in plain.items():
        error = torch.linalg.vector_norm(result[name] - value) / max(torch.linalg.vector_norm(value), 1e-30)
        assert error <= limit, name
        frozen = ".frozen." in name or name == "unused"
        assert frozen or not value.numel() or name == "norms" or not torch.equal(value, MODEL.get_parameter(name))
    assert torch.equal(result["head.weight"], result["embedding.weight"])
    assert torch.equal(result["unused"], MODEL.unused)
    assert torch.equal(result["blocks.1.frozen.weight"], MODEL.blocks[1].frozen.weight)


# Counts


class Tower(nn.Module):
    """Equal units large enough that agreements are no part of the bytes, and a root of parameters of its own."""

    def __init__(self, units=4, width=200):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(units))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


TOWER = seeded(Tower)
RECORD = 20
"""Bytes of an agreement that carries nothing else."""


def count_step(comm, stage, precision):
    """Return the messages and bytes of a second step, and (trained parameters, lengths of the units' buffers)."""
    model = mz.shard(
        copy.deepcopy(TOWER),
        comm,
        stage=stage,
        units={nn.Sequential},
        precision=PRECISIONS[precision],
        bucket_bytes=1,
        reshard_after_forward=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 200, dtype=PRECISIONS[precision].param or torch.float32)
    for _ in range(2):
        before = mz.stats(model).copy()
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = mz.stats(model).since(before)
    lengths = [flat.layout.length for unit in runtime_of(model).units for flat in unit.flats]
    return moved, lengths, len(list(model.parameters()))


def expected_step(ranks, rank, stage, *, lengths, width, params):
    """Return (messages, bytes) of one step by the builders' own counts."""
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    calls = [("all_gather", length, width) for length in lengths] * gathers
    calls += [("all_reduce" if stage == 0 else "reduce_scatter", length, width) for length in lengths]
    records = [RECORD, RECORD, params] + ([RECORD] if stage else [])  # backward, its end, forward
    calls += [("all_gather", record * ranks, 1) for record in records]
    messages = size = 0
    for operation, length, itemsize in calls:
        schedule = build(operation, "direct", ranks, rank)
        messages += schedule.sent_messages()
        size += schedule.sent_bytes(even_offsets(length, schedule.chunks), itemsize, 4)
    return messages, size


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_and_bytes_of_a_step(ranks, stage, precision):
    """As many as the builders count, and within 1% of theory."""
    width = 2 if precision == "bf16" else 4
    for rank, (moved, lengths, params) in enumerate(
        run_loopback(ranks, lambda comm: count_step(comm, stage, precision))
    ):
        messages, size = expected_step(ranks, rank, stage, lengths=lengths, width=width, params=params)
        assert (moved.messages_sent, moved.bytes_sent) == (messages, size)
        numel = sum(param.numel() for param in TOWER.parameters())
        assert moved.bytes_sent == pytest.approx(sent_per_step(numel, ranks, stage, working_bytes=width), rel=0.01)


def test_one_rank_sends_nothing():
    (moved, _, _) = run_loopback(1, lambda comm: count_step(comm, 3, "fp32"))[0]
    assert (moved.messages_sent, moved.bytes_sent) == (0, 0)


def test_micro_batches_inside_no_sync_send_no_gradients():
    """S16: one reduction for both; at stage 2 the inner backward sends nothing at all."""

    def body(comm):
        model = mz.shard(copy.deepcopy(TOWER), comm, stage=2, units={nn.Sequential})
        before = mz.stats(model).copy()
        with mz.no_sync(model):
            model(torch.ones(2, 200)).sum().backward()
        return mz.stats(model).since(before).bytes_sent

    assert run_loopback(2, body) == [RECORD, RECORD]


# Events


def events_of(comm, stage):
    """Return the events of a first and of a second step."""
    model = mz.shard(copy.deepcopy(TOWER), comm, stage=stage, units={nn.Sequential})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for _ in range(2):
        steps.append([])
        runtime_of(model).trace = lambda event, unit: steps[-1].append(f"{event} {unit[-8:]}")
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps


def lines(text):
    return [" ".join(part.split()) for part in text.replace("\n", ",").split(",") if part.strip()]


UNITS = [f"layers.{number}" for number in range(4)]
FIRST = lines("""
    gather Tower,
    gather layers.0, release layers.0, gather layers.1, release layers.1,
    gather layers.2, release layers.2, gather layers.3, release layers.3,
    hide Tower, show Tower,
    gather layers.3, release layers.3, reduce layers.3, gather layers.2, release layers.2,
    reduce layers.2, gather layers.1, release layers.1, reduce layers.1, gather layers.0, release layers.0,
    reduce layers.0, reduce Tower
""")
SECOND = lines("""
    gather Tower, gather layers.0,
    show layers.0, gather layers.1, release layers.0, show layers.1, gather layers.2, release layers.1,
    show layers.2, gather layers.3, release layers.2, show layers.3, release layers.3,
    hide Tower, gather layers.3, show Tower,
    show layers.3, gather layers.2, release layers.3, reduce layers.3, show layers.2, gather layers.1, release layers.2,
    reduce layers.2, show layers.1, gather layers.0, release layers.1, reduce layers.1, show layers.0, release layers.0,
    reduce layers.0, reduce Tower
""")
"""At stage 3, once the order is known: each unit is gathered while the one before it computes."""
FORWARD = lines("show Tower") + [f"{e} {u}" for u in UNITS for e in ("show", "hide")] + lines("hide Tower, show Tower")
REFRESH = lines("gather Tower") + [f"gather {unit}" for unit in UNITS]


BACKWARD = [f"{event} {unit}" for unit in reversed(UNITS) for event in ("show", "hide", "reduce")]


def without_root(events):
    """Leave out when the root is let go: after the gradients of its last layer, or at the end."""
    return [event for event in events if event not in {"hide Tower", "reduce Tower"}]


def test_the_order_of_events_at_stage_3():
    for steps in run_loopback(3, lambda comm: events_of(comm, 3)):
        for events, expected in zip(steps, (FIRST, SECOND), strict=True):
            assert [event for event in events if event != "release Tower"] == expected
            root = events.index("release Tower")  # after the gradients of its last layer, or at the end
            assert root > events.index("show Tower")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_order_of_events_at_the_other_stages(stage):
    """Full parameters are filled once, by the forward after a step; every unit is reduced as soon as it can be."""
    for first, second in run_loopback(2, lambda comm: events_of(comm, stage)):
        assert without_root(first) == without_root(FORWARD + BACKWARD)
        assert without_root(second) == without_root(([] if stage == 0 else REFRESH) + FORWARD + BACKWARD)
        assert first.count("reduce Tower") == second.count("reduce Tower") == 1
        assert first[-1] == "reduce Tower"
