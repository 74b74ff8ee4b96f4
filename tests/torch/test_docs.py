"""Every block of Python on the pages of the documentation does what it says, in two ranks.

Each runs by itself, among the names that `names` gives; the blocks of a page of PROGRAMS make one program, which has no
names but its own. A line whose comment is the name of an error raises it, on all ranks.
"""

import ast
import copy
import glob
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.checkpoints import shared_folder
from helpers.pages import python_blocks
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy

import mpizero as mz

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

PROGRAMS = {"docs/tour.md"}
BLOCKS = python_blocks()
SINGLE = [block for block in BLOCKS if block.page not in PROGRAMS]
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


@pytest.mark.parametrize("block", SINGLE, ids=map(str, SINGLE))
def test_a_block(world, elsewhere, block):
    if world.size in {2, 3}:
        run(block, names(world, block.text))


@pytest.mark.parametrize("page", sorted(PROGRAMS))
def test_a_program(world, elsewhere, page):
    if world.size in {2, 3}:
        parts, scope = [block for block in BLOCKS if block.page == page], {"__name__": "__main__"}
        assert parts
        for block in parts:
            run(block, scope)
