"""Time training steps of one kind in each of several ranks; every rank writes its figures to FOLDER/rank-N.json.

    _training_steps.py KIND FOLDER [--shape gpt] [--batches 4,1] [--steps 4] [--watch]

mpizero's kinds find their ranks through MPI, the others by RANK and WORLD_SIZE and a file in FOLDER.

[Note: step times] A step's time is from the end of the step before to its own, with no barrier in between: what one
step leaves to the next, such as a gather that runs on, is in the next one's time. Ranks start together and wait for
each other in their collectives. `compute` is as many processes as there are ranks, which start together and go on
alone: no communication, and the same load on cores and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _collectives_ranks import pss
from _training_models import LEARNING_RATE, Block, about, adamw, batches, gpt, stepper, versions

WARM_UP = 2
"""Steps before those that are timed: the first allocates, the second follows the order seen in the first."""
SAMPLE = 0.02
"""Seconds between two looks at the memory, at least."""
PR_SET_PDEATHSIG = 1
PRIVATE = "-private"
"""The end of a kind's name whose full parameters are not shared by the ranks of a node."""


class SkippedError(Exception):
    """Say why a kind cannot be had here."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Hold which rank this is and where ranks meet."""

    rank: int
    size: int
    folder: Path

    def meet(self, name: str) -> None:
        """Wait until all ranks are here, by files, so that no kind needs a barrier of its own."""
        (self.folder / f"{name}-{self.rank}").touch()
        while any(not (self.folder / f"{name}-{rank}").exists() for rank in range(self.size)):
            time.sleep(0.002)


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="gpt")
    parser.add_argument("--batches", default="4,1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--watch", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    place = where(args.kind, args.folder)
    try:
        found = measured(args, place)
    except SkippedError as error:
        found = {"skipped": str(error)}
    write(place, found)


def write(place: Place, found: dict) -> None:
    """Write a rank's figures, whole or not at all."""
    part = place.folder / f"rank-{place.rank}.part"
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(place.folder / f"rank-{place.rank}.json")


def where(kind: str, folder: Path) -> Place:
    """Return this rank's place; starts MPI for mpizero's kinds alone."""
    if kind.startswith("mpizero"):
        import mpizero as mz

        return Place(rank=mz.world().rank, size=mz.world().size, folder=folder)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no launcher is there to end a rank left alone
    return Place(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), folder=folder)


def measured(args: argparse.Namespace, place: Place) -> dict:
    """Build the kind and time it at each batch size."""
    sizes = [int(size) for size in args.batches.split(",")]
    watch = Watch() if args.watch else None
    step, optimizer = built(args.kind, args.shape, sizes[0], place)
    place.meet("built")
    ready = time.monotonic()
    found: dict = {"ms": {}}
    for size in sizes:
        # A short step is timed more often: its time varies more.
        count = args.steps * (2 if size < sizes[0] else 1)
        found["ms"][str(size)], loss = series(step, batches(args.shape, size, place.rank), count, place)
        found.setdefault("loss", loss)  # of the first size alone: what comes later depends on the number of steps
    if args.kind == "compute":
        found["optimizer_ms"] = statistics.median(timed(optimizer.step) for _ in range(3)) * 1e3
    if watch is not None:
        found |= {"ready": ready, "pss": watch.end()}
    found["about"] = about() if args.kind.startswith("mpizero") else {"versions": versions()}
    place.meet("done")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def series(step, data: list, count: int, place: Place) -> tuple[list[float], float]:
    """Return the milliseconds of `count` steps after a warm-up, and the last loss. See [Note: step times]."""
    for number in range(WARM_UP):
        step(*data[number % len(data)])
    place.meet(f"batch-{data[0][0].shape[0]}")
    times = []
    before = time.perf_counter()
    for number in range(count):
        loss = step(*data[number % len(data)])
        now = time.perf_counter()
        times.append((now - before) * 1e3)
        before = now
    return times, loss.item()


def timed(call) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def built(kind: str, shape: str, batch: int, place: Place):
    """Return a kind's training step and its optimizer.

    Raises:
        SkippedError: where the kind cannot be had.
    """
    if kind.startswith("deepspeed"):
        return deepspeed_step(kind, shape, batch, place)
    model = gpt(shape)
    if kind.startswith("mpizero"):
        model = sharded(kind, model)
    elif kind != "compute":
        join(place)
        model = peer(kind, model)
    optimizer = adamw(model.parameters())
    return stepper(model, optimizer), optimizer


def sharded(kind: str, model):
    """Shard a model as a kind's name says: mpizero-STAGE, with PRIVATE at its end or not."""
    import mpizero as mz

    options = {}
    if kind.endswith(PRIVATE):
        options["node_shared"] = False
    return mz.shard(model, stage=int(kind.removesuffix(PRIVATE)[-1]), units={Block}, **options)


def join(place: Place) -> None:
    """Open torch's process group on gloo, through a file: no port that could be taken."""
    store = f"file://{place.folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.size)


def peer(kind: str, model):
    """Wrap a model in torch's own data parallelism or sharding, on gloo."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def deepspeed_step(kind: str, shape: str, batch: int, place: Place):
    """Return DeepSpeed's training step at the stage of the kind's name, in fp32 on gloo, with torch's AdamW."""
    try:
        import deepspeed
    except ImportError as error:
        raise SkippedError(f"not installed ({error})") from None
    join(place)
    # Its all-reduce over shared memory serves inference alone, and would be compiled here, in all ranks at once.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = gpt(shape)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,  # by default it clips, which the other kinds do not
        "zero_optimization": {"stage": int(kind[-1]), "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step, optimizer


class Watch:
    """Sample this process's proportional set size, in which a page that several map counts once over all of them."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        took = 0.0
        # The kernel walks all pages for it: never let that be more than a part of what the process does.
        while not self._over.wait(max(SAMPLE, 2 * took)):
            at = time.monotonic()  # one clock for all processes of a machine
            self._samples.append((at, pss()))
            took = time.monotonic() - at

    def end(self) -> list[tuple[float, int]]:
        """Stop, and return (seconds, bytes) of each look."""
        self._over.set()
        self._thread.join()
        return self._samples


if __name__ == "__main__":
    sys.exit(main())
