"""See where the time of a sharded model's steps goes: to compute, or to communication, exposed or hidden."""

from __future__ import annotations

import json
import math
import platform
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.collectives import all_gather, broadcast, gather
from mpizero.errors import ShardError, must_be
from mpizero.shard.runtime import runtime_of
from mpizero.shard.spans import steps_of
from mpizero.shard.trace import trace_of
from mpizero.tables import aligned

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from mpizero.shard.spans import ProfiledStep, Span, UnitTraffic

__all__ = ["Profile", "profile"]

PARTS = {
    "step": "seconds",
    "  forward": "forward",
    "  backward": "backward",
    "  optimizer": "optimizer",
    "compute": "compute",
    "communication": "communication",
    "  hidden": "hidden",
    "  exposed": "exposed",
    "    waits": "waited",
    "    meetings": "agreed",
}
"""The lines of the summary's first table, each with its field of `ProfiledStep`."""
UNIT_HEADING = ("unit", "gathers", "gathered MiB", "reductions", "reduced MiB", "waited ms")
MIB = 1 << 20
ISSUED = "; the host's times: work on the GPU is issued in them, not executed"


@contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Record what a sharded model does inside a `with` block, and tell compute from communication by step and unit.

    A step ends when the optimizer's step does, and the first begins with the block; an optimizer that steps is a step,
    so a model with two optimizers has two steps per round. What comes after the last step is recorded and exported, but
    is part of no step. The time of a step that is neither waiting nor a meeting of ranks is compute, loading data too.
    All is told by the host's clock: on a GPU it is when work was issued, not when it was executed.

    Costs no messages, and some 200 bytes per recorded span, of which a step has about eight per unit. Without a profile
    nothing is recorded.

    Args:
        model: a sharded model.

    Returns:
        A `Profile`: `steps`, `summary()` and `export(path)`, inside the block and after it.

    Raises:
        ShardError: if the model was not sharded, or is being profiled already.

    Examples:
        >>> with mz.profile(model) as p:
        ...     for batch in batches:
        ...         train_one_step(batch)
        >>> if comm.rank == 0:
        ...     print(p.summary())
        >>> p.export("trace.json")  # by all ranks
    """
    runtime: Any = runtime_of(model)
    if runtime.observer is not None:
        remedy = "leave the block of the first one before the next is entered"
        raise ShardError(must_be("mpizero.profile", "the model's only one at a time", "a second one", remedy))
    profile = Profile(runtime.comm, issued=runtime.home.on_device)
    runtime.observer = profile.record
    try:
        yield profile
    finally:
        runtime.observer = None


class Profile:
    """Hold what one rank recorded of a sharded model; made by `mpizero.profile`."""

    def __init__(self, comm: Any, *, issued: bool = False) -> None:
        self._comm, self._issued = comm, issued
        self._spans: list[Span] = []
        self._start, self._wall = _clocks()

    @property
    def record(self) -> Callable[[Span], None]:
        """Return what takes a span, from any thread."""
        return self._spans.append  # list methods are whole or not at all, whatever the threads

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the recorded spans in the order in which they began."""
        return tuple(sorted(self._spans, key=lambda span: span.start))

    @property
    def steps(self) -> tuple[ProfiledStep, ...]:
        """Return the finished steps of this rank, worked out anew at each call."""
        return steps_of(self.spans, self._start)

    def summary(self) -> str:
        """Return a table of this rank's steps as text: medians over the steps, each figure's apart; then by unit.

        Sends nothing. Other ranks' tables differ: one that is late is waited for by the others.
        """
        steps = self.steps
        where = f"rank {self._comm.rank} of {self._comm.size}"
        if not steps:
            return f"{where}: no step was finished; a step ends when an optimizer of the model has stepped"
        heading = f"{where}, medians of {len(steps)} step{'s' if len(steps) > 1 else ''}"
        heading += ISSUED if self._issued else ""
        tables = [heading, aligned(_part_rows(steps), right=(1, 2)), _hidden_line(steps)]
        units = _unit_rows(steps)
        if units:
            tables.append(aligned(units, right=range(1, len(UNIT_HEADING))))
        return "\n\n".join(tables)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write one trace of all ranks, which https://ui.perfetto.dev and Chrome's about:tracing show.

        Collective. Rank 0 writes, and no rank returns before the file is there. Each rank is a process with the lanes
        compute, wait and communication; gathers and reductions carry their unit's name and bytes. Ranks are put beside
        each other by their hosts' wall clocks: on one host they agree, several hosts as well as their clocks do.

        Args:
            path: the JSON file; one that exists is replaced.

        Raises:
            OSError: on every rank, if rank 0 cannot write the file.

        Each rank sends about 50 bytes per span to rank 0, which holds them all.
        """
        ranks = self._gathered()
        failed: OSError | None = None
        if ranks is not None:
            try:
                Path(path).write_text(json.dumps(trace_of(ranks), separators=(",", ":")), encoding="utf-8")
            except OSError as error:
                failed = error
        told = np.array([failed is not None], np.uint8)
        broadcast(told, self._comm)
        if told[0]:
            raise failed or OSError(f"rank 0 could not write the trace {Path(path)}")

    def _gathered(self) -> list[Any] | None:
        """Return every rank's host and rows for `trace_of` on rank 0, None elsewhere. Collective."""
        rows = [
            (span.kind, span.unit, self._nanoseconds(span.start), self._nanoseconds(span.stop), span.nbytes)
            for span in self.spans
        ]
        own = np.frombuffer(json.dumps([platform.node(), rows]).encode(), np.uint8).copy()
        lengths = [int(length) for length in all_gather(np.array([own.size], np.int64), self._comm)]
        joined = gather(own, self._comm, counts=lengths)
        if joined is None:
            return None
        parts = np.split(joined, np.cumsum(lengths)[:-1])
        return [json.loads(part.tobytes()) for part in parts]

    def _nanoseconds(self, moment: float) -> int:
        """Return a moment of `time.perf_counter` in nanoseconds of the host's wall clock."""
        return self._wall + round((moment - self._start) * 1e9)


def _clocks() -> tuple[float, int]:
    """Return the seconds of `perf_counter` and the wall clock's nanoseconds of the same moment.

    Of several readings the one that took least: a rank that is put off its core between the two would be shifted.
    """
    found = []
    for _ in range(5):
        before, wall, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        found.append((after - before, before, wall))
    _, start, wall = min(found)
    return start, wall


def _part_rows(steps: Sequence[ProfiledStep]) -> list[list[str]]:
    whole = median(step.seconds for step in steps)
    rows = [["", "ms", "% of step"]]
    for label, field in PARTS.items():
        seconds = median(getattr(step, field) for step in steps)
        rows.append([label, f"{seconds * 1e3:.2f}", f"{100 * seconds / whole:.1f}"])
    return rows


def _hidden_line(steps: Sequence[ProfiledStep]) -> str:
    shares = [step.hidden_share for step in steps if not math.isnan(step.hidden_share)]
    return f"share of communication hidden: {100 * median(shares):.1f}%" if shares else "no communication"


def _unit_rows(steps: Sequence[ProfiledStep]) -> list[list[str]]:
    """Return the table by unit, in the order in which the units first met other ranks; empty if none did."""
    units = list(dict.fromkeys(unit for step in steps for unit in step.units))
    rows = []
    for unit in units:
        found = [step.units.get(unit) for step in steps]
        rows.append([unit or "(no unit)", *_figures(found)])
    return [[*UNIT_HEADING], *rows] if rows else []


def _figures(found: Sequence[UnitTraffic | None]) -> list[str]:
    """Return a unit's medians over steps, None being a step in which it had no traffic."""

    def middle(field: str) -> float:
        return median(getattr(traffic, field) if traffic else 0 for traffic in found)

    return [
        f"{middle('gathers'):g}",
        f"{middle('gathered_bytes') / MIB:.2f}",
        f"{middle('reductions'):g}",
        f"{middle('reduced_bytes') / MIB:.2f}",
        f"{middle('waited') * 1e3:.2f}",
    ]
