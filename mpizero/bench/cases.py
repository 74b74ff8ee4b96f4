"""What a microbenchmark measures: the plan that the command line asks for, and its cases.

Nothing here knows MPI, so that a plan is checked before MPI is started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from mpizero.arrays import dtype_named
from mpizero.collectives import OPERATIONS
from mpizero.collectives.registry import LOADS, NATIVE
from mpizero.settings import DEVICE_WIRES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "COPIES",
    "COPY",
    "CPU",
    "DEVICES",
    "LIMIT_FROM",
    "NO_OP",
    "PEERS",
    "Case",
    "Plan",
    "cases_of",
    "shuffled",
    "wires_of",
]

COPY = "copy"
"""The name under which the memory limit is measured: every rank copies S bytes at the same time."""
LIMIT_FROM = 1 << 20
"""Bytes from which the memory limit is measured: below, a copy stays in cache and says nothing of memory."""
NO_OP = "none"
"""What stands for the reduction of an operation that reduces nothing."""
PEERS = ("gloo", "mpi4py")
"""What may be measured beside mpizero in the same run."""
CPU = "cpu"
DEVICES = (CPU, "cuda", "stand-in")
"""Where buffers may lie. The stand-in is a GPU that the host plays: its figures mean nothing, its results do."""
COPIES = "copies"
"""The wire of a peer on device memory: all bytes copied to the host, its own collective there, all copied back."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what the command line asks for, checked."""

    operation: str
    sizes: tuple[int, ...]
    """Bytes asked for, ascending; a case has as many as its element type and the number of ranks allow."""
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    """Reductions; (NO_OP,) where the operation reduces nothing."""
    root: int = 0
    algorithms: tuple[str, ...] = ("auto",)
    every: bool = False
    """Whether `algorithms` came from the word `all`: those that cannot do a case are then left out of it."""
    buffers: tuple[str, ...] = ("private",)
    device: str = CPU
    """One of DEVICES."""
    wires: tuple[str, ...] = ("",)
    """For device memory, out of `settings.DEVICE_WIRES`; ("",) for host memory."""
    every_wire: bool = False
    """Whether `wires` came from the word `all`: those that there are not are then left out."""
    order: str = "any"
    prepared: bool = False
    """Whether each case of mpizero's is measured as a prepared collective too."""
    versus: tuple[str, ...] = ()
    """Names out of PEERS."""
    iterations: int = 20
    warm_up: int = 5
    check: bool = True
    budget: float | None = None
    """Seconds that one case may take, about; None does all iterations."""
    seed: int = 1
    json: str | None = None
    csv: str | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Name one thing to measure."""

    operation: str
    algorithm: str
    """An algorithm of the operation, one of PEERS, or COPY."""
    buffer: str
    """`private`, `symmetric`."""
    wire: str = ""
    """How device memory gets from rank to rank; "" for host memory."""
    prepared: bool
    dtype: str
    op: str
    count: int
    """Elements of the whole array: of all ranks' parts together where an operation has parts, as in nccl-tests."""
    nbytes: int
    """Bytes of the whole array."""


def cases_of(plan: Plan, ranks: int, *, limit: bool) -> list[Case]:
    """Return a plan's cases in the order in which they are shown: by type, reduction, size, then as asked for.

    Args:
        plan: what to measure.
        ranks: number of ranks; sizes of operations with parts are rounded down to a multiple of it.
        limit: whether the memory limit is measured too, once per size from LIMIT_FROM on.
    """
    found: list[Case] = []
    for dtype in plan.dtypes:
        width = dtype_named(dtype).itemsize
        counts = dict.fromkeys(_rounded(plan.operation, size // width, ranks) for size in plan.sizes)
        for op in plan.ops:
            for count in counts:
                nbytes = count * width
                case = Case(operation=plan.operation, algorithm="", buffer="private", prepared=False,
                            dtype=dtype, op=op, count=count, nbytes=nbytes)  # fmt: skip
                found += _ways(plan, case)
                if limit and nbytes >= LIMIT_FROM and op == plan.ops[0]:
                    found.append(replace(case, algorithm=COPY))
    return found


def shuffled(cases: list[Case], seed: int) -> list[Case]:
    """Return the cases in an order that depends on the seed alone, and so is the same on all ranks.

    A drift of the machine, or what a case leaves in caches and pools, then meets algorithms and sizes alike.
    """
    order = list(cases)
    random.Random(seed).shuffle(order)  # noqa: S311  (no secrets here)
    return order


def _ways(plan: Plan, case: Case) -> Iterator[Case]:
    for algorithm in plan.algorithms:
        for wire, buffer in product(wires_of(plan, algorithm), plan.buffers):
            for prepared in (False, True) if plan.prepared else (False,):
                yield replace(case, algorithm=algorithm, buffer=buffer, prepared=prepared, wire=wire)
    for peer in plan.versus:
        yield replace(case, algorithm=peer, wire="" if plan.device == CPU else COPIES)


def wires_of(plan: Plan, algorithm: str) -> tuple[str, ...]:
    """Return the plan's wires that an algorithm can take; the MPI library's own is always staged on device memory."""
    if plan.device == CPU:
        return ("",)
    if algorithm == NATIVE:
        return ("staged",)
    fit = {"auto": DEVICE_WIRES, LOADS: ("auto", "loads")}.get(algorithm, ("auto", "messages", "staged"))
    return tuple(wire for wire in plan.wires if wire in fit)


def _rounded(operation: str, count: int, ranks: int) -> int:
    """Return the elements to use for `count`: at least one, and as many for each rank where there are parts."""
    traits = OPERATIONS[operation]
    whole = {"whole", "root"}
    unit = 1 if {traits.input, traits.output} <= whole else ranks
    return max(count // unit, 1) * unit
