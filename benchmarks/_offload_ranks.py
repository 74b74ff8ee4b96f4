"""Ranks of benchmarks/offload: what a disk carries, a step over state that is on it, the memory of a large model."""

from __future__ import annotations

import argparse
import json
import threading
import time
from functools import partial
from pathlib import Path

import torch
from _training_models import GPT, Block
from typing_extensions import Self

import mpizero as mz
from mpizero.bench.disk import measure_disk
from mpizero.comm.describe import machine

BF16 = mz.Precision(param=torch.bfloat16)
LENGTH = 32
"""Tokens of a sequence."""


def pss() -> int:
    """Return this process's bytes of memory, shared pages by their parts."""
    with Path("/proc/self/smaps_rollup").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Peak:
    """Sample `pss` while inside."""

    def __enter__(self) -> Self:
        self.bytes = pss()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, pss())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def built(dim: int, layers: int, offload: mz.Offload | None, stage: int):
    """Return a sharded GPT that was never whole in memory, and its AdamW."""
    with torch.device("meta"):
        model = GPT(dim=dim, heads=dim // 64, layers=layers, length=LENGTH)
    model = mz.shard(model, stage=stage, units={Block}, precision=BF16, node_shared=False, offload=offload)
    adamw = {"lr": 1e-4, "fused": True}
    if offload is None:
        return model, torch.optim.AdamW(model.parameters(), **adamw)
    return model, mz.offloaded(torch.optim.AdamW, model, **adamw)


def slowest(comm, seconds: float) -> float:
    return max(comm.mpi.allgather(seconds))


def timed(comm, call) -> float:
    """Return the seconds of a call on the slowest rank."""
    comm.mpi.Barrier()
    start = time.perf_counter()
    call()
    return slowest(comm, time.perf_counter() - start)


def backward(model, rank: int, seed: int) -> None:
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(100 * seed + rank))
    model(tokens, tokens.roll(-1, 1)).backward()


def steps(comm, args) -> dict:
    """Time forward and backward, and the optimizer's step, with its state on disk and in memory, in turn."""
    offload = mz.Offload(optimizer=args.disk, group_bytes=args.group)
    kinds = {"disk": built(args.dim, args.layers, offload, 2), "memory": built(args.dim, args.layers, None, 2)}
    for model, optimizer in kinds.values():  # makes the state
        backward(model, comm.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
    spill = mz.shard.runtime_of(kinds["disk"][0]).spill
    (file,) = spill.files
    found: dict = {"rounds": []}
    for turn in range(args.rounds):
        speed = measure_disk(args.disk)
        row = {"both": min(comm.mpi.allgather(speed.both)), "read": speed.read, "write": speed.write}
        for name, (model, optimizer) in kinds.items():
            row[f"{name} compute"] = timed(comm, partial(backward, model, comm.rank, turn + 1))
            before = file.bytes_read, file.bytes_written
            row[f"{name} step"] = timed(comm, optimizer.step)
            if name == "disk":
                row["bytes_read"] = max(comm.mpi.allgather(file.bytes_read - before[0]))
                row["bytes_written"] = max(comm.mpi.allgather(file.bytes_written - before[1]))
            optimizer.zero_grad()
        found["rounds"].append(row)
    flats = mz.shard.runtime_of(kinds["disk"][0]).flats
    return found | {"shard": sum(flat.master.numel() for flat in flats), "unbuffered": file.unbuffered}


def memory(comm, args) -> dict:
    """Train with optimizer, or optimizer and parameters, on disk; return bytes of memory before and at the peak."""
    before = pss()
    offload = mz.Offload(optimizer=args.disk, params=args.disk if args.params else None, group_bytes=args.group)
    with Peak() as making:
        model, optimizer = built(args.dim, args.layers, offload, 3)
    losses = []
    with Peak() as training:
        for step in range(args.rounds):
            backward(model, comm.rank, step)
            norm = float(mz.clip_grad_norm_(model, 1.0))
            losses.append(norm)
            optimizer.step()
            between = pss()
            optimizer.zero_grad()
    flats = mz.shard.runtime_of(model).flats
    report = mz.memory_report(model, optimizer)
    return {
        "before": before,
        "making": making.bytes,
        "training": training.bytes,
        "between": between,
        "parameters": sum(flat.layout.numel for flat in flats),
        "shard": sum(flat.master.numel() for flat in flats),
        "groups": optimizer.memory,
        "reported": report.measured.total,
        "on_disk": report.on_disk,
        "norms": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("steps", "memory"))
    parser.add_argument("file", type=Path)
    parser.add_argument("disk", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--group", type=int, default=8 << 20)
    parser.add_argument("--params", action="store_true")
    args = parser.parse_args()
    world = mz.world()
    found = steps(world, args) if args.what == "steps" else memory(world, args)
    everyone = world.mpi.gather(found)
    if world.rank == 0:
        text = {"ranks": everyone, "machine": machine()}
        args.file.write_text(json.dumps(text), encoding="utf-8")


if __name__ == "__main__":
    main()
