"""Check the arguments of each verb and bind its buffers: what the verbs and prepared collectives have in common.

Each function takes the verb's arguments but for `algorithm` and `async_op`, and returns the call and what it gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import new_like
from mpizero.collectives.buffers import Line
from mpizero.collectives.call import Call, default_communicator, offsets_of
from mpizero.collectives.schedule import even_offsets
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BINDERS"]

Bound = tuple[Call, Any]


def all_reduce(x: Any, comm: Any, *, op: str = "sum", out: Any = None, order: str = "any") -> Bound:
    """Bind an all-reduce."""
    call = Call("all_reduce", x, comm, op=op, order=order)
    result = x if out is None else out
    call.whole(result, tuple(x.shape))
    call.lay(Line(even_offsets(call.count, call.size)), call.count)
    return call, result


def reduce_scatter(
    x: Any,
    comm: Any,
    *,
    op: str = "sum",
    out: Any = None,
    counts: Sequence[int] | None = None,
    order: str = "any",
) -> Bound:
    """Bind a reduce-scatter."""
    call = Call("reduce_scatter", x, comm, op=op, order=order)
    offsets = _cut(call, call.count, counts)
    if out is None:
        out = new_like(x, (offsets[call.comm.rank + 1] - offsets[call.comm.rank],))
    call.chunk_result(out, offsets)
    return call, out


def all_gather(x: Any, comm: Any, *, out: Any = None, counts: Sequence[int] | None = None) -> Bound:
    """Bind an all-gather."""
    call = Call("all_gather", x, comm)
    out = _gathered(call, x, out, counts)
    call.chunk_input(out, _cut(call, _elements(out), counts))
    return call, out


def all_to_all(
    x: Any,
    comm: Any,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    out_counts: Sequence[int] | None = None,
) -> Bound:
    """Bind an all-to-all; asks the other ranks for `out_counts` where only `counts` are given."""
    call = Call("all_to_all", x, comm)
    if counts is None and out_counts is None:
        if call.count % call.size:
            rule = f"a multiple of the {call.size} ranks"
            raise ArgumentError(must_be("elements of x", rule, call.count, "pass counts="))
        leaving = arriving = even_offsets(call.count, call.size)
        out = new_like(x, tuple(x.shape)) if out is None else out
    else:
        leaving, arriving = _uneven_parts(call, counts, out_counts)
        out = new_like(x, (arriving[-1],)) if out is None else out
    call.square(out, leaving, arriving)
    return call, out


def _uneven_parts(
    call: Call, counts: Sequence[int] | None, out_counts: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    if counts is None:
        raise ArgumentError(must_be("counts", "given where out_counts is", None))
    leaving = offsets_of(counts, call.size)
    if leaving[-1] != call.count:
        raise ArgumentError(must_be("the sum of counts", f"the elements of x, {call.count}", leaving[-1]))
    if out_counts is None:
        asking, told = all_to_all(np.array(counts, np.int64), call.comm)
        out_counts = asking.start("auto", result=told).tolist()
    arriving = offsets_of(out_counts, call.size, "out_counts")
    call.uneven = (*map(int, counts), *map(int, out_counts))
    return leaving, arriving


def broadcast(x: Any, comm: Any, *, root: int = 0) -> Bound:
    """Bind a broadcast."""
    call = Call("broadcast", x, comm, root=root)
    call.whole(x, tuple(x.shape), writable=not call.is_root)
    call.lay(Line(even_offsets(call.count, call.size)), call.count)
    return call, x


def reduce(x: Any, comm: Any, *, root: int = 0, op: str = "sum", out: Any = None, order: str = "any") -> Bound:
    """Bind a reduce."""
    call = Call("reduce", x, comm, op=op, order=order, root=root)
    result = (x if out is None else out) if call.is_root else None
    if call.is_root:
        call.whole(result, tuple(x.shape))
    call.lay(Line(even_offsets(call.count, call.size)), call.count)
    return call, result


def gather(x: Any, comm: Any, *, root: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Bound:
    """Bind a gather."""
    call = Call("gather", x, comm, root=root)
    result = _gathered(call, x, out, counts) if call.is_root else None
    call.chunk_input(result, _cut(call, call.count * call.size, counts))
    return call, result


def scatter(x: Any, comm: Any, *, root: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Bound:
    """Bind a scatter."""
    comm = default_communicator(comm)
    if x is None and (out is None or counts is None or comm.rank == root):
        raise ArgumentError(must_be("x", "an array, or None beside the root where out and counts are given", None))
    call = Call("scatter", x, comm, root=root)
    offsets = _cut(call, call.count, counts) if x is not None else offsets_of(counts or (), call.size)
    if counts is not None:
        call.uneven = tuple(map(int, counts))
    if out is None:
        out = new_like(x, (offsets[comm.rank + 1] - offsets[comm.rank],))
    if not call.is_root:
        call.x = None
    call.chunk_result(out, offsets)
    return call, out


def barrier(comm: Any) -> Bound:
    """Bind a barrier, whose one chunk is a token of a byte."""
    call = Call("barrier", np.zeros(1, np.uint8), default_communicator(comm))
    call.lay(Line([0, 1]), 1)
    return call, None


def _gathered(call: Call, x: Any, out: Any, counts: Sequence[int] | None) -> Any:
    """Return `out`, or a new array for all ranks' parts."""
    if out is not None:
        return out
    if counts is not None:
        return new_like(x, (offsets_of(counts, call.size)[-1],))
    shape = tuple(x.shape) or (1,)
    return new_like(x, (shape[0] * call.size, *shape[1:]))


def _elements(array: Any) -> int:
    """Return the number of elements of an array of any library; 0 of what is none, which is refused later."""
    count = 1
    for extent in getattr(array, "shape", (0,)):
        count *= int(extent)
    return count


def _cut(call: Call, total: int, counts: Sequence[int] | None) -> list[int]:
    """Return the chunks' offsets, even or as given."""
    if counts is None:
        return even_offsets(total, call.size)
    offsets = offsets_of(counts, call.size)
    call.uneven = tuple(map(int, counts))
    if call.operation.input != "chunk" and offsets[-1] != total:
        raise ArgumentError(must_be("the sum of counts", f"the elements of x, {total}", offsets[-1]))
    return offsets


BINDERS: dict[str, Callable[..., Bound]] = {
    binder.__name__: binder
    for binder in (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
}
