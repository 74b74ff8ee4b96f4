"""What a training job shows while it runs, and says at its end."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero as mz
from mpizero.plan import sent_per_step
from mpizero.settings import settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Progress", "mib"]


class Progress:
    """Show loss, tokens per second, waiting and memory on rank 0: a bar on a terminal, else a line every so often.

    Used as a context manager around the training loop; every rank calls `step` after each of its steps.
    """

    def __init__(self, model: Any, optimizer: Any, *, steps: int) -> None:
        """Watch a sharded model and its optimizer for `steps` steps."""
        self.model, self.optimizer, self.steps = model, optimizer, steps
        self.comm = mz.world()
        self.live = self.comm.rank == 0 and _on_terminal(self.comm.size)
        self.done = 0
        self.tokens = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Start the clocks."""
        self.start = time.perf_counter()
        self.before = mz.stats(self.model).copy()
        self._moved_before = self._moved()
        if self.live:
            self._open_bar()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the clocks."""
        self.seconds = time.perf_counter() - self.start
        self.traffic = mz.stats(self.model).since(self.before)
        if self._bar is not None:
            self._bar.stop()

    def step(self, loss: Any, *, tokens: int) -> None:
        """Count a step with this rank's loss and number of tokens. Collective every few steps."""
        self.done += 1
        if self.done == 1:
            self._first = mz.stats(self.model).copy()
        self.tokens += tokens * self.comm.size
        if self.done % self._interval() and self.done != self.steps:
            return
        mean = float(mz.all_reduce(np.array([float(loss.detach())]), op="mean")[0])
        if self.comm.rank != 0:
            return
        elapsed = time.perf_counter() - self.start
        waiting = mz.stats(self.model).since(self.before).wait_seconds / elapsed
        held = mz.memory_report(self.model, self.optimizer).measured.total
        facts = f"loss {mean:.3f}  {self.tokens / elapsed:,.0f} tokens/s  waiting {waiting:.0%}  {mib(held)}/rank"
        for where, moved in self._moved_per_step().items():
            facts += f"  {where} {mib(moved)}/step"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, facts=facts)
        else:
            print(f"step {self.done:>5}/{self.steps}  {facts}", flush=True)

    def summary(self, first: float, last: float) -> None:
        """Print, on rank 0, what the run came to.

        Args:
            first: validation loss before the first step.
            last: validation loss after the last one.
        """
        if self.comm.rank == 0 and self.done:
            print("\n".join(["", *self._summary(first, last)]), flush=True)

    def _moved(self) -> dict[str, int]:
        """Return the bytes that this rank has moved: from disks and to them, and between a GPU and the host."""
        from mpizero.shard import runtime_of  # as in `_summary`

        spill = runtime_of(self.model).spill
        return {} if spill is None else {"disk": spill.moved, "host": spill.copied}

    def _moved_per_step(self) -> dict[str, float]:
        return {where: (n - self._moved_before[where]) / self.done for where, n in self._moved().items() if n}

    def _interval(self) -> int:
        """Return every how many steps the ranks meet to average the loss: the same on all of them."""
        return max(1, self.steps // 15)

    def _sent_per_step(self) -> float:
        """Return the bytes that this rank sent per step, of whole steps.

        The first one may lack a gather: at stages 1 and 2 parameters are refreshed in the forward after a step, and the
        first forward finds those that an evaluation before it has filled.
        """
        if self.done == 1:
            return self.traffic.bytes_moved
        return (self.before.bytes_moved + self.traffic.bytes_moved - self._first.bytes_moved) / (self.done - 1)

    def _summary(self, first: float, last: float) -> list[str]:
        from mpizero.shard import runtime_of  # loads torch, which `mpizero --help` does without

        runtime = runtime_of(self.model)
        report = mz.memory_report(self.model, self.optimizer)
        ranks, stage = self.comm.size, runtime.lifetime.stage
        flats = [flat for unit in runtime.units for flat in unit.trainable]
        theory = sum(_theory(unit, flat) for unit in runtime.units for flat in unit.trainable)
        sent = self._sent_per_step()
        share = f"{(sent / theory - 1):+.1%}" if theory else "none"
        numel = sum(flat.layout.numel for flat in flats)
        speed = f"{self.seconds / self.done * 1e3:.0f} ms, {self.tokens / self.seconds:,.0f} tokens/s"
        waiting = f"{self.traffic.wait_seconds / self.seconds:.0%} of it waiting for communication (rank 0)"
        lines = [
            f"stage {stage} on {ranks} ranks, {self.done} steps, {numel:,} parameters",
            f"  validation loss     {first:.3f} -> {last:.3f}",
            f"  step                {speed}, {waiting}",
            f"  sent per step       {mib(sent)} per rank; theory {mib(theory)} ({share})",
            "  bytes per rank      measured    formula",
        ]
        for kind in ("parameters", "gradients", "optimizer", "total"):
            measured, formula = getattr(report.measured, kind), getattr(report.formula, kind)
            lines.append(f"    {kind:<16} {mib(measured):>11} {mib(formula):>10}")
        if report.node_shared:
            lines.append(
                f"    the node holds one copy of the parameters; its {ranks} ranks are charged their part of it"
            )
        if report.on_disk:
            lines.append(
                f"    {mib(report.on_disk)} more are on disk; {mib(self._moved_per_step()['disk'])} of "
                "them were read or written per step"
            )
        if report.on_host:
            lines.append(
                f"    {mib(report.on_host)} more are in host memory; {mib(self._moved_per_step()['host'])} were copied "
                "between it and the GPU per step"
            )
        if report.room:
            lines.append(f"    {mib(report.room)} more are room for gradients that wait for their reduction")
        if runtime.lifetime.release_parameters:
            lines.append(f"    while running, up to two gathered units of {mib(report.unit_buffers)} each come on top")
        return lines

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        self._bar = Bar(*columns, console=Console(force_terminal=True))
        self._task = self._bar.add_task("train", total=self.steps, facts="")
        self._bar.start()


def _theory(unit: Any, flat: Any) -> float:
    """Return the bytes that a rank sends per step for one flat buffer of a unit, by the stage's formula."""
    lifetime, width, gathers = flat.lifetime, flat.full.element_size(), 1 if unit.keep else 2
    numel, ranks, shared = flat.layout.numel, flat.comm.size, lifetime.shared
    return sent_per_step(numel, ranks, lifetime.stage, working_bytes=width, gathers=gathers, node_shared=shared)


def _on_terminal(ranks: int) -> bool:
    """Return whether rank 0's output is shown on a terminal.

    Open MPI gives its ranks a pseudo-terminal wherever its own output goes, so under a launcher only `bin/mzrun`'s word
    counts.
    """
    return settings().terminal or (ranks == 1 and sys.stdout.isatty())


def mib(nbytes: float) -> str:
    """Return bytes as text in the unit that fits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
