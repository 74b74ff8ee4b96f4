"""The collectives that users call.

All have one form: `verb(x, comm=None, *, op=..., out=None, algorithm="auto", order="any", async_op=False)`. `x` is a
numpy array, a torch tensor or a CuPy array of any shape and strides, on the host or on a GPU alike on all ranks; the
result is of the same library and dtype, has the same bits on every rank that gets it, and lies in `x` itself or in
`out`. Sizes need not divide by the number of ranks: chunk i of n elements is [i*n//p, (i+1)*n//p), unless `counts`
gives the chunks' lengths. Every rank must make the same call with the same shape and dtype, in the same order.

With `async_op=True` a verb returns a `Work` at once; its `wait()` gives the result, its `done()` says whether it is
there. The buffers belong to it until then. Calls on one communicator run in the order in which they were made. On a GPU
a call takes its place in the caller's current streams: see docs/gpu.md.

Algorithms: `auto` chooses; `loads` reads and writes the peers' memory (ranks of one host); `native` is the MPI
library's own; the others are schedules over messages, which docs/algorithms.md compares.

Errors raised before anything is sent, alike on all ranks that pass alike arguments: `ArgumentTypeError` for arrays,
dtypes and reductions that do not go together, `ArgumentError` for unknown names, unfit shapes, read-only and
partly overlapping memory. `CollectiveError` on all ranks of a host where they call different things,
`CollectiveTimeoutError` when a peer does not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.collectives import bind
from mpizero.collectives.quick import quick

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def all_reduce(
    x: Any,
    comm: Any = None,
    *,
    op: str = "sum",
    out: Any = None,
    algorithm: str = "auto",
    order: str = "any",
    async_op: bool = False,
) -> Any:
    """Reduce `x` over all ranks, element by element, and give every rank the result.

    Args:
        x: the rank's part, of any shape; overwritten with the result unless `out` is given.
        comm: the communicator; None means `mpizero.world()`.
        op: sum, mean, max, min or prod. 16-bit floats accumulate in fp32 and are rounded once; max and min propagate
            NaN; a mean divides in fp32 (float64 in float64) before the one rounding and is refused for integers.
        out: an array of x's shape and dtype for the result; `x` itself is allowed, partial overlap is not.
        algorithm: auto, loads, native, or over messages direct, double_tree, halving_doubling, hierarchical, leader,
            ring, segmented_ring or tree.
        order: canonical fixes the order of summation (((0+1)+(2+3))+4), any leaves it
            to the algorithm.
        async_op: whether to return a `Work` at once.

    Returns:
        `x`, or `out`; or a `Work` that gives it.

    Moves 2 S (p-1)/p bytes per rank for S bytes, but for `tree` (at most 2 S log2 p).
    """
    if not async_op and quick("all_reduce", x, comm, out, (algorithm, op, order)):
        return x if out is None else out
    call, result = bind.all_reduce(x, comm, op=op, out=out, order=order)
    return call.start(algorithm, result=result, async_op=async_op)


def reduce_scatter(
    x: Any,
    comm: Any = None,
    *,
    op: str = "sum",
    out: Any = None,
    counts: Sequence[int] | None = None,
    algorithm: str = "auto",
    order: str = "any",
    async_op: bool = False,
) -> Any:
    """Reduce `x` over all ranks and give rank r its chunk r of the result.

    Args:
        x: the rank's part, of n elements in any shape; not changed unless `out` is rank r's chunk of it.
        comm: the communicator; None means `mpizero.world()`.
        op: as of `all_reduce`.
        out: an array of the chunk's number of elements, apart from `x` or exactly its chunk r.
        counts: the elements of each rank's chunk, n in all; None cuts evenly.
        algorithm: auto, loads, native, or over messages direct, halving, hierarchical, pairwise or ring.
        order: as of `all_reduce`.
        async_op: whether to return a `Work` at once.

    Returns:
        `out`, or a new array of shape (elements of chunk r,); or a `Work` that gives it.

    Moves S (p-1)/p bytes per rank.
    """
    plain = out is not None and counts is None and not async_op
    if plain and quick("reduce_scatter", x, comm, out, (algorithm, op, order)):
        return out
    call, result = bind.reduce_scatter(x, comm, op=op, out=out, counts=counts, order=order)
    return call.start(algorithm, result=result, async_op=async_op)


def all_gather(
    x: Any,
    comm: Any = None,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Any:
    """Give every rank the concatenation of all ranks' `x`.

    Args:
        x: the rank's part: equally many elements on all ranks, or, with `out` of n elements, as many as chunk r has.
        comm: the communicator; None means `mpizero.world()`.
        out: the result, of any shape; `x` may be exactly chunk r of it (in place) or apart from it.
        counts: the elements of each rank's part, where they differ.
        algorithm: auto, loads, native, or over messages bruck, direct, doubling, hierarchical, pairwise or ring.
        async_op: whether to return a `Work` at once.

    Returns:
        `out`, or a new array of x's shape but p times as long in dimension 0, with `counts` of shape (their sum,); or a
        `Work` that gives it.

    Moves S (p-1)/p bytes per rank for a result of S bytes.
    """
    if out is not None and counts is None and not async_op and quick("all_gather", x, comm, out, (algorithm,)):
        return out
    call, result = bind.all_gather(x, comm, out=out, counts=counts)
    return call.start(algorithm, result=result, async_op=async_op)


def all_to_all(
    x: Any,
    comm: Any = None,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    out_counts: Sequence[int] | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Any:
    """Send part d of `x` to rank d, and give every rank the parts that were sent to it, in the order of their ranks.

    Args:
        x: what this rank sends: p parts, one after the other; without `counts` they are equally long on all ranks.
        comm: the communicator; None means `mpizero.world()`.
        out: the result, apart from `x`.
        counts: the elements that this rank sends to each rank; may differ from rank to rank.
        out_counts: the elements that it gets from each. None with `counts` given asks the other ranks first, which all
            ranks must then do.
        algorithm: auto, loads, native, or over messages bruck, direct or pairwise; bruck, of few messages, is for equal
            parts alone.
        async_op: whether to return a `Work` at once.

    Returns:
        `out`, or a new array of x's shape, with `counts` of shape (elements that come,); or a `Work` that gives it.

    Moves S (p-1)/p bytes per rank, but for `bruck` (S/2 log2 p).
    """
    plain = out is not None and counts is None and out_counts is None and not async_op
    if plain and quick("all_to_all", x, comm, out, (algorithm,)):
        return out
    call, result = bind.all_to_all(x, comm, out=out, counts=counts, out_counts=out_counts)
    return call.start(algorithm, result=result, async_op=async_op)


def broadcast(x: Any, comm: Any = None, *, root: int = 0, algorithm: str = "auto", async_op: bool = False) -> Any:
    """Give every rank the root's `x`, in place.

    Args:
        x: the buffer, of the same shape and dtype on all ranks; the root's may be read-only.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank whose values are sent.
        algorithm: auto, loads, native, or over messages chain, double_tree, hierarchical, leader, scatter_all_gather or
            tree.
        async_op: whether to return a `Work` at once.

    Returns:
        `x`, or a `Work` that gives it. A rank moves at most S ceil(log2 p) bytes.
    """
    if not async_op and quick("broadcast", x, comm, None, (algorithm, root)):
        return x
    call, result = bind.broadcast(x, comm, root=root)
    return call.start(algorithm, result=result, async_op=async_op)


def reduce(
    x: Any,
    comm: Any = None,
    *,
    root: int = 0,
    op: str = "sum",
    out: Any = None,
    algorithm: str = "auto",
    order: str = "any",
    async_op: bool = False,
) -> Any:
    """Reduce `x` over all ranks and give the root the result.

    Args:
        x: the rank's part, of any shape; on the root overwritten with the result unless `out` is given, elsewhere not
            changed.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank that gets the result.
        op: as of `all_reduce`.
        out: the root's array for the result; ignored elsewhere.
        algorithm: auto, loads, native, or over messages direct, double_tree or tree.
        order: as of `all_reduce`.
        async_op: whether to return a `Work` at once.

    Returns:
        On the root `x` or `out`, elsewhere None; or a `Work` that gives it. A rank other than the root sends S bytes
        for S bytes (of 16-bit floats partial sums travel in fp32: up to 2 S), also with `direct`, whose root sends
        S (p-1)/p.
    """
    call, result = bind.reduce(x, comm, root=root, op=op, out=out, order=order)
    return call.start(algorithm, result=result, async_op=async_op)


def gather(
    x: Any,
    comm: Any = None,
    *,
    root: int = 0,
    out: Any = None,
    counts: Sequence[int] | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Any:
    """Give the root the concatenation of all ranks' `x`.

    Args:
        x: the rank's part: equally many elements on all ranks, unless `counts` says otherwise.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank that gets the result.
        out: the root's array for it, of any shape; `x` may be exactly the root's chunk of it. Ignored elsewhere.
        counts: the elements of each rank's part, where they differ.
        algorithm: auto, loads, native, or over messages direct or tree.
        async_op: whether to return a `Work` at once.

    Returns:
        On the root `out`, or a new array as of `all_gather`, elsewhere None; or a `Work` that gives it. The root
        receives S (p-1)/p bytes.
    """
    call, result = bind.gather(x, comm, root=root, out=out, counts=counts)
    return call.start(algorithm, result=result, async_op=async_op)


def scatter(
    x: Any,
    comm: Any = None,
    *,
    root: int = 0,
    out: Any = None,
    counts: Sequence[int] | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Any:
    """Give rank r chunk r of the root's `x`.

    Args:
        x: on the root the whole, of any shape; elsewhere an array of the same shape and dtype, whose values do not
            matter, or None where both `out` and `counts` are given.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank whose values are sent.
        out: an array of the chunk's number of elements, apart from `x` or, on the root, exactly its chunk.
        counts: the elements of each rank's chunk; None cuts evenly.
        algorithm: auto, loads, native, or over messages direct or tree.
        async_op: whether to return a `Work` at once.

    Returns:
        `out`, or a new array of shape (elements of chunk r,); or a `Work` that gives it. The root sends S (p-1)/p
        bytes.
    """
    call, result = bind.scatter(x, comm, root=root, out=out, counts=counts)
    return call.start(algorithm, result=result, async_op=async_op)


def barrier(comm: Any = None, *, algorithm: str = "auto", async_op: bool = False) -> Any:
    """Return once every rank has called it.

    Args:
        comm: the communicator; None means `mpizero.world()`.
        algorithm: auto, loads, native or dissemination (ceil(log2 p) messages of one byte).
        async_op: whether to return a `Work` at once.
    """
    call, _ = bind.barrier(comm)
    return call.start(algorithm, async_op=async_op)
