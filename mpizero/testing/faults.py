"""A training that one rank breaks off in the middle of a step, and that goes on from its checkpoints.

`mzrun -n 4 --restarts 1 -m mpizero.testing.faults FOLDER --fault kill --rank 2 --at 7` writes every step's losses into
FOLDER; `bin/faults` does it many times. With `exact=True` they are those of an undisturbed run, to the bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mpizero as mz
from mpizero.settings import settings

__all__ = ["FAULTS", "Fault", "Plan", "losses_of", "train"]

MICRO_BATCHES = 4
WIDTH = 24
LOSSES = "losses.txt"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Say which rank breaks off, where and how."""

    kind: str
    """A key of FAULTS."""
    rank: int
    step: int
    """From 1; only the job's first start has the fault."""

    def strike(self, rank: int, step: int) -> None:
        """Break off, if it is this rank's turn."""
        if (rank, step) == (self.rank, self.step) and not settings().restart:
            FAULTS[self.kind]()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what is trained."""

    folder: Path
    """Where checkpoints and losses go."""
    steps: int = 12
    every: int = 3
    """Steps from one checkpoint to the next."""
    pace: float = 0.0
    """Seconds that a step takes longer, for signals to come in the middle of a run."""
    fault: Fault | None = None
    may_stop: bool = True
    """Whether SIGUSR1 is looked for, which needs the main thread."""


def _raise() -> None:
    raise ArithmeticError("a fault, on purpose")


FAULTS = {
    "raise": _raise,
    "exit": lambda: sys.exit(0),
    "os-exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""What a rank can do to the others: an exception, an exit with code 0, one without Python's and MPI's clearing up, and
signals that end or stop it, of which it hears nothing."""


class Block(nn.Module):
    """Transform a vector, and drop parts of it: random numbers have to go on where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, WIDTH) to the same shape."""
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


def train(comm: Any, plan: Plan) -> int:
    """Train from the latest checkpoint, if there is one, and return the last step that was done. Collective.

    SIGUSR1 to any rank ends it earlier, with a checkpoint. Rank 0 appends a line per step to the folder's losses.
    """
    torch.manual_seed(0)
    model = mz.shard(nn.Sequential(*(Block() for _ in range(2))), comm, stage=3, units={Block}, exact=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    there = (plan.folder / "latest").exists()
    step = mz.load(plan.folder, model, optimizer)["step"] if there else 0
    stop = plan.may_stop and mz.stop_requested(comm)
    while step < plan.steps and not stop:
        step += 1
        losses = _one_step(model, optimizer, comm, step, plan)
        if comm.rank == 0:
            with (plan.folder / LOSSES).open("a") as file:
                file.write(f"{step} {comm.size} {losses}\n")
        stop = plan.may_stop and mz.stop_requested(comm)
        if stop or step % plan.every == 0:
            mz.save(plan.folder / f"step-{step}", model, optimizer, extra={"step": step}, keep_last=2)
    return step


def losses_of(folder: Path) -> dict[int, str]:
    """Return each step's losses, their bits in hexadecimal.

    Raises:
        ValueError: where a step that was done again has other losses than at first.
    """
    found: dict[int, str] = {}
    for line in (folder / LOSSES).read_text().splitlines():
        step, _, bits = line.split()
        if found.setdefault(int(step), bits) != bits:
            text = f"step {step} had the losses {found[int(step)]} and then {bits}"
            raise ValueError(text)
    return found


def _one_step(model: Any, optimizer: Any, comm: Any, step: int, plan: Plan) -> str:
    rows = torch.randn(2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))
    mine = []
    for micro in mz.micro_batches(model, rows, MICRO_BATCHES, step=step):
        loss = (model(micro) - micro.roll(1, 1)).square().mean()
        if plan.fault is not None:
            plan.fault.strike(comm.rank, step)
        loss.backward()
        mine.append(float(loss.detach()))
    mz.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(plan.pace)
    # Rank r has micro-batches r, r + p, ...: a column of the table of all.
    table = mz.all_gather(np.array(mine, np.float32), comm).reshape(comm.size, -1)
    return str(np.ascontiguousarray(table.T).tobytes().hex())


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="for checkpoints and losses; goes on from what is there")
    add("--steps", type=int, default=Plan.steps)
    add("--every", type=int, default=Plan.every, help="steps from one checkpoint to the next")
    add("--pace", type=float, default=Plan.pace, help="seconds that a step takes longer")
    add("--fault", choices=sorted(FAULTS), help="what one rank does at the first start")
    add("--rank", type=int, default=0, help="which rank")
    add("--at", type=int, default=1, help="in which step")
    args = parser.parse_args()
    fault = Fault(kind=args.fault, rank=args.rank, step=args.at) if args.fault else None
    args.folder.mkdir(parents=True, exist_ok=True)
    train(mz.world(), Plan(folder=args.folder, steps=args.steps, every=args.every, pace=args.pace, fault=fault))


if __name__ == "__main__":
    main()
