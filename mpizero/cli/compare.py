"""Judge what the ranks of `mpizero verify` wrote: same bits at every stage and rank, close to one process.

Works on arrays alone, so that it can be tested on results that are wrong on purpose.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BOUNDS", "Difference", "Results", "Row", "compare", "read"]

Arrays = dict[str, "np.ndarray[Any, Any]"]

BOUNDS = {("SGD", "fp32"): 1e-5, ("AdamW", "fp32"): 1e-3}
"""Largest norm of the difference from one process over the norm, per tensor, by optimizer and precision.

AdamW divides by the gradient's size, so that rounding in a gradient near zero moves an element as far as any gradient
would. In bf16 the difference is the precision's own and has no bound here.
"""


@dataclass(frozen=True, kw_only=True)
class Results:
    """Hold what one number of ranks made of the model."""

    trained: dict[tuple[str, str, int], Arrays]
    """Tensors by name, for each (optimizer, precision, stage)."""

    differing: dict[tuple[str, str, int], list[str]]
    """Names of the tensors that are not the same bytes on every rank."""

    alone: dict[str, Arrays]
    """For each optimizer, what one process makes of the joined batches in fp32."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Hold the largest difference from one process of any tensor."""

    relative: float
    """Norm of the difference over the norm."""

    name: str
    bound: float | None

    @property
    def passed(self) -> bool:
        """Return whether it is a number (not NaN) within the bound."""
        return self.relative <= (float("inf") if self.bound is None else self.bound)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold the verdict on one stage at one precision and number of ranks."""

    ranks: int
    precision: str
    stage: int
    compared_to: int
    """The stage that the bytes were compared with."""

    differs_from_stage: str
    """The first tensor whose bytes differ from that stage's, with its optimizer; "" where all are equal."""

    differs_on_ranks: str
    """The first tensor whose bytes are not the same on every rank; "" where all are."""

    one_process: dict[str, Difference]
    """By optimizer."""

    @property
    def passed(self) -> bool:
        """Return whether all is as it should be."""
        same = not self.differs_from_stage and not self.differs_on_ranks
        return same and all(difference.passed for difference in self.one_process.values())

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON holds it; a difference that is no number becomes null."""
        found = {**asdict(self), "passed": self.passed}
        for name, difference in self.one_process.items():
            found["one_process"][name]["passed"] = difference.passed
            if not np.isfinite(difference.relative):
                found["one_process"][name]["relative"] = None
        return found


def read(entries: Mapping[str, np.ndarray[Any, Any]]) -> Results:
    """Return the results in a file that `mpizero.testing.parity` wrote; its docstring tells the names."""
    trained: dict[tuple[str, str, int], Arrays] = {}
    differing: dict[tuple[str, str, int], list[str]] = {}
    alone: dict[str, Arrays] = {}
    for entry, value in entries.items():
        kind, optimizer, rest = entry.split("/", 2)
        if kind == "one":
            alone.setdefault(optimizer, {})[rest] = value
            continue
        precision, stage, *name = rest.split("/", 2)
        key = (optimizer, precision, int(stage))
        if kind == "differ":
            differing[key] = value.tolist()
        else:
            trained.setdefault(key, {})[name[0]] = value
    return Results(trained=trained, differing=differing, alone=alone)


def compare(results: Results, ranks: int, precisions: Sequence[str], stages: Sequence[int]) -> list[Row]:
    """Return the rows of one number of ranks: stage 0, or else the first one, is what the others are compared with."""
    base = 0 if 0 in stages else stages[0]
    return [_row(results, ranks, (precision, stage), base) for precision in precisions for stage in stages]


def _row(results: Results, ranks: int, case: tuple[str, int], base: int) -> Row:
    precision, stage = case
    optimizers = [key[0] for key in results.trained if key[1:] == case]
    from_stage, on_ranks = "", ""
    one_process = {}
    for optimizer in optimizers:
        key = (optimizer, precision, stage)
        found, wanted = results.trained[key], results.trained[optimizer, precision, base]
        from_stage = from_stage or _labelled(optimizer, _first_unequal(found, wanted))
        on_ranks = on_ranks or _labelled(optimizer, next(iter(results.differing[key]), ""))
        one_process[optimizer] = _largest(found, results.alone[optimizer], BOUNDS.get((optimizer, precision)))
    return Row(
        ranks=ranks,
        precision=precision,
        stage=stage,
        compared_to=base,
        differs_from_stage=from_stage,
        differs_on_ranks=on_ranks,
        one_process=one_process,
    )


def _labelled(optimizer: str, name: str) -> str:
    return f"{name} ({optimizer})" if name else ""


def _first_unequal(found: Arrays, wanted: Arrays) -> str:
    """Return the first name whose shape, dtype or bytes differ, or that only one of the two has."""
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found or name not in wanted:
            return name
        left, right = found[name], wanted[name]
        if (left.shape, left.dtype) != (right.shape, right.dtype) or left.tobytes() != right.tobytes():
            return name
    return ""


def _largest(found: Arrays, wanted: Arrays, bound: float | None) -> Difference:
    """Return the largest relative difference; a missing tensor, another shape or a NaN counts as infinite."""
    worst = Difference(relative=0.0, name="", bound=bound)
    for name in dict.fromkeys([*wanted, *found]):
        alike = name in found and name in wanted and found[name].shape == wanted[name].shape
        relative = _relative(found[name], wanted[name]) if alike else float("inf")
        if relative > worst.relative or not worst.name:
            worst = Difference(relative=relative, name=name, bound=bound)
    return worst


def _relative(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    difference = float(np.linalg.norm(found.astype(np.float64).ravel() - wanted.astype(np.float64).ravel()))
    size = float(np.linalg.norm(wanted.astype(np.float64).ravel()))
    if difference == 0:
        return 0.0
    relative = difference / size if size else float("inf")
    return relative if np.isfinite(relative) else float("inf")
