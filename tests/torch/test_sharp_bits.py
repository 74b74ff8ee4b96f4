"""Every example of docs/sharp-bits.md does what it says: a line whose comment names an error raises it."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mpizero as mz

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

PAGE = Path(__file__).parents[2] / "docs" / "sharp-bits.md"
EXAMPLES = re.findall(r"\*\*([^*]+?)\.?\*\*(?:(?!\n\*\*).)*?\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


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


def names(world):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(world.rank))
    model = mz.shard(Net(), units={Block})
    found = {"mz": mz, "torch": torch, "nn": nn, "copy": copy, "Net": Net, "Block": Block, "world": world}
    optimizer = torch.optim.AdamW(model.parameters())
    return {**found, "model": model, "optimizer": optimizer, "x": x, "loss": lambda: model(x).square().mean()}


def expected(code, node):
    """Return the error that the comment on one of a statement's lines names, if any; see `mpizero.errors`."""
    lines = code.splitlines()[node.lineno - 1 : node.end_lineno]
    found = [match for line in lines if (match := re.search(r"# (\w+Error)$", line))]
    return getattr(mz, found[0].group(1)) if found else None


def test_all_examples_are_found():
    assert len(EXAMPLES) == PAGE.read_text().count("```python")


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[title[:40] for title, _ in EXAMPLES])
def test_an_example(world, code):
    if world.size not in {2, 3}:
        return
    scope = names(world)
    for node in ast.parse(code).body:
        statement = compile(ast.Module([node], []), str(PAGE), "exec")
        error = expected(code, node)
        if error is None:
            exec(statement, scope)  # noqa: S102  (the page's own examples)
        else:
            with pytest.raises(error):
                exec(statement, scope)  # noqa: S102  (as above)
