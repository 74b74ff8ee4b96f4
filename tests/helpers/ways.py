"""All ways to train one small model: the axes of options, the model, and its training sharded and in one process."""

import functools
import inspect
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.shard.verb import shard as verb

KNOWN = frozenset(inspect.signature(verb).parameters)
"""The options that `mpizero.shard` takes."""
HYBRID = "HYBRID_SHARD"
STAGES = (0, 1, 2, 3, *([HYBRID] if "group" in KNOWN else []))
VOCABULARY, ROWS, LENGTH, STEPS, MICRO_BATCHES = 13, 2, 5, 3, 2
MAX_NORM = 0.5

PRECISIONS = {
    "fp32": None,
    "bf16": mz.Precision(param=torch.bfloat16),
    "bf16-fp32": mz.Precision(param=torch.bfloat16, reduce=torch.float32),
    "fp16-fp32": mz.Precision(param=torch.float16, reduce=torch.float32),
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "sgd-fused": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, fused=True),
}
SHARD_OPTIONS = {
    "default": {},
    "private": {"node_shared": False},
    "small buckets": {"bucket_bytes": 1 << 10},
    "no prefetch": {"prefetch": 0},
}
AXES = {
    "precision": tuple(PRECISIONS),
    "optimizer": tuple(OPTIMIZERS),
    "recompute": ("no", "plain", "reentrant", "inside"),
    "options": tuple(name for name, options in SHARD_OPTIONS.items() if options.keys() <= KNOWN),
    "compiled": ("no", "before", "after"),
    "accumulate": ("no", "reduced", "kept"),
    "uneven": (False, True),
    "tied": (False, True),
    "frozen": (False, True),
    "clip": (False, True),
}
"""The values of each option, the plain one first; the stage is an axis of its own, which every case goes along."""
FEATURES = ("recompute", "options", "compiled", "accumulate", "uneven", "tied", "frozen")


@dataclass(frozen=True, kw_only=True)
class Way:
    """Name one way to train, but for the stage."""

    precision: str = "fp32"
    optimizer: str = "sgd"
    recompute: str = "no"
    options: str = "default"
    compiled: str = "no"
    accumulate: str = "no"
    uneven: bool = False
    tied: bool = False
    frozen: bool = False
    clip: bool = False

    def __str__(self):
        """Name what is not as the plain way has it."""
        plain = Way()
        named = [
            name if value is True else f"{name}={value}" if name not in {"precision", "optimizer"} else value
            for name, value in vars(self).items()
            if name in {"precision", "optimizer"} or value != getattr(plain, name)
        ]
        return ",".join(named)

    @property
    def numbers(self):
        """The way in one process that has the same true results."""
        return replace(self, precision="fp32", options="default", compiled="no", recompute="no")


class Block(nn.Module):
    """Be two matrices around a third; `uneven` adds parameters of one element and of none."""

    def __init__(self, way):
        super().__init__()
        width, hidden = (7, 15) if way.uneven else (64, 128)
        self.norm = nn.LayerNorm(width)
        self.up, self.mid, self.down = nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, width)
        if way.uneven:
            self.gain, self.shift = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.full((1,), 0.1))
            self.nothing = nn.Parameter(torch.empty(0))
        if way.tied:
            self.gate = nn.Linear(width, hidden, bias=False)
            self.gate.weight = self.up.weight
        if way.frozen:
            self.mid.requires_grad_(requires_grad=False)
        self.inside, self.tied, self.uneven = way.recompute == "inside", way.tied, way.uneven

    def forward(self, x):
        y = self.norm(x)
        y = checkpoint(self.feed, y, use_reentrant=False) if self.inside else self.feed(y)
        return x + self.gain * y + self.shift + self.nothing.sum() if self.uneven else x + y

    def feed(self, y):
        hidden = torch.tanh(self.mid(functional.gelu(self.up(y))))
        return self.down(hidden * torch.sigmoid(self.gate(y)) if self.tied else hidden)


class Model(nn.Module):
    """Be three blocks, the second sharing a matrix with the first and the third frozen, as the way says."""

    def __init__(self, way):
        super().__init__()
        width = 7 if way.uneven else 64
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if way.tied:
            self.head.weight = self.embedding.weight
            self.blocks[1].down.weight = self.blocks[0].down.weight
        if way.frozen:
            self.blocks[2].requires_grad_(requires_grad=False)
        if way.uneven:
            self.unused = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("scale", torch.rand(width) + 0.5)
        self.recompute = way.recompute

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale.to(self.embedding.weight.dtype)
        for block in self.blocks:
            if self.recompute in {"plain", "reentrant"}:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def model_of(way, seed=0):
    """Return the model, its first values from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(way)


def tokens(number, rank):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def run_steps(model, way, batch_of, clip, keep):
    """Train; return every step's norm, none where the way does not clip."""
    optimizer = OPTIMIZERS[way.optimizer]([param for param in model.parameters() if param.requires_grad])
    micro_batches = 1 if way.accumulate == "no" else MICRO_BATCHES
    norms = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            kept = way.accumulate == "kept" and micro < micro_batches - 1
            with keep() if kept else nullcontext():
                (loss_of(model, batch_of(step * micro_batches + micro)) / micro_batches).backward()
        if way.clip:
            norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    return {"(norms)": torch.stack(norms)} if norms else {}


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="eager")


def train_sharded(way, stage, comm):
    """Train the sharded model; return its whole parameters, and the norms, by name. Collective."""
    model = model_of(way, seed=comm.rank)
    if way.compiled == "before":
        compile_blocks(model)
    options = {**SHARD_OPTIONS[way.options], **({"group": group_of(comm)} if stage == HYBRID else {})}
    model = mz.shard(model, comm, stage=stage, units={Block}, precision=PRECISIONS[way.precision], **options)
    if way.compiled == "after":
        compile_blocks(model)
    norms = run_steps(
        model,
        way,
        lambda number: tokens(number, comm.rank),
        lambda: mz.clip_grad_norm_(model, MAX_NORM),
        lambda: mz.no_sync(model),
    )
    return {**mz.full_parameters(model), **norms}


@functools.lru_cache(maxsize=1)
def train_at_stage_0(way, comm):
    """Return `train_sharded` at stage 0, trained once for all stages of a way. Collective the first time."""
    if way.compiled != "no":
        torch.compiler.reset()  # else a block's code would be compiled for more ways than torch's limit of 8
    return train_sharded(way, 0, comm)


@functools.lru_cache(maxsize=1)
def train_joined(way, ranks):
    """Train the plain model in one process on all ranks' batches; return what `train_sharded` does."""
    model = model_of(way)
    norms = run_steps(
        model,
        way,
        lambda number: torch.cat([tokens(number, rank) for rank in range(ranks)]),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
        nullcontext,
    )
    named = model.named_parameters(remove_duplicate=False)
    return {**{name: param.detach() for name, param in named}, **norms}


GROUPS = {}


def group_size(ranks):
    """Groups of two in an even number of ranks, one group of an odd one, and a rank to itself in two.

    Composed of pairs, the sum over groups has the canonical order: hybrid sharding too gives the bits of stage 0.
    """
    return ranks if ranks % 2 else max(1, min(2, ranks // 2))


def group_of(comm):
    """Return the group of this rank, made once. Collective the first time."""
    if comm not in GROUPS:
        size = group_size(comm.size)
        GROUPS[comm] = mz.Communicator(comm.mpi.Split(comm.rank // size, comm.rank))
    return GROUPS[comm]
