"""Every block of Python on the pages of the documentation does what it says, in two ranks.

Each runs by itself, among the names that `names` gives; a line whose comment is the name of an error raises it, on all
ranks. Where a block's mark says so, torch's CPU tensors are those of a GPU that the host plays. The programs whose
commands pages leave to this file run in the ranks of this job: one of them is made of the blocks of docs/tour.md.
"""

import ast
import copy
import glob
import json
import os
import re
import runpy
import shlex
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.checkpoints import shared_folder
from helpers.pages import ROOT, python_blocks, shell_blocks, typed_lines
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

import mpizero as mz
from mpizero.comm import communicator
from mpizero.comm.gpus import Gpu
from mpizero.testing.host_runtime import HostRuntime, stand_in

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

TOUR = [block for block in python_blocks() if block.page == "docs/tour.md"]
SINGLE = [block for block in python_blocks() if block not in TOUR]
COMMANDS = shell_blocks(file="tests/torch/test_docs.py")
PLAYED = "the host plays the GPU"
TRAIN = "import torch\n\nx = torch.ones(4)\n"
"""What the program of docs/torch-distributed.md has, beside the block that is there."""
UNCUT = re.compile(r"= mz\.shard\((model|mz\.convert_sync_batchnorm\(model\))")
"""A block with this cuts `model` itself."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.blocks(x))


class GPT(Net):
    def forward(self, x, y):
        return cross_entropy(super().forward(x), y)


def names(world, code):
    """What a block may use without saying where it comes from."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(world.rank))
    model = Net() if UNCUT.search(code) else mz.shard(Net(), units={Block})
    found = {"mz": mz, "torch": torch, "nn": nn, "copy": copy, "glob": glob, "json": json, "os": os, "Path": Path}
    found |= {"Net": Net, "Block": Block, "world": world, "safe_open": safe_open, "cross_entropy": cross_entropy}
    found |= {"model": model, "x": x, "loss": lambda: model(x).square().mean()}
    optimizer = torch.optim.AdamW(model.parameters())
    return found | {"optimizer": optimizer, **habits(x, model, optimizer)}


def habits(x, model, optimizer):
    """The names that scripts have for what is theirs: data, schedules, a step."""
    labels = torch.randint(16, (len(x),), generator=torch.Generator().manual_seed(0))

    def train_one_step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "batch": x,
        "batches": [x, x],
        "loader": [(x, labels), (x, labels)],
        "examples": [torch.ones(8, 16), torch.ones(8, 16)],
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "train_one_step": train_one_step,
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "evaluate": lambda model: model(x),
    }


def expected(code, node):
    """Return the error that the comment on one of a statement's lines names, if any; see `mpizero.errors`."""
    lines = code.splitlines()[node.lineno - 1 : node.end_lineno]
    found = [match for line in lines if (match := re.search(r"# (\w+Error)$", line))]
    return getattr(mz, found[0].group(1)) if found else None


def run(block, scope):
    """Run a block, statement after statement, so that those which have to raise do."""
    for node in ast.parse(block.text).body:
        statement = compile(ast.Module([node], []), str(block), "exec")
        error = expected(block.text, node)
        if error is None:
            exec(statement, scope)  # noqa: S102  (the page's own code)
        else:
            with pytest.raises(error):
                exec(statement, scope)  # noqa: S102  (as above)


@pytest.fixture
def elsewhere(world, monkeypatch):
    """A current folder that the ranks share, and a module with the reader's own model."""
    with shared_folder(world) as folder:
        monkeypatch.chdir(folder)
        module = ModuleType("my_model")
        module.GPT, module.Block = GPT, Block
        module.batches = lambda rank, size: [(torch.ones(4, 16) * rank, torch.arange(4) % size)]
        monkeypatch.setitem(sys.modules, "my_model", module)
        yield folder


class Played(TorchFunctionMode):
    """Take the host for the GPU, in what makes tensors and in what moves them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        words = {name: _host(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_host, args[1:]))
        return func(*args, **words)


def _host(value):
    return "cpu" if str(value).startswith("cuda") else value


@contextmanager
def played(world):
    """Give this rank a GPU, and the job a communicator that knows it, inside the `with` block."""
    chosen, comm = [], mz.Communicator(world.mpi)
    device = SimpleNamespace(use=lambda: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: device), ndarray=type("ndarray", (), {}))
    with pytest.MonkeyPatch.context() as patch, stand_in(HostRuntime(world.rank)), Played():
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr("mpizero.comm.gpus.find_gpus", lambda: ((Gpu(name="played", bus="0"),) * 2, ""))
        patch.setattr("mpizero.comm.side.LEAST_WINDOW", 1 << 22)
        patch.setattr("mpizero.comm.side.MOST_WINDOW", 1 << 22)
        patch.setattr(torch.cuda, "set_device", chosen.append)
        patch.setattr(communicator, "_world", cache(lambda: comm))
        yield
        assert set(chosen) <= {world.node.rank}
    comm.close()


@pytest.mark.parametrize("block", SINGLE, ids=map(str, SINGLE))
def test_a_block(world, elsewhere, block):
    if world.size not in {2, 3}:
        return
    if PLAYED in block.reason:
        with played(world):
            run(block, names(world, block.text))
    else:
        run(block, names(world, block.text))


@pytest.mark.parametrize("block", COMMANDS, ids=map(str, COMMANDS))
def test_the_programs_of_commands(world, elsewhere, monkeypatch, block):
    """Each line is `mpirun -n N python PROGRAM ARGUMENT ...` or mzrun's; the ranks are there."""
    if world.rank == 0:
        first = next(each for each in SINGLE if each.page == "docs/torch-distributed.md")
        Path("train.py").write_text(TRAIN + first.text)
        Path("tour.py").write_text("\n".join(each.text for each in TOUR))
        Path("text").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        Path("examples").symlink_to(ROOT / "examples")
    world.mpi.Barrier()
    for line in typed_lines(block):
        _, program = re.split(r"^(?:mpirun -n \d+ python|bin/mzrun -n \d+) ", line)
        monkeypatch.setattr(sys, "argv", shlex.split(program))
        runpy.run_path(sys.argv[0], run_name="__main__")
