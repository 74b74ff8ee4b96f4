"""The collectives that users call.

All have one form: `verb(x, comm=None, *, op=..., out=None, algorithm="auto", order="any")`. `x` is a numpy array or a
torch CPU tensor of any shape and strides; the result is of the same library and dtype, has the same bits on every rank
that gets it, and lies in `x` itself or in `out`. Sizes need not divide by the number of ranks: chunk i of n elements is
[i*n//p, (i+1)*n//p). Every rank must make the same call with the same shape and dtype, in the same order.

Errors raised before anything is sent, alike on all ranks that pass alike arguments: `ArgumentTypeError` for arrays,
dtypes and reductions that do not go together, `ArgumentError` for unknown names, unfit shapes, read-only and
partly overlapping memory. `CollectiveTimeoutError` when a peer does not come.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import DType, View, borrow, check_no_partial_overlap, kind_of, new_like
from mpizero.arrays import copy as copy_view
from mpizero.collectives.execute import Buffers, execute
from mpizero.collectives.registry import NATIVE, OPERATIONS, build
from mpizero.collectives.schedule import even_offsets
from mpizero.collectives.select import choose, segment_of
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from mpizero.typing import CommunicatorLike

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter"]

OPS = ("sum", "mean", "max", "min", "prod")
ORDERS = ("any", "canonical")


def all_reduce(
    x: Any, comm: Any = None, *, op: str = "sum", out: Any = None, algorithm: str = "auto", order: str = "any"
) -> Any:
    """Reduce `x` over all ranks, element by element, and give every rank the result.

    Args:
        x: the rank's part, of any shape; overwritten with the result unless `out` is given.
        comm: the communicator; None means `mpizero.world()`.
        op: sum, mean, max, min or prod. 16-bit floats accumulate in fp32 and are rounded once; max and min propagate
            NaN; a mean divides in fp32 (float64 in float64) before the one rounding and is refused for integers.
        out: an array of x's shape and dtype for the result; `x` itself is allowed, partial overlap is not.
        algorithm: auto, native, direct, ring, halving_doubling or tree.
        order: canonical fixes the order of summation (((0+1)+(2+3))+4), any leaves it
            to the algorithm.

    Returns:
        `x`, or `out`.

    Sends 2 S (p-1)/p bytes per rank for S bytes, but for `tree` (at most 2 S log2 p).
    """
    call = _Call("all_reduce", x, comm, op=op, order=order)
    out = call.output(x if out is None else out, tuple(x.shape))
    call.run(algorithm)
    return out


def reduce_scatter(
    x: Any, comm: Any = None, *, op: str = "sum", out: Any = None, algorithm: str = "auto", order: str = "any"
) -> Any:
    """Reduce `x` over all ranks and give rank r its chunk r of the result.

    Args:
        x: the rank's part, of n elements in any shape; not changed unless `out` is rank r's chunk of it.
        comm: the communicator; None means `mpizero.world()`.
        op: as of `all_reduce`.
        out: an array of the chunk's number of elements, apart from `x` or exactly its chunk r.
        algorithm: auto, native, direct, ring or halving.
        order: as of `all_reduce`.

    Returns:
        `out`, or a new array of shape (elements of chunk r,).

    Sends S (p-1)/p bytes per rank.
    """
    call = _Call("reduce_scatter", x, comm, op=op, order=order)
    return call.run_into_chunk(x, out, algorithm)


def all_gather(x: Any, comm: Any = None, *, out: Any = None, algorithm: str = "auto") -> Any:
    """Give every rank the concatenation of all ranks' `x`.

    Args:
        x: the rank's part: equally many elements on all ranks, or, with `out` of n elements, as many as chunk r has.
        comm: the communicator; None means `mpizero.world()`.
        out: the result, of any shape; `x` may be exactly chunk r of it (in place) or apart from it.
        algorithm: auto, native, direct, ring or doubling.

    Returns:
        `out`, or a new array of shape (p * x.shape[0], *x.shape[1:]).

    Sends S (p-1)/p bytes per rank for a result of S bytes.
    """
    call = _Call("all_gather", x, comm)
    if out is None:
        shape = tuple(x.shape) or (1,)
        out = new_like(x, (shape[0] * call.size, *shape[1:]))
    call.run_from_chunk(x, out, algorithm)
    return out


def broadcast(x: Any, comm: Any = None, *, root: int = 0, algorithm: str = "auto") -> Any:
    """Give every rank the root's `x`, in place.

    Args:
        x: the buffer, of the same shape and dtype on all ranks; the root's may be read-only.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank whose values are sent.
        algorithm: auto, native or tree.

    Returns:
        `x`. A rank sends at most S ceil(log2 p) bytes.
    """
    call = _Call("broadcast", x, comm, root=root)
    call.output(x, tuple(x.shape), writable=call.comm.rank != call.root)
    call.run(algorithm)
    return x


def reduce(
    x: Any,
    comm: Any = None,
    *,
    root: int = 0,
    op: str = "sum",
    out: Any = None,
    algorithm: str = "auto",
    order: str = "any",
) -> Any:
    """Reduce `x` over all ranks and give the root the result.

    Args:
        x: the rank's part, of any shape; on the root overwritten with the result unless `out` is given, elsewhere not
            changed.
        comm: the communicator; None means `mpizero.world()`.
        root: the rank that gets the result.
        op: as of `all_reduce`.
        out: the root's array for the result; ignored elsewhere.
        algorithm: auto, native, direct or tree.
        order: as of `all_reduce`.

    Returns:
        On the root `x` or `out`, elsewhere None. A rank other than the root sends S bytes for S bytes (of 16-bit
        floats partial sums travel in fp32: up to 2 S), also with `direct`, whose root sends S (p-1)/p.
    """
    call = _Call("reduce", x, comm, op=op, order=order, root=root)
    if call.comm.rank != call.root:
        call.run(algorithm)
        return None
    out = call.output(x if out is None else out, tuple(x.shape))
    call.run(algorithm)
    return out


def barrier(comm: Any = None, *, algorithm: str = "auto") -> None:
    """Return once every rank has called it.

    Args:
        comm: the communicator; None means `mpizero.world()`.
        algorithm: auto, native or dissemination (ceil(log2 p) messages of one byte).
    """
    comm = _default(comm)
    _Call("barrier", np.zeros(1, np.uint8), comm).run(algorithm)


class _Call:
    """Hold one call while its arguments are checked and its buffers bound."""

    def __init__(
        self, operation: str, x: Any, comm: Any, *, op: str = "sum", order: str = "any", root: Any = 0
    ) -> None:
        self.operation = OPERATIONS[operation]
        self.comm: CommunicatorLike = _default(comm)
        self.size = self.comm.size
        self.op, self.order, self.root = op, order, root
        kind_of(x)
        self.x = borrow(x, writable=False)
        self.dtype: DType = self.x.view.dtype
        self._check()
        self.out: Any = None
        self.offsets_of: int = self.x.view.count
        self.starts = (0, 0)

    def _check(self) -> None:
        """Check everything that depends on neither shapes nor buffers."""
        if self.op not in OPS:
            raise ArgumentError(must_be("op", f"one of {', '.join(OPS)}", self.op))
        if self.order not in ORDERS:
            raise ArgumentError(must_be("order", f"one of {', '.join(ORDERS)}", self.order))
        if not isinstance(self.root, int | np.integer) or not 0 <= self.root < self.size:
            raise ArgumentError(must_be("root", f"a rank, 0 to {self.size - 1}", self.root))
        self.root = int(self.root)
        if self.operation.reduces:
            check_reduction(self.dtype, self.op)

    def output(self, out: Any, shape: tuple[int, ...], *, writable: bool = True) -> Any:
        """Bind the result to `out`, which must be of `shape` and of x's library and dtype."""
        self._check_like(out)
        if tuple(out.shape) != shape:
            raise ArgumentError(must_be("shape of out", f"that of x, {shape}", tuple(out.shape)))
        in_place = out is self.x.array or check_no_partial_overlap(self.x.array, out)
        self.out = borrow(out, "x" if in_place else "out", writable=writable)
        if in_place:
            self.x = self.out
        return out

    def run_into_chunk(self, x: Any, out: Any, algorithm: str) -> Any:
        """Bind `out` to this rank's chunk of the result and run."""
        offsets = even_offsets(self.x.view.count, self.size)
        low, high = offsets[self.comm.rank], offsets[self.comm.rank + 1]
        if out is None:
            out = new_like(x, (high - low,))
        self._bind_chunk(out, high - low, "out", writable=True)
        if not self._is_part(self.out.view, self.x.view, low):
            check_no_partial_overlap(x, out)
        self.starts = (0, low)
        self.run(algorithm)
        return out

    def run_from_chunk(self, x: Any, out: Any, algorithm: str) -> None:
        """Bind `x` to this rank's chunk of the result `out` and run."""
        self._check_like(out)
        self.out = borrow(out, "out", writable=True)
        self.offsets_of = self.out.view.count
        offsets = even_offsets(self.offsets_of, self.size)
        low, high = offsets[self.comm.rank], offsets[self.comm.rank + 1]
        if self.x.view.count != high - low:
            rule = f"{high - low}, chunk {self.comm.rank} of out's {self.offsets_of}"
            raise ArgumentError(must_be("elements of x", rule, self.x.view.count))
        if not self._is_part(self.x.view, self.out.view, low):
            check_no_partial_overlap(x, out)
        self.starts = (low, 0)
        self.run(algorithm)

    def _bind_chunk(self, out: Any, count: int, what: str, *, writable: bool) -> None:
        self._check_like(out)
        if math.prod(out.shape) != count:
            rule = f"{count}, chunk {self.comm.rank} of x's {self.x.view.count}"
            raise ArgumentError(must_be(f"elements of {what}", rule, math.prod(out.shape)))
        self.out = borrow(out, what, writable=writable)

    @staticmethod
    def _is_part(part: View, whole: View, start: int) -> bool:
        """Return whether `part` is exactly the elements of `whole` from `start` on."""
        where = whole.data[start : start + part.count]
        return bool(part.count) and part.data.ctypes.data == where.ctypes.data

    def _check_like(self, out: Any) -> None:
        kind_of(out, "out")
        if out.dtype != self.x.array.dtype:
            raise ArgumentTypeError(must_be("dtype of out", f"that of x, {self.x.array.dtype}", str(out.dtype)))

    def run(self, requested: str) -> None:
        """Choose the algorithm, move the data, write packed results back."""
        nbytes = self.offsets_of * self.dtype.itemsize
        where = (self.size, nbytes, self.comm.native is not None)
        name = choose(self.operation.name, requested, self.order, self.dtype, op=self.op, shape=where)
        if self.offsets_of:
            with self.comm.exclusive(self.operation.name):
                self._native() if name == NATIVE else self._scheduled(name)
        if self.out is not None:
            self.out.give_back()

    def _scheduled(self, name: str) -> None:
        schedule = build(self.operation.name, name, self.size, self.comm.rank, self.root)
        widths = (self.dtype.itemsize, self.dtype.accumulator(self.op).itemsize)
        buffers = Buffers(
            input=self.x.view,
            output=self.x.view.part(0, 0) if self.out is None else self.out.view,
            offsets=even_offsets(self.offsets_of, schedule.chunks),
            input_start=self.starts[0],
            output_start=self.starts[1],
            op=self.op,
            divisor=self.size if self.op == "mean" else 1,
        )
        segment = segment_of(self.operation.name, name, self.size, self.root, widths)
        execute(schedule, buffers, self.comm, segment=segment, what=f"{self.operation.name} ({name})")

    def _native(self) -> None:
        native, x = self.comm.native, self.x.view
        out = None if self.out is None else self.out.view
        offsets = even_offsets(self.offsets_of, self.size)
        if self.operation.name == "barrier":
            native.barrier()
        elif self.operation.name == "broadcast":
            native.broadcast(out, self.root)
        elif self.operation.name == "all_gather":
            native.all_gather(x, out, offsets)
        elif self.operation.name == "all_reduce":
            native.all_reduce(x, out, self.op)
        elif self.operation.name == "reduce_scatter":
            native.reduce_scatter(x, out, offsets, self.op)
        else:
            native.reduce(x, out, self.op, self.root)
        if self.op == "mean" and out is not None:
            copy_view(out, out, self.size)


def check_reduction(dtype: DType, op: str) -> None:
    """Raise ArgumentTypeError where `op` has no meaning for `dtype` (case K12)."""
    allowed = {
        "f": OPS,
        "i": ("sum", "max", "min", "prod"),
        "u": ("sum", "max", "min", "prod"),
        "c": ("sum", "mean", "prod"),
        "b": ("max", "min"),
    }[dtype.kind]
    if op not in allowed:
        remedy = {"b": "cast to int32 to count, or use max for any and min for all", "c": "reduce x.real and x.imag"}
        rule = f"one of {', '.join(allowed)} for {dtype.name}"
        raise ArgumentTypeError(must_be("op", rule, op, remedy.get(dtype.kind, "cast to float first")))


def _default(comm: Any) -> Any:
    """Return `comm`, or the world communicator; refuse anything else."""
    if comm is None:
        from mpizero.comm import world  # starts MPI only when it is needed

        return world()
    if not hasattr(comm, "transport"):
        rule = "an mpizero.Communicator"
        remedy = "wrap an mpi4py communicator with mpizero.Communicator(comm)"
        raise ArgumentTypeError(must_be("comm", rule, type(comm).__name__, remedy))
    return comm
