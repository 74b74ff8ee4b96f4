"""Time stock trainers of torch on gloo and on mpizero in turn, in one process per rank; rank 0 writes FILE.

    _distributed_ranks.py FILE [--shape gpt] [--rounds 8] [--steps 3] [--calls 300]

[Note: in turn] Both backends are groups of one job, each with a model of its own, so that a round's two times are
seconds apart: on a shared machine what others do falls on both. A round takes `steps` steps on one backend and then as
many on the other, every other round the other way round; ranks meet before each. The idle backend's threads sleep.

[Note: the limit] DDP takes turns with a third kind, which sends no gradient at all: no backend's step is shorter.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
from _training_models import about, adamw, batches, gpt, stepper
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpizero as mz
import mpizero.c10d

BACKENDS = ("gloo", "mpizero")
SILENT = "silent"
"""See [Note: the limit]."""
KINDS = ("fsdp2", "ddp")
SIZES = (4, 1024, 16 * 1024, 256 * 1024, 4 * 1024 * 1024)
"""Bytes of the all-reduces."""
WARM_UP = 2
BATCH = 1


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="gpt")
    for name, default in (("rounds", 8), ("steps", 3), ("calls", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpizero.c10d.init()
    groups = {"mpizero": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = {"calls": [calls(size, args) for size in SIZES]}
    found["trainers"] = {kind: trainer(kind, groups, args) for kind in KINDS}
    if dist.get_rank() == 0:
        args.file.write_text(json.dumps({**found, "about": about()}), encoding="utf-8")
    dist.destroy_process_group()


def trainer(kind: str, groups: dict, args: argparse.Namespace) -> dict:
    """Return milliseconds per step of each round by backend, and each backend's last loss."""
    gc.collect()  # what the kind before has left
    data = batches(args.shape, BATCH, dist.get_rank())
    names = [*BACKENDS, SILENT] if kind == "ddp" else list(BACKENDS)
    steps = {name: step_of(kind, args.shape, groups.get(name), silent=name == SILENT) for name in names}
    losses = {name: [step(*data[0]).item() for _ in range(WARM_UP)][-1] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[:: 1 - 2 * (number % 2)]:
            dist.barrier()
            took = []
            for count in range(args.steps):
                start = time.perf_counter()
                losses[name] = steps[name](*data[count % len(data)]).item()
                took.append(time.perf_counter() - start)
            times[name].append(over_ranks(statistics.median(took)) * 1e3)
    return {"ms": times, "losses": losses}


def step_of(kind: str, shape: str, group: dist.ProcessGroup | None, *, silent: bool):
    """Return a training step of torch's own trainer on a group; None is the world's."""
    model = gpt(shape)
    if kind == "ddp":
        model = DistributedDataParallel(model, process_group=group)
        if silent:
            model.register_comm_hook(None, unsent)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return stepper(model, adamw(model.parameters()))


def unsent(_, bucket):  # torch compares annotations with classes, and finds text
    """Leave a bucket as it is."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def calls(size: int, args: argparse.Namespace) -> dict:
    """Return microseconds of an all-reduce of fp32 by round, torch's call and the verb in turn; MAX leaves the data."""
    x = torch.ones(size // 4)
    ways = {"c10d": lambda: dist.all_reduce(x, dist.ReduceOp.MAX), "verb": lambda: mz.all_reduce(x, op="max")}
    times: dict[str, list[float]] = {name: [] for name in ways}
    count = max(20, args.calls // (1 + size // 65536))
    for number in range(args.rounds + 1):  # the first warms up
        for name in list(ways)[:: 1 - 2 * (number % 2)]:
            dist.barrier()
            took = []
            for _ in range(count):
                start = time.perf_counter()
                ways[name]()
                took.append(time.perf_counter() - start)
            times[name].append(over_ranks(statistics.median(took)) * 1e6)
    return {"bytes": size, "us": {name: values[1:] for name, values in times.items()}}


def over_ranks(value: float) -> float:
    """Return the mean over ranks."""
    mean = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


if __name__ == "__main__":
    main()
