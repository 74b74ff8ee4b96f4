"""What benchmarks/training measures in mpizero's ranks beside step times; every rank writes FOLDER/rank-N.json.

calibrate FOLDER SHAPE          compute alone, and the communication of a step alone, by stage
hidden FOLDER SHAPE STAGE STEPS the same for one stage, and the step
state FOLDER SHAPE              bytes of model state against their formula, stages and precisions
bytes FOLDER SHAPE              bytes over messages, and loaded, in a step, by stage
overhead FOLDER ROUNDS          Python's time per unit and step, on one rank
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path

import torch
from _training_models import Block, Chain, about, adamw, batches, gpt, stepper
from _training_steps import Place, series, timed, where, write

import mpizero as mz
from mpizero.plan import STAGES
from mpizero.testing.counts import theory_of

BATCH = 4
HIDDEN_STAGES = (0, 2, 3)
UNITS = 200
STEPS_OF_BYTES = 4


def calibrate(place: Place, shape: str) -> dict:
    """Measure what the rate of the links is to be chosen by."""
    found = {str(stage): communication(sharded(shape, stage), 2) for stage in HIDDEN_STAGES}
    return {"compute_ms": computed(gpt(shape), shape, place, 3), "communication_ms": found}


def hidden(place: Place, shape: str, stage: str, steps: str) -> dict:
    """Measure compute alone, the step, communication alone, and compute again."""
    plain = gpt(shape)
    first = computed(plain, shape, place, int(steps))
    model = sharded(shape, int(stage))
    step = stepper(model, adamw(model.parameters()))
    times, _ = series(step, batches(shape, BATCH, place.rank), int(steps) + 2, place)
    alone = communication(model, 3)
    again = computed(plain, shape, place, int(steps))
    return {"step_ms": times, "compute_ms": [*first, *again], "communication_ms": alone}


def sharded(shape: str, stage: int):
    """Return a model at a stage, a block a unit."""
    return mz.shard(gpt(shape), stage=stage, units={Block})


def computed(model, shape: str, place: Place, steps: int) -> list[float]:
    """Return milliseconds of steps without communication, on all ranks at once."""
    mz.barrier()
    times, _ = series(stepper(model, adamw(model.parameters())), batches(shape, BATCH, place.rank), steps, place)
    return times


def communication(model, rounds: int) -> list[float]:
    """Return milliseconds of the collectives of a model's step, one after the other, on the communicator that it uses.

    Inside a channel, as shard calls them, so that the same algorithms are chosen.
    """
    comm = mz.world().private
    calls = theory_of(model).collectives
    whole = {one.numel: torch.ones(one.numel) for one in calls}
    parts = {numel: torch.ones(numel // comm.size) for numel in whole}

    def once() -> None:
        for number, (operation, numel, _) in enumerate(calls):
            full, part = whole[numel], parts[numel]
            with comm.channel(number, "communication alone"):
                if operation == "all_reduce":
                    mz.all_reduce(full, comm, op="mean", order="canonical")
                elif operation == "reduce_scatter":
                    mz.reduce_scatter(full, comm, op="mean", out=part, order="canonical")
                else:
                    mz.all_gather(part, comm, out=full)

    times = []
    for _ in range(rounds + 1):
        mz.barrier()
        times.append(timed(once) * 1e3)
    return times[1:]


def state(place: Place, shape: str) -> dict:
    """Measure model state between two steps: bytes per rank by kind, and by the formula."""
    rows = []
    for precision in (None, torch.bfloat16):
        for stage in STAGES:
            model = gpt(shape)
            numel = sum(parameter.numel() for parameter in model.parameters())
            root = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("blocks."))
            mz.shard(model, stage=stage, units={Block}, precision=mz.Precision(param=precision))
            optimizer = adamw(model.parameters())
            step = stepper(model, optimizer)
            for tokens, targets in batches(shape, 1, place.rank, 2):
                step(tokens, targets)
            report = mz.memory_report(model, optimizer)
            row = {"stage": stage, "precision": "fp32" if precision is None else "bf16", "numel": numel, "root": root}
            for name in ("measured", "formula"):
                held = getattr(report, name)
                row[name] = {kind: getattr(held, kind) for kind in ("parameters", "gradients", "optimizer", "total")}
            rows.append({**row, "unit_buffers": report.unit_buffers})
            del model, optimizer, step, report, held
            gc.collect()
    return {"rows": rows}


def traffic(place: Place, shape: str) -> dict:
    """Count the bytes of a step by stage; `counted` is what the builders' schedules send for the units' lengths."""
    rows = []
    for stage in STAGES:
        model = sharded(shape, stage)
        step = stepper(model, adamw(model.parameters()))
        data = batches(shape, 1, place.rank)
        for number in range(2):
            step(*data[number])
        before = mz.stats(model).copy()
        for number in range(STEPS_OF_BYTES):
            step(*data[number])
        moved = mz.stats(model).since(before)
        names = ("bytes_sent", "bytes_loaded", "messages_sent")
        row = {name: getattr(moved, name) / STEPS_OF_BYTES for name in names}
        theory = theory_of(model)
        rows.append({"stage": stage, **row, "theory": theory.formula, "counted": theory.nbytes(place.rank)})
    return {"rows": rows}


def overhead(_place: Place, rounds: str) -> dict:
    """Measure steps of many tiny units: plain, with bare hooks, sharded at stages 0 and 3 on this one rank.

    In processor time, which other processes on the machine do not lengthen; and by the clock.
    """
    steps = {"plain": plain_chain(), "hooks": hooked_chain()}
    for stage in (0, 3):
        model = mz.shard(Chain(UNITS), stage=stage, units={torch.nn.Linear})
        steps[f"stage {stage}"] = chain_step(model)
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(int(rounds) + 3):
        for name, step in steps.items():
            before = time.process_time()
            seconds = timed(step)
            if number >= 3:
                cpu[name].append(time.process_time() - before)
                wall[name].append(seconds)
    plain_ms = statistics.median(cpu["plain"]) * 1e3
    return {"units": UNITS, "us": per_unit(cpu), "wall_us": per_unit(wall), "plain_ms": plain_ms}


def per_unit(times: dict[str, list[float]]) -> dict[str, float]:
    """Return each one's microseconds per unit above the plain model's: medians of what differs within a round."""
    found = {}
    for name, seconds in times.items():
        more = [one - plain for one, plain in zip(seconds, times["plain"], strict=True)]
        found[name] = statistics.median(more) / UNITS * 1e6
    return found


def plain_chain():
    return chain_step(Chain(UNITS))


def hooked_chain():
    """Return the step of a chain whose units have the hooks that any sharding needs, which do nothing."""

    def watch_output(_module, _args, output) -> None:
        output.register_hook(lambda _: None)

    model = Chain(UNITS)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: None)
        layer.register_forward_hook(watch_output)
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    return chain_step(model)


def chain_step(model):
    """Return a step with an optimizer so plain that its time does not hide what is looked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


PROBES = {"calibrate": calibrate, "hidden": hidden, "state": state, "bytes": traffic, "overhead": overhead}


def main() -> None:
    """Read the command line, measure, write."""
    torch.set_num_threads(1)
    name, folder, *words = sys.argv[1:]
    place = where("mpizero", Path(folder))
    start = time.monotonic()
    found = PROBES[name](place, *words)
    write(place, {**found, "seconds": time.monotonic() - start, "about": about()})


if __name__ == "__main__":
    main()
