"""The ranks of `mpizero verify`: train one small model in every way asked for, and write down what became of it.

Run as `mpirun -n N python -m mpizero.testing.parity --out FILE ...`; rank 0 writes an npz file with these entries:

- `stage/OPTIMIZER/PRECISION/STAGE/NAME`: a parameter after training, fp32, or, under `(gradient norms)`, each step's;
- `differ/OPTIMIZER/PRECISION/STAGE`: the names whose bytes are not the same on every rank;
- `one/OPTIMIZER/NAME`: what plain torch makes of the ranks' joined batches in one process, fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import mpizero as mz
from mpizero.testing.models import Block, awkward_model, token_loss, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "NORMS",
    "OPTIMIZERS",
    "PRECISIONS",
    "Case",
    "differing",
    "differing_across_ranks",
    "main",
    "train",
    "train_in_one_process",
]

PRECISIONS = {"fp32": mz.Precision(), "bf16": mz.Precision(param=torch.bfloat16)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # The fused one gives other bits for a tensor that is cut in the wrong place.
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}
NORMS = "(gradient norms)"
MAX_NORM = 1.0
ROWS = 3
"""Sequences of a micro-batch on one rank."""
MICRO_BATCHES = 2
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Case:
    """Name one way to train the model."""

    optimizer: str
    precision: str
    stage: int
    steps: int

    @property
    def key(self) -> str:
        """Return the case's part of the names in the file of results."""
        return f"{self.optimizer}/{self.precision}/{self.stage}"


def train(case: Case, comm: Any) -> dict[str, Tensor]:
    """Train the sharded model and return its whole parameters, and the gradient norms, by name. Collective.

    Every rank builds the model from a seed of its own: `shard` has to give all of them rank 0's. Every other step keeps
    its first micro-batch back with `no_sync`.

    Args:
        case: stage, precision, optimizer and number of steps.
        comm: the ranks.
    """
    model = awkward_model(SEED + comm.rank)
    model = mz.shard(model, comm, stage=case.stage, units={Block}, precision=PRECISIONS[case.precision])
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    norms = []
    for step in range(case.steps):
        parts = tokens(SEED, step, comm.size * MICRO_BATCHES * ROWS).view(MICRO_BATCHES, comm.size, ROWS, -1)
        for index, part in enumerate(parts):
            last = index == MICRO_BATCHES - 1
            with nullcontext() if last or step % 2 else mz.no_sync(model):
                (token_loss(model, part[comm.rank]) / MICRO_BATCHES).backward()
        norms.append(mz.clip_grad_norm_(model, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return {**mz.full_parameters(model), NORMS: torch.stack(norms)}


def train_in_one_process(optimizer: str, ranks: int, steps: int) -> dict[str, Tensor]:
    """Train the plain model in fp32, without mpizero, on the batches that so many ranks would have together.

    Args:
        optimizer: a key of OPTIMIZERS.
        ranks: how many ranks' batches are joined into one.
        steps: number of steps.
    """
    model = awkward_model(SEED)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    norms = []
    for step in range(steps):
        token_loss(model, tokens(SEED, step, ranks * MICRO_BATCHES * ROWS)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        stepper.step()
        stepper.zero_grad()
    named = model.named_parameters(remove_duplicate=False)
    return {**{name: param.detach() for name, param in named}, NORMS: torch.stack(norms)}


def differing(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not the same to the bit, and those that only one of the two has."""
    return [name for name in (tensors | others) if _digest(tensors.get(name)) != _digest(others.get(name))]


def differing_across_ranks(tensors: dict[str, Tensor], comm: Any) -> list[str]:
    """Return the names of the tensors whose bits differ between ranks, the same on all ranks. Collective.

    Args:
        tensors: this rank's, under names that all ranks have.
        comm: the ranks; some 80 bytes per name and rank travel.
    """
    everyones = comm.mpi.allgather({name: _digest(tensor) for name, tensor in tensors.items()})
    names = dict.fromkeys(name for digests in everyones for name in digests)
    return [name for name in names if len({digests.get(name) for digests in everyones}) > 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Train every case, compare bytes across ranks, and write the file; the exit code is 0 once it is there."""
    options = _options(argv)
    comm = mz.world()
    found: dict[str, Any] = {}
    if comm.rank == 0:
        for optimizer in OPTIMIZERS:
            alone = train_in_one_process(optimizer, comm.size, options.steps)
            found.update(_entries(f"one/{optimizer}", alone))
    for case in _cases(options):
        trained = train(case, comm)
        found.update(_entries(f"stage/{case.key}", trained))
        found[f"differ/{case.key}"] = np.array(differing_across_ranks(trained, comm), dtype=np.str_)
    if comm.rank == 0:
        with options.out.open("wb") as file:
            np.savez(file, **found)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mpizero.testing.parity", description="Be the ranks of `mpizero verify`.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", type=_words, required=True)
    parser.add_argument("--precision", type=_words, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args(argv)


def _words(text: str) -> list[str]:
    return text.split(",")


def _cases(options: argparse.Namespace) -> list[Case]:
    ways = [("AdamW", precision) for precision in options.precision]
    ways += [("SGD", "fp32")] if "fp32" in options.precision else []
    return [
        Case(optimizer=optimizer, precision=precision, stage=int(stage), steps=options.steps)
        for optimizer, precision in ways
        for stage in options.stages
    ]


def _entries(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {f"{prefix}/{name}": tensor.numpy() for name, tensor in tensors.items()}


def _digest(tensor: Tensor | None) -> str | None:
    if tensor is None:
        return None
    content = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + content.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
