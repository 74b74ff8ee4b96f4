"""The models that benchmarks/training measures with, and what ranks say about where they run."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mpizero import __version__
from mpizero.comm.launch import cores

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_gpt import GPT, Block  # noqa: F401

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Hold the measures of a GPT and of what it is fed."""

    dim: int
    heads: int
    layers: int
    length: int
    """Tokens of a sequence."""


SHAPES = {
    "gpt": Shape(dim=512, heads=8, layers=8, length=128),  # 25.5M parameters
    "large": Shape(dim=1024, heads=8, layers=8, length=16),  # 101M: states dominate
    "middle": Shape(dim=512, heads=8, layers=4, length=32),
    "small": Shape(dim=256, heads=4, layers=4, length=32),
    "tiny": Shape(dim=64, heads=2, layers=2, length=16),
}


def gpt(name: str) -> GPT:
    """Return the GPT of a shape, the same on all ranks."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    return GPT(dim=shape.dim, heads=shape.heads, layers=shape.layers, length=shape.length)


def batches(name: str, size: int, rank: int, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tokens, targets), each (size, length), made before anything is timed."""
    data = torch.Generator().manual_seed(rank)
    drawn = [torch.randint(0, 256, (size, SHAPES[name].length), generator=data) for _ in range(count)]
    return [(tokens, tokens.roll(-1, 1)) for tokens in drawn]


def adamw(parameters) -> torch.optim.Optimizer:
    """Return the optimizer of every kind: torch's AdamW with its default flags."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def stepper(model, optimizer):
    """Return a training step as a function of tokens and targets."""

    def step(tokens, targets):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


class Chain(nn.Module):
    """Be many tiny units, so that what a unit costs in Python shows."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 8) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def versions() -> dict[str, str]:
    """Return the versions that a peer's figures depend on, without starting MPI."""
    found = {"mpizero": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if "deepspeed" in sys.modules:
        found["deepspeed"] = sys.modules["deepspeed"].__version__
    return found


def about() -> dict:
    """Return machine and versions. Starts MPI."""
    from mpizero.comm.describe import machine

    here = machine()
    where = {"cores": cores(), "processor": here["processor"], "system": platform.platform()}
    return {"machine": where, "versions": {**versions(), "mpi": here["mpi"]}}
