"""The tables and the JSON of `mpizero plan`."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpizero.cli.offload_words import WHERE, carrier_in_words, offload_record
from mpizero.cli.plan_question import OWN, Question
from mpizero.cli.plan_words import scale_of, show_size
from mpizero.cli.quantities import show_rate, show_seconds
from mpizero.plan import ACCOUNTS
from mpizero.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.plan import StateBytes, Step
    from mpizero.plan.times import Times, Traffic

__all__ = ["Row", "record_of", "text_of"]

SCHEMA = 1
WIDE = 100
LEAST = 5e-5
"""The least of a unit that a table shows as more than nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold what one stage takes and costs."""

    stage: int
    step: Step
    state: StateBytes
    """By the accounting that was asked for."""
    unit_buffers: float
    """Two gathered units at stage 3, by an account per parameter."""
    peak: float
    accounts: dict[str, float]
    """Bytes between two steps by each account."""
    traffic: Traffic
    times: Times


def text_of(question: Question, rows: Sequence[Row], stage: int | None, said: Sequence[str]) -> str:
    """Return the tables, with the smallest stage that fits and the advice below."""
    memory = _memory_of_mpizero if question.accounting == OWN else _memory_by_account
    parts = [_title(question), memory(question, rows), *_outside(question, rows), _costs(question, rows)]
    if question.limits.memory:
        beside = f" beside {show_size(question.limits.activations)} of activations" * bool(question.limits.activations)
        limit = show_size(question.limits.memory)
        found = f"Stage {stage} is the smallest that fits" if stage is not None else "No stage fits"
        parts.append(f"{found} {limit}{beside}.")
    parts += [textwrap.fill(sentence, WIDE, break_on_hyphens=False) for sentence in said]
    return "\n\n".join(parts)


def _title(question: Question) -> str:
    setup, model = question.setups[0], question.model
    where = "GPUs" if setup.on_gpu else "CPUs"
    places = f"{setup.ranks:,} ranks on {where}, {setup.per_node} on a node"
    if setup.hybrid:
        places += f", cut over groups of {setup.group}"
    assumed = "\nUnits are assumed: --units, --layers or --factory say better." if question.assumed else ""
    return f"{model.name}, {model.numel:,} parameters, {question.precision}, over {places}{assumed}"


def _memory_of_mpizero(question: Question, rows: Sequence[Row]) -> str:
    scale, unit = scale_of(max(row.peak for row in rows))
    head = ["stage", "parameters", "gradients", "optimizer", "between steps", "in forward", "in backward"]
    head += [f"by {account.name} B" for account in ACCOUNTS.values()]
    table = []
    for row in rows:
        phases = (row.step.phases[phase].total for phase in ("between steps", "forward", "backward"))
        values = [row.state.parameters, row.state.gradients, row.state.optimizer, *phases, *row.accounts.values()]
        table.append([str(row.stage), *(_figure(value / scale) for value in values)])
    return _memory(question, rows, head, table, unit) + (
        "\n\nWhat mpizero holds, padding and buffers included, activations not. Last columns: between steps by\n"
        "16 bytes per parameter (bf16 gradients), and 20 (an fp32 accumulator beside them)."
    )


def _memory_by_account(question: Question, rows: Sequence[Row]) -> str:
    scale, unit = scale_of(max(row.peak for row in rows))
    account = ACCOUNTS[question.accounting]
    table = []
    for row in rows:
        values = [row.state.parameters, row.state.gradients, row.state.optimizer, row.state.total, row.unit_buffers]
        table.append([str(row.stage), *(_figure(value / scale) for value in values)])
    head = ["stage", "parameters", "gradients", "optimizer", "between steps", "two unit buffers"]
    return _memory(question, rows, head, table, unit) + (
        f"\n\nBy {account.parameters} + {account.gradients} + {account.optimizer} bytes per parameter, "
        f"{account.about}; not what mpizero holds."
    )


def _memory(question: Question, rows: Sequence[Row], head: list[str], table: list[list[str]], unit: str) -> str:
    if question.limits.memory:
        head = [*head, "fits"]
        table = [
            [*line, "yes" if question.limits.fits(row.peak) else "no"] for line, row in zip(table, rows, strict=True)
        ]
    return f"{unit} per rank\n{aligned([head, *table], right=range(1, len(table[0])))}"


def _outside(question: Question, rows: Sequence[Row]) -> list[str]:
    """Return the table of what is moved out of memory, if something is to be."""
    moved = question.offload
    if moved is None:
        return []
    kinds = ("parameters", "gradients", "optimizer")
    most = max(max(getattr(row.step.outside, kind) for kind in kinds) for row in rows)
    scale, unit = scale_of(max(most, *(max(_ways(row)) for row in rows), 1))
    head = ["stage", "moved", *kinds, "groups, in memory", "read in a step", "written", "time of it", "after backward"]
    table = []
    for row in rows:
        there = row.step.setup.offload
        names = [] if there is None else [name for name in ("optimizer", "params") if getattr(there, name)]
        values = [getattr(row.step.outside, kind) for kind in kinds]
        values += [row.step.phases["step"].groups, *_ways(row)]
        times = [_show_time(seconds) for seconds in (row.times.carrying, row.times.streaming)]
        numbers = [*(_figure(value / scale) for value in values), *times] if names else ["-"] * (len(values) + 2)
        table.append([str(row.stage), ", ".join(names) or "nothing", *numbers])
    text = (
        f"{unit} per rank {WHERE[moved.place]}\n{aligned([head, *table], right=range(2, len(head)))}\n\n"
        f"Over {carrier_in_words(moved, question.carriers, question.neighbours)}.\n"
        "Stage 0 moves nothing, and stages below 3 no parameters. What follows backward is exposed whole."
    )
    return [text]


def _ways(row: Row) -> tuple[float, float]:
    carried = row.step.carried
    return carried.gathered + carried.read, carried.written


def _costs(question: Question, rows: Sequence[Row]) -> str:
    scale, unit = scale_of(max(*(row.traffic.nbytes for row in rows), 1))
    known = question.flops > 0
    head = ["stage", f"sent, {unit}", "collectives", "messages", "time of them"]
    head += ["computation", "exposed", "step"] if known else ["never hidden"]
    table = []
    for row in rows:
        times, traffic = row.times, row.traffic
        shown = [times.communication, times.least_exposed]
        if times.compute is not None and times.exposed is not None:
            shown = [times.communication, times.compute, times.exposed, times.compute + times.exposed]
        counts = [f"{traffic.nbytes / scale:.3g}", f"{traffic.collectives:,}", f"{traffic.messages:,}"]
        table.append([str(row.stage), *counts, *(_show_time(seconds) for seconds in shown)])
    node, port = (show_rate(link.beta) for link in question.links)
    ports = f"{question.wires} port{'s' * (question.wires > 1)} of {port} per node"
    return (
        f"per rank and step\n{aligned([head, *table], right=range(1, len(head)))}\n\n"
        f"The least time that {node} within nodes and {ports} allow; the optimizer's own arithmetic is not in it."
    )


def _show_time(seconds: float) -> str:
    """Return a time with three digits."""
    return show_seconds(float(f"{seconds:.3g}"))


def _figure(value: float) -> str:
    """Return three figures; 0 for what is nothing beside the other numbers of a table, as counters of steps."""
    return f"{value:.3g}" if value >= LEAST else "0"


def record_of(question: Question, rows: Sequence[Row], stage: int | None, said: Sequence[str]) -> dict[str, object]:
    """Return what `--json` prints: bytes and seconds, of one rank and step."""
    setup, model = question.setups[0], question.model
    shared = {key: value for key, value in asdict(setup).items() if key not in {"stage", "widths", "offload"}}
    return {
        "schema_version": SCHEMA,
        "model": {
            "name": model.name,
            "parameters": model.numel,
            "units": len(model.units),
            "units_assumed": question.assumed,
            "largest_unit_bytes": rows[0].step.largest_unit,
        },
        **shared,
        "precision": question.precision,
        "itemsizes": asdict(setup.widths),
        "accounting": question.accounting,
        "memory": question.limits.memory or None,
        "activations": question.limits.activations,
        "links": [asdict(link) for link in question.links],
        "wires": question.wires,
        "offload": None if question.offload is None else asdict(question.offload),
        "carriers": asdict(question.carriers),
        "smallest_stage": stage if question.limits.memory else None,
        "advice": list(said),
        "stages": [_record(question, row) for row in rows],
    }


def _record(question: Question, row: Row) -> dict[str, object]:
    phases = {
        name: {"room": found.room, "groups": found.groups, **found.held._asdict(), "total": found.total}
        for name, found in row.step.phases.items()
    }
    return {
        "stage": row.stage,
        "state": {**asdict(row.state), "total": row.state.total},
        "phases": phases if question.accounting == OWN else None,
        "unit_buffers": row.unit_buffers,
        "peak": row.peak,
        "fits": question.limits.fits(row.peak) if question.limits.memory else None,
        "accounts": row.accounts,
        "traffic": asdict(row.traffic),
        "offload": offload_record(row.step.setup.offload, row.step.carried, row.step.outside),
        "seconds": asdict(row.times),
    }
