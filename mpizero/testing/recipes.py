"""Calls of collectives drawn at random: what to call, on which kind of arrays; `servings` makes the arrays and checks.

A recipe says nothing of ranks: a root is taken modulo the number of ranks and the lengths of uneven parts are as many
as there are ranks. So the ranks of several communicators, of different sizes, can all be given the same one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar

from mpizero.arrays import DTYPES
from mpizero.collectives import OPERATIONS
from mpizero.collectives.registry import names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["IN_PLACE", "LAYOUTS", "MOST_RANKS", "Pick", "Recipe", "draw", "libraries"]

T = TypeVar("T")

MOST_RANKS = 8
"""Ranks for which a recipe has lengths."""
LAYOUTS = ("flat", "strided", "fortran", "backwards")
GIVEN, IN_PLACE = "given", "in place"
TARGETS = ("", GIVEN, IN_PLACE)
"""Where a result goes: where the verb puts it by itself, into `out`, or into `out` that is the input or its chunk."""
SIZES = (0, 1, 2, 3, 7, 8, 13, 64, 100, 255, 1000, 4097, 20_000)
LENGTHS = (0, 1, 2, 5, 33, 700)
UNEVEN = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
OPS = {
    "f": ("sum", "mean", "max", "min", "prod"),
    "i": ("sum", "max", "min", "prod"),
    "u": ("sum", "max", "min", "prod"),
    "c": ("sum", "mean"),
    "b": ("max", "min"),
}
"""By kind of dtype. Products of complex numbers are left out: theirs are exact in no order that numpy would follow."""


class Pick(Protocol):
    """Choose one of several values: `random.Random(seed).choice`, or a draw of hypothesis."""

    def __call__(self, options: Sequence[T], /) -> T:
        """Return one of `options`, which are at least one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Say which collective to call, and on what."""

    operation: str
    """A key of OPERATIONS."""
    algorithm: str
    """One of `names_of(operation)`; one that cannot do the call is replaced by `auto` when it is made."""
    dtype: str
    """A key of DTYPES."""
    op: str = "sum"
    order: str = "any"
    count: int = 0
    """Elements of the whole, of a rank's part or of one of its parts, as the operation has it."""
    root: int = 0
    """Taken modulo the number of ranks."""
    layout: str = "flat"
    """One of LAYOUTS: how x and out lie in memory."""
    target: str = ""
    """One of TARGETS."""
    lengths: tuple[int, ...] = ()
    """Elements of uneven parts for `MOST_RANKS` ranks; none where they are even."""
    library: str = "numpy"
    """numpy or torch."""
    symmetric: bool = False
    """Whether x lies in memory of `mpizero.empty`; for flat arrays of the same size on all ranks alone."""
    key: int = 0
    """What the values are made from."""


def libraries() -> tuple[str, ...]:
    """Return the libraries whose arrays can be drawn here."""
    there = sys.modules.get("torch", 0) is not None and find_spec("torch") is not None
    return ("numpy", "torch") if there else ("numpy",)


def draw(pick: Pick, *, kinds: Sequence[str] = ("numpy",)) -> Recipe:
    """Return a recipe.

    Args:
        pick: makes each choice; the plain values come first, which is where hypothesis shrinks to.
        kinds: libraries to choose from, see `libraries`.
    """
    operation = pick(tuple(OPERATIONS))
    algorithm = pick(names_of(operation))
    if operation == "barrier":
        return Recipe(operation=operation, algorithm=algorithm, dtype="uint8")
    library = pick(kinds)
    dtype = pick([name for name in DTYPES if _has(library, name)])
    reduces = OPERATIONS[operation].reduces
    uneven = operation in UNEVEN and pick((False, True))
    target = pick(TARGETS)
    layout = pick(LAYOUTS)
    symmetric = layout == "flat" and not uneven and pick((False, False, False, True))
    return Recipe(
        operation=operation,
        algorithm=algorithm,
        dtype=dtype,
        op=pick(OPS[DTYPES[dtype].kind]) if reduces else "sum",
        order=pick(("any", "canonical")) if reduces else "any",
        count=pick(SIZES),
        root=pick(range(MOST_RANKS)) if OPERATIONS[operation].rooted else 0,
        layout="flat" if target == IN_PLACE and _is_chunked(operation) else layout,
        target=target,
        lengths=tuple(pick(LENGTHS) for _ in range(MOST_RANKS)) if uneven else (),
        library=library,
        symmetric=symmetric and operation in {"all_reduce", "reduce_scatter", "reduce", "broadcast"},
        key=pick(range(64)),
    )


def _is_chunked(operation: str) -> bool:
    """Return whether in place means a chunk of the whole, which must lie in one piece."""
    return "chunk" in {OPERATIONS[operation].input, OPERATIONS[operation].output}


def _has(library: str, dtype: str) -> bool:
    """Return whether a library has a type of number; torch's wider unsigned ones can do next to nothing."""
    return dtype != "bfloat16" if library == "numpy" else dtype not in {"uint16", "uint32", "uint64"}
