"""Ranks of benchmarks/simulated: a small GPT's compute alone, collectives alone, and its steps at some stages.

_simulated_ranks.py FOLDER --stages 0,2,3 --steps N: every rank writes FOLDER/rank-N.json.

Compute alone is that of as many processes as there are ranks, which start together and speak to nobody. Collectives
alone are gathers and reduce-scatters of buffers of one size in the background, while the rank sleeps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from _training_models import SHAPES, Block, about, adamw, batches, gpt, stepper
from _training_steps import Place, series, where, write

import mpizero as mz
from mpizero.collectives.links import fit

SHAPE = "small"  # 3.3M parameters
BATCH = 4
AT_ONCE = 4
ELEMENTS = 786432
"""Of a buffer: about those of a block, and a multiple of 64 for any number of ranks here."""


def computed(model: torch.nn.Module, place: Place, name: str, count: int) -> dict[str, list[float]]:
    """Return the seconds of forward, backward and optimizer, a value per step after two that are not counted."""
    optimizer = adamw(model.parameters())
    data = batches(SHAPE, BATCH, place.rank)
    place.meet(name)
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "core": []}
    for number in range(count + 2):
        times, core = [time.perf_counter()], time.process_time()
        optimizer.zero_grad()
        loss = model(*data[number % len(data)])
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        if number >= 2:
            for index, phase in enumerate(("forward", "backward", "optimizer")):
                found[phase].append(times[index + 1] - times[index])
            found["core"].append(time.process_time() - core)
    return found


def collectives_alone(elements: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds and seconds of the core of AT_ONCE collectives begun together, by operation: medians."""
    comm = mz.world().private
    found = {}
    for operation in ("all_gather", "reduce_scatter"):
        times = []
        for _ in range(rounds + 1):
            whole, part = torch.ones(elements), torch.ones(elements // comm.size)
            mz.barrier()
            start = time.perf_counter(), time.process_time()
            with comm.channel(1, "collectives alone"):
                if operation == "all_gather":
                    works = [mz.all_gather(part, comm, out=whole, async_op=True) for _ in range(AT_ONCE)]
                else:
                    works = [
                        mz.reduce_scatter(whole, comm, out=part, order="canonical", async_op=True)
                        for _ in range(AT_ONCE)
                    ]
            for work in works:
                work.wait()
            times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        seconds, core = (statistics.median(column) for column in zip(*times[1:], strict=True))
        found[operation] = {"nbytes": 4 * elements, "count": AT_ONCE, "seconds": seconds, "core": core}
    return found


def units_of(model: torch.nn.Module) -> list[dict]:
    """Return each unit's name, the shapes of its parameters, and the operations of its forward for one token."""
    shape, units = SHAPES[SHAPE], []
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    for name, block in blocks.items():
        shapes = [(inner, list(parameter.shape)) for inner, parameter in block.named_parameters()]
        matrices = sum(p.numel() for p in block.parameters() if p.dim() > 1)
        units.append({"name": name, "parameters": shapes, "flops": 2 * matrices + 4 * shape.length * shape.dim})
    rest = [
        (name, list(p.shape)) for name, p in model.named_parameters() if ".".join(name.split(".")[:2]) not in blocks
    ]
    return [*units, {"name": "", "parameters": rest, "flops": 2 * model.head.weight.numel()}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default="0,2,3")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    place = where("mpizero", args.folder)
    compute = computed(gpt(SHAPE), place, "before", 2 * args.steps)
    found: dict = {"compute": compute, "units": units_of(gpt(SHAPE)), "tokens": BATCH * SHAPES[SHAPE].length}
    found["alone"] = collectives_alone(ELEMENTS, 3)
    found["steps"] = {}
    for stage in map(int, args.stages.split(",")):
        model = mz.shard(gpt(SHAPE), stage=stage, units={Block})
        step = stepper(model, adamw(model.parameters()))
        mz.barrier()
        alone = Place(rank=0, size=1, folder=args.folder)  # collectives are all the meeting that is wanted
        times, _ = series(step, batches(SHAPE, BATCH, place.rank), args.steps, alone)
        found["steps"][str(stage)] = times
    mz.barrier()
    for phase, seconds in computed(gpt(SHAPE), place, "after", 2 * args.steps).items():
        compute[phase] += seconds
    points = mz.world().notes.get("links", {})
    found["links"] = {kind: asdict(fit(measured)) for kind, measured in points.items() if measured}
    found["medians"] = {phase: statistics.median(seconds) for phase, seconds in compute.items()}
    write(place, {**found, "about": about()})


if __name__ == "__main__":
    sys.exit(main())
