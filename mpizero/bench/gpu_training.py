"""The figures of `bin/gpucheck` on training: stages on GPUs, equal to the bit, and near what a CPU computes.

Stages 0 to 3 with state on the GPU, and 1 to 3 with state on the host.

Started in ranks, with `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment; rank 0 writes what was found.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpizero as mz
from mpizero.bench.gpu_run import Figure, options_of, write_figures
from mpizero.testing.host_runtime import HostRuntime, stand_in
from mpizero.testing.models import Block, awkward_model, token_loss, tokens
from mpizero.testing.parity import differing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["main"]

PRECISIONS = {"fp32": mz.Precision(), "bf16": mz.Precision(param=torch.bfloat16)}
STAGES = (0, 1, 2, 3)
OFFLOADED = {
    "stage 1": (1, mz.Offload()),
    "stage 2": (2, mz.Offload()),
    "stage 3": (3, mz.Offload()),
    "stage 3, parameters too": (3, mz.Offload(params="cpu")),
}
ROWS = 4
STEPS = 6
LOSSES = "(losses)"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, write; return 1 where stages differ. Collective.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    options = options_of("mpizero.bench.gpu_training", __doc__, argv)
    torch.use_deterministic_algorithms(mode=True)
    figures: list[Figure] = []
    device = torch.device("cpu" if options.stand_in else f"cuda:{mz.choose_gpu()}")
    comm = mz.world()
    steps = 2 if options.stand_in else STEPS
    cpu = torch.device("cpu")
    on_cpu = {precision: _train(0, precision, steps, cpu, comm)[LOSSES] for precision in PRECISIONS}
    with stand_in(HostRuntime(seed=comm.rank)) if options.stand_in else nullcontext():
        for precision, losses in on_cpu.items():
            figures += _compare(precision, losses, device, comm)
            if comm.rank == 0:
                write_figures(options.json, figures)
    return 1 if any(figure.wrong for figure in figures) else 0


def _compare(precision: str, on_cpu: Tensor, device: torch.device, comm: Any) -> list[Figure]:
    """Train at every stage; hold the stages against each other, and stage 0 against the CPU's losses. Collective."""
    start, steps = time.perf_counter(), len(on_cpu)
    found = {stage: _train(stage, precision, steps, device, comm) for stage in STAGES}
    seconds = time.perf_counter() - start
    kinds = OFFLOADED if device.type == "cuda" else dict([*OFFLOADED.items()][::3])  # a device that is played is slow
    # By the host's AdamW, which need not have the bits of a GPU's.
    away = [_train(stage, precision, steps, device, comm, offload=offload) for stage, offload in kinds.values()]
    how = f"{len(found[0])} tensors and losses, {steps} steps of AdamW, {comm.size} ranks, {seconds:.1f} s for 4 stages"
    host = f"{', '.join(kinds)}; {steps} steps of the host's AdamW, {comm.size} ranks"
    far = ((found[0][LOSSES] - on_cpu).abs() / on_cpu.abs()).max().item()
    distance = max(comm.mpi.allgather(far))
    losses = f"stage 0, {steps} steps, worst of {comm.size} ranks; last loss {found[0][LOSSES][-1].item():.5f}"
    return [
        _alike(f"stages-{precision}", [found[stage] for stage in STAGES], how, comm),
        _alike(f"offload-{precision}", away, host, comm),
        Figure(name=f"losses-{precision}", value=distance, how=losses),
    ]


def _alike(name: str, found: list[dict[str, Tensor]], how: str, comm: Any) -> Figure:
    """Return in how many tensors on any rank some run differs from the first. Collective."""
    names = sorted({name for one in found[1:] for name in differing(one, found[0])})
    everywhere = comm.mpi.allgather(names)
    differ = len({name for each in everywhere for name in each})
    if differ:
        how += f"; {', '.join(next(each for each in everywhere if each)[:3])}"
    return Figure(name=name, value=float(differ), how=how, wrong=differ)


def _train(
    stage: int, precision: str, steps: int, device: torch.device, comm: Any, *, offload: mz.Offload | None = None
) -> dict[str, Tensor]:
    """Return the whole parameters after training, and this rank's losses, in host memory. Collective."""
    model = awkward_model(comm.rank).to(device)
    model = mz.shard(model, comm, stage=stage, units={Block}, precision=PRECISIONS[precision], offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # torch's others say that they may give other bits each time
        for step in range(steps):
            batch = tokens(1, step, ROWS * comm.size)[comm.rank :: comm.size].to(device)
            loss = token_loss(model, batch)
            loss.backward()
            mz.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    whole = mz.full_parameters(model)
    return {name: value.cpu() for name, value in {**whole, LOSSES: torch.stack(losses)}.items()}


if __name__ == "__main__":
    sys.exit(main())
