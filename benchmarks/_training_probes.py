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
from _training_models import Block, Chain, about, adamw, batches, gpt, stepper, unit_lengths
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
    model = gpt(shape)
    lengths = unit_lengths(model, place.size)
    found = {str(stage): communication(stage, lengths, 2) for stage in HIDDEN_STAGES}
    return {"compute_ms": computed(model, shape, place, 3), "communication_ms": found}


def hidden(place: Place, shape: str, stage: str, steps: str) -> dict:
    """Measure compute alone, the step, communication alone, and compute again."""
    plain = gpt(shape)
    first = computed(plain, shape, place, int(steps))
    model = mz.shard(gpt(shape), stage=int(stage), units={Block})
    step = stepper(model, adamw(model.parameters()))
    times, _ = series(step, batches(shape, BATCH, place.rank), int(steps) + 2, place)
    alone = communication(int(stage), unit_lengths(plain, place.size), 3)
    again = computed(plain, shape, place, int(steps))
    return {"step_ms": times, "compute_ms": [*first, *again], "communication_ms": alone}


def computed(model, shape: str, place: Place, steps: int) -> list[float]:
    """Return milliseconds of steps without communication, on all ranks at once."""
    mz.barrier()
    times, _ = series(stepper(model, adamw(model.parameters())), batches(shape, BATCH, place.rank), steps, place)
    return times


def communication(stage: int, lengths: list[int], rounds: int) -> list[float]:
    """Return milliseconds of a step's collectives, one after the other, on the communicator that shard uses.

    Inside a channel, as shard calls them, so that the same algorithms are chosen.
    """
    comm = mz.world().private
    whole = [torch.ones(length) for length in lengths]
    parts = [torch.ones(length // comm.size) for length in lengths]

    def once() -> None:
        for number, (full, part) in enumerate(zip(whole, parts, strict=True)):
            with comm.channel(number, "communication alone"):
                if stage == 0:
                    mz.all_reduce(full, comm, op="mean", order="canonical")
                    continue
                mz.reduce_scatter(full, comm, op="mean", out=part, order="canonical")
                for _ in range(2 if stage == 3 else 1):
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
        model = gpt(shape)
        mz.shard(model, stage=stage, units={Block})
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
