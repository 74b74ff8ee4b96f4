"""The figures that GPUs are to reach, and whether a measured one does."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BARS", "Bar", "verdict"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Say what a figure is and what it should come to."""

    what: str
    bar: float
    unit: str = ""
    at_most: bool = False
    """Whether the figure must not exceed the bar; else it must reach it."""
    aim: float | None = None

    def text(self) -> str:
        """Return the bar as a table shows it."""
        aim = f", aim {self.aim:g}" if self.aim is not None else ""
        return f"{'at most ' if self.at_most else ''}{self.bar:g}{self.unit}{aim}"


def _loads(ranks: int) -> Bar:
    what = f"loads, {ranks} ranks on one GPU, 1 GiB fp32 all_reduce: the same work by one process over our time"
    return Bar(what=what, bar=0.6, aim=0.8)


def _against(size: str) -> Bar:
    return Bar(what=f"all_reduce by loads, {size}, over the MPI library's own on host copies", bar=30, unit=" x")


def _kernel(what: str) -> Bar:
    return Bar(what=f"kernel, {what}: bytes per second over a device-to-device copy", bar=0.85)


BARS = {
    "loads-2": _loads(2),
    "loads-4": _loads(4),
    "staged": Bar(what="staged, 2 ranks, 256 MiB: time over its longest part alone", bar=1.2, at_most=True),
    "against-64M": _against("64 MiB"),
    "against-256M": _against("256 MiB"),
    "kernel-sum-float32": _kernel("2 sources into 1, fp32"),
    "kernel-sum-bfloat16": _kernel("2 sources into 1, bf16"),
    "kernel-copy-float32": _kernel("1 source into 1, fp32"),
    "stages-fp32": Bar(what="stages 1 to 3, fp32: tensors that differ from stage 0 in a bit", bar=0, at_most=True),
    "stages-bf16": Bar(what="stages 1 to 3, bf16: tensors that differ from stage 0 in a bit", bar=0, at_most=True),
    "offload-fp32": Bar(what="state on the host, stages 1 to 3, fp32: tensors that differ", bar=0, at_most=True),
    "offload-bf16": Bar(what="state on the host, stages 1 to 3, bf16: tensors that differ", bar=0, at_most=True),
    "losses-fp32": Bar(what="losses, fp32: largest relative distance from the CPU's", bar=1e-4, at_most=True),
    "losses-bf16": Bar(what="losses, bf16: largest relative distance from the CPU's", bar=3e-2, at_most=True),
}
"""By name, in the order in which they are shown."""


def verdict(name: str, value: float | None, wrong: int | None) -> str:
    """Return `reached`, `missed`, `wrong results` or `not measured`.

    Args:
        name: a key of BARS.
        value: what was measured, None where nothing was.
        wrong: wrong elements in the results, None where there was nothing to check.
    """
    if wrong:
        return "wrong results"
    if value is None:
        return "not measured"
    bar = BARS[name]
    return "reached" if (value <= bar.bar if bar.at_most else value >= bar.bar) else "missed"
