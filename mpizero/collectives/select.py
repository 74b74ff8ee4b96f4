"""Choose an algorithm, its pieces and the segment in which it works, from what all ranks know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mpizero.collectives.execute import IN_FLIGHT, SCRATCH
from mpizero.collectives.registry import LOADS, NATIVE, OPERATIONS, Algorithm, algorithm, algorithms_of
from mpizero.collectives.tuned import Choice, Table
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from mpizero.arrays import DType
    from mpizero.collectives.links import Cluster
    from mpizero.collectives.schedule import Schedule

__all__ = ["Case", "Decision", "by_messages", "choose", "cluster_of", "decide", "native_can", "pieces_of", "segment_of"]

SMALL = 16 << 10
"""Bytes under which the MPI library's own collective is the quickest over messages: it posts no Python per message."""
MANY = 16
"""Ranks beyond which a message to every peer at once is no longer a good idea, and neighbours are used instead."""
PIECE = 256 << 10
"""Bytes of one piece of a pipelined algorithm, about: far above a message's latency on any wire."""
MOST_PIECES = 8
SEGMENTS = 8
SHORTEST = 128 << 10
"""Bytes of a segment of a chunk between hosts, at least."""
MODELLED = 64
"""Ranks up to which the cost model is asked: it builds every rank's schedule of every algorithm."""
GAMMA = 0.15e-9
COPY = 0.1e-9
POST = 4e-6
"""Seconds per byte reduced and copied, and per message posted: of one core of the machine in benchmarks/results."""

_LARGE = {"all_reduce": "direct", "reduce_scatter": "direct", "all_gather": "direct", "all_to_all": "direct"}
_LARGE_MANY = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "pairwise"}
_OTHER = {"broadcast": "tree", "reduce": "tree", "barrier": "dissemination", "gather": "direct", "scatter": "direct"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hold what a choice depends on; equal on all ranks."""

    size: int
    nbytes: int
    """Bytes of the whole buffer."""
    dtype: DType
    op: str = "sum"
    strict: bool = False
    """Whether the canonical order of summation is asked for."""
    even: bool = True
    """Whether chunks are cut evenly, so that all ranks know all lengths."""
    native: bool = False
    """Whether there is a native collective."""
    board: bool = False
    """Whether all ranks share a board, on one host."""
    root: int = 0
    nodes: tuple[int, ...] = ()
    """The node number of each rank."""
    notes: dict[Any, Any] = field(default_factory=dict)
    """What is remembered of the communicator; a measured table lies under `tuned`."""


class Decision(NamedTuple):
    """Name an algorithm, and say why it was taken."""

    name: str
    why: str


def choose(operation: str, requested: str, case: Case) -> str:
    """Return the name of the algorithm to use; see `decide`."""
    return decide(operation, requested, case).name


def decide(operation: str, requested: str, case: Case) -> Decision:
    """Return the algorithm to use.

    Args:
        operation: the collective's name.
        requested: what the caller asked for; `auto` leaves it to us.
        case: what it is to be used for.

    Raises:
        ArgumentError: for an unknown algorithm, or one that cannot do what is asked; lists those that can.
    """
    if requested == "auto":
        return _auto(operation, case)
    if requested == NATIVE:
        _check_native(operation, case)
        return Decision(NATIVE, "asked for")
    if requested == LOADS:
        if case.size == 1:
            return by_messages(operation, case)
        _check_loads(operation, case)
        return Decision(LOADS, "asked for")
    entry = algorithm(operation, requested)
    if not _order_fits(entry, case):
        names = ", ".join(_names(operation, case))
        rule = f"one that sums in canonical order on {case.size} ranks ({names})"
        raise ArgumentError(must_be("algorithm", rule, requested, "or pass order='any'"))
    if not case.even and not entry.uneven:
        names = ", ".join(_names(operation, case))
        raise ArgumentError(must_be("algorithm", f"one that takes uneven counts ({names})", requested))
    return Decision(entry.name, "asked for")


def _check_native(operation: str, case: Case) -> None:
    if _native_allowed(operation, case):
        return
    order = "canonical" if case.strict else "any"
    got = f"native for {operation} of {case.dtype.name}, op {case.op}, order {order}, {case.nbytes} bytes"
    names = ", ".join(_names(operation, case))
    raise ArgumentError(must_be("algorithm", "one that can do this", got, f"choose one of {names}"))


def _check_loads(operation: str, case: Case) -> None:
    if case.board:
        return
    got = f"loads for ranks that share no memory, on {len(set(case.nodes))} hosts"
    names = ", ".join(_names(operation, case))
    raise ArgumentError(must_be("algorithm", "one that can do this", got, f"choose one of {names}"))


def _auto(operation: str, case: Case) -> Decision:
    choice = _tuned(operation, case)
    if choice is not None and _can(operation, choice.algorithm, case):
        return Decision(choice.algorithm, f"the quickest of those measured at {choice.nbytes} bytes (mpizero tune)")
    if case.board:
        return Decision(LOADS, "all ranks are on one host and reach each other's memory")
    return by_messages(operation, case)


def _can(operation: str, name: str, case: Case) -> bool:
    """Return whether an algorithm of a table can do this call."""
    try:
        decide(operation, name, case)
    except ArgumentError:
        return False
    return True


def by_messages(operation: str, case: Case) -> Decision:
    """Return the algorithm to use where memory cannot be shared."""
    if _native_allowed(operation, case) and case.nbytes <= SMALL and operation != "barrier":
        return Decision(NATIVE, f"at most {SMALL} bytes, where the MPI library's own is the quickest over messages")
    if "links" in case.notes and case.size <= MODELLED and operation != "barrier":
        return _by_cost(operation, case)
    strict = _is_strict(operation, case)
    if _by_nodes(operation, case) and 1 < len(set(case.nodes)) < case.size:
        entry = algorithm(operation, "hierarchical")
        if _order_fits(entry, case) and (case.even or entry.uneven):
            return Decision(entry.name, "several ranks on each of several hosts")
    many = case.size > MANY and not strict
    name = (_LARGE_MANY if many else _LARGE).get(operation) or _OTHER[operation]
    return Decision(name, f"{case.size} ranks, links not measured")


def _by_nodes(operation: str, case: Case) -> bool:
    """Return whether to compose within and between nodes, unasked: a ring has as many rounds as there are ranks.

    Not for a reduce-scatter: to see that its order is the canonical one takes minutes on thousands of ranks.
    """
    return operation == "all_reduce" or (operation == "all_gather" and case.size > MODELLED)


def _by_cost(operation: str, case: Case) -> Decision:
    """Return the cheapest algorithm by the cost model, reckoned once for each power of two of bytes."""
    bucket = 1 << max(case.nbytes - 1, 1).bit_length()
    halves = case.dtype.is_half and OPERATIONS[operation].reduces
    key = ("cost", operation, bucket, _is_strict(operation, case), case.even, halves)
    if key not in case.notes:
        from mpizero.collectives.cost import cost  # needed where links were measured alone

        cluster = cluster_of(case)
        itemsize = 2 if halves else 4
        times = {}
        for name in _names(operation, case):
            pieces = pieces_of(operation, name, case)
            times[name] = cost(operation, name, cluster, bucket, pieces=pieces, itemsize=itemsize).seconds
        best = min(times, key=lambda name: times[name])
        case.notes[key] = Decision(best, f"the cost model says {times[best] * 1e6:.0f} us for {bucket} bytes")
    decision: Decision = case.notes[key]
    return decision


def cluster_of(case: Case) -> Cluster:
    """Return the cluster that the measured links describe; links that were not measured are as the others."""
    from mpizero.collectives.links import Cluster, Link, fit

    points = case.notes.get("links", {})
    known = {kind: fit(found) for kind, found in points.items() if found}
    fallback = next(iter(known.values()), Link(alpha=20e-6, beta=1e-9))
    return Cluster(
        size=case.size,
        nodes=case.nodes or (0,) * case.size,
        local=known.get("local", fallback),
        remote=known.get("remote", fallback),
        gamma=GAMMA,
        copy=COPY,
        post=POST,
    )


def _tuned(operation: str, case: Case) -> Choice | None:
    """Return the measured choice for a call, if there is a table of this machine."""
    text = case.notes.get("tuning")
    if not text:
        return None
    if "table" not in case.notes:
        table = Table.loads(text)
        case.notes["table"] = table if table.machine == case.notes.get("machine") else None
    found: Table | None = case.notes["table"]
    if found is None:
        return None
    strict = _is_strict(operation, case)
    return found.find(operation, case.nodes, case.dtype.name, strict=strict, nbytes=case.nbytes)


def _native_allowed(operation: str, case: Case) -> bool:
    allowed = case.native and case.nbytes < 1 << 31 and native_can(operation, case.dtype, case.op)
    return allowed and not _is_strict(operation, case)


def _is_strict(operation: str, case: Case) -> bool:
    """Return whether the order of summation both matters and is fixed."""
    return case.strict and OPERATIONS[operation].reduces and case.dtype.kind not in "iub"


def _order_fits(entry: Algorithm, case: Case) -> bool:
    if not _is_strict(entry.operation, case):
        return True
    pieces = pieces_of(entry.operation, entry.name, case)
    return entry.is_canonical(case.size, case.root, nodes=case.nodes, pieces=pieces)


def native_can(operation: str, dtype: DType, op: str) -> bool:
    """Return whether MPI's own collective gives the results that the verbs promise.

    It moves anything, and reduces integers; of floats only sums and products in 32 and 64 bits: no MPI here has a
    bfloat16, all accumulate fp16 in fp16, and max and min of NaN differ from rank to rank.
    """
    if not OPERATIONS[operation].reduces:
        return True
    if dtype.is_half or dtype.kind == "b":
        return False
    return dtype.kind in "iu" or op in {"sum", "mean", "prod"}


def pieces_of(operation: str, name: str, case: Case) -> int:
    """Return in how many pieces a pipelined algorithm cuts each part; 1 for those that take none.

    That is the number that was measured to be best, or the power of two that makes pieces of `PIECE` bytes or more.
    """
    if algorithm(operation, name).takes != "pieces":
        return 1
    choice = _tuned(operation, case)
    if choice is not None and choice.algorithm == name:
        return choice.pieces
    part = case.nbytes // case.size if name == "segmented_ring" else case.nbytes // 2
    pieces = 1
    while pieces < MOST_PIECES and part // (2 * pieces) >= PIECE:
        pieces *= 2
    return pieces


def segment_of(schedule: Schedule, widths: tuple[int, int], longest: int, *, hosts: int) -> int:
    """Return the elements of a chunk to work on at a time; equal on all ranks. See [Note: segments] in `execute`.

    Args:
        schedule: rank 0's; the slots are equal on all ranks, and a test holds builders to that.
        widths: bytes of an element, and of an accumulated one.
        longest: elements of the longest chunk.
        hosts: on how many hosts the ranks are: between several, a chunk is cut in `SEGMENTS` or as many as are worth
            it, so that what ranks do on a host overlaps what is on the wire.
    """
    slots = schedule.raw_slots * widths[0] + schedule.acc_slots * widths[1]
    room = SCRATCH // IN_FLIGHT // slots // 64 * 64 if slots else 1 << 62
    if hosts > 1:
        room = min(room, max(-(-longest // SEGMENTS), SHORTEST // widths[0]))
    return max(1, room)


def _names(operation: str, case: Case) -> list[str]:
    return [
        entry.name for entry in algorithms_of(operation) if _order_fits(entry, case) and (case.even or entry.uneven)
    ]
