"""One call of a collective: its arguments checked and its buffers bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import (
    Borrowed,
    Device,
    DeviceArray,
    DType,
    View,
    address_of,
    borrow,
    check_no_partial_overlap,
    device_of,
    kind_of,
)
from mpizero.collectives.agree import OPS
from mpizero.collectives.buffers import Layout, Line, Square
from mpizero.collectives.on_device import DevicePlan, Fence, choose_on_device, plan_on_device, ready_side
from mpizero.collectives.on_host import plan_on_host
from mpizero.collectives.registry import OPERATIONS
from mpizero.collectives.route import Plan, Route
from mpizero.comm import world
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpizero.typing import CommunicatorLike, Wait

__all__ = ["Call", "check_reduction", "default_communicator", "offsets_of"]

ORDERS = ("any", "canonical")


class Call:
    """Hold one call while its arguments are checked and its buffers bound."""

    def __init__(
        self, operation: str, x: Any, comm: Any, *, op: str = "sum", order: str = "any", root: Any = 0
    ) -> None:
        """Check everything that depends on neither shapes nor results.

        Args:
            operation: the collective's name.
            x: the input; None on a rank that has none.
            comm: the communicator; None means `mpizero.world()`.
            op: the reduction.
            order: the order of summation.
            root: the root of a rooted operation.
        """
        self.operation = OPERATIONS[operation]
        self.comm: CommunicatorLike = default_communicator(comm)
        self.size = self.comm.size
        self.op, self.order, self.root = op, order, root
        self._check_words()
        self.x: Borrowed | None = None if x is None else borrow(x, writable=False)
        self.out: Borrowed | None = None
        self.dtype: DType | None = None
        if self.x is not None:
            self.dtype = self.x.view.dtype
            if self.operation.reduces:
                check_reduction(self.dtype, self.op)
        self.layout: Layout = Line([0])
        self.uneven: tuple[int, ...] = ()
        """Counts that the caller gave, if any."""
        self.total = 0
        """Elements of the whole buffer, as all ranks know it."""

    def _check_words(self) -> None:
        if self.op not in OPS:
            raise ArgumentError(must_be("op", f"one of {', '.join(OPS)}", self.op))
        if self.order not in ORDERS:
            raise ArgumentError(must_be("order", f"one of {', '.join(ORDERS)}", self.order))
        if not isinstance(self.root, int | np.integer) or not 0 <= self.root < self.size:
            raise ArgumentError(must_be("root", f"a rank, 0 to {self.size - 1}", self.root))
        self.root = int(self.root)

    @property
    def count(self) -> int:
        """Return the elements of the input."""
        return 0 if self.x is None else self.x.view.count

    @property
    def is_root(self) -> bool:
        """Return whether this rank is the root."""
        return self.comm.rank == int(self.root)

    def whole(self, out: Any, shape: tuple[int, ...], *, writable: bool = True) -> None:
        """Bind a result of the input's `shape` to `out`, apart from the input or exactly it."""
        assert self.x is not None  # noqa: S101  (the operations that come here have an input on every rank)
        self._check_like(out)
        if tuple(out.shape) != shape:
            raise ArgumentError(must_be("shape of out", f"that of x, {shape}", tuple(out.shape)))
        in_place = out is self.x.array or check_no_partial_overlap(self.x.array, out)
        self.out = borrow(out, "x" if in_place else "out", writable=writable)
        if in_place:
            self.x = self.out

    def chunk_result(self, out: Any, offsets: list[int]) -> None:
        """Bind the result to `out`, which gets this rank's chunk of the whole that `offsets` cut."""
        low, high = offsets[self.comm.rank], offsets[self.comm.rank + 1]
        if self.dtype is None:
            kind_of(out, "out")
        else:
            self._check_like(out)
        self.out = borrow(out, "out", writable=True)
        self.dtype = self.out.view.dtype
        if self.out.view.count != high - low:
            rule = f"{high - low}, chunk {self.comm.rank} of x's {offsets[-1]}"
            raise ArgumentError(must_be("elements of out", rule, self.out.view.count))
        if self.x is not None and not _is_part(self.out.view, self.x.view, low):
            check_no_partial_overlap(self.x.array, out)
        self.lay(Line(offsets, 0, low), offsets[-1])

    def chunk_input(self, out: Any, offsets: list[int]) -> None:
        """Bind the input, which must be this rank's chunk of the whole that `offsets` cut, and the whole to `out`.

        `out` is None on a rank that gets no result.
        """
        low, high = offsets[self.comm.rank], offsets[self.comm.rank + 1]
        if out is not None:
            self._check_like(out)
            self.out = borrow(out, "out", writable=True)
            if self.out.view.count != offsets[-1]:
                rule = f"{offsets[-1]}, the sum of all ranks'"
                raise ArgumentError(must_be("elements of out", rule, self.out.view.count))
        if self.count != high - low:
            rule = f"{high - low}, chunk {self.comm.rank} of out's {offsets[-1]}"
            raise ArgumentError(must_be("elements of x", rule, self.count))
        if self.x is not None and self.out is not None and not _is_part(self.x.view, self.out.view, low):
            check_no_partial_overlap(self.x.array, out)
        self.lay(Line(offsets, low, 0), offsets[-1])

    def square(self, out: Any, leaving: list[int], arriving: list[int]) -> None:
        """Bind the result of an all-to-all to `out`, apart from the input."""
        assert self.x is not None  # noqa: S101
        self._check_like(out)
        self.out = borrow(out, "out", writable=True)
        if self.out.view.count != arriving[-1]:
            rule = f"{arriving[-1]}, what all ranks send to rank {self.comm.rank}"
            raise ArgumentError(must_be("elements of out", rule, self.out.view.count))
        if check_no_partial_overlap(self.x.array, out) and self.count:
            raise ArgumentError(must_be("out", "memory apart from x", "x itself", "an all-to-all is never in place"))
        self.lay(Square(self.comm.rank, self.size, leaving, arriving, alike=not self.uneven), self.count)

    def lay(self, layout: Layout, total: int) -> None:
        """Set where chunks lie and how many elements the whole has."""
        self.layout, self.total = layout, total

    def start(self, algorithm: str, *, result: Any = None, async_op: bool = False) -> Any:
        """Choose the algorithm and run it; return `result`, or a `Work` that gives it."""
        route = self.route()
        if route.device is not None:
            with route.device.current():
                return self._start_on_device(route, algorithm, result=result, async_op=async_op)
        chosen = route.choose(algorithm)
        plan = plan_on_host(route, chosen) if route.total or route.uneven else None
        if async_op:
            return self.comm.submit(route.about(chosen), self._steps(plan), result)
        self.comm.perform(route.about(chosen), self._steps(plan))
        return result

    def _start_on_device(self, route: Route, algorithm: str, *, result: Any, async_op: bool) -> Any:
        chosen = choose_on_device(route, algorithm)
        plan = plan_on_device(route, chosen) if route.total or route.uneven else None
        return self.run_on_device(plan, route, chosen, result=result, async_op=async_op)

    def run_on_device(self, plan: DevicePlan | None, route: Route, chosen: str, *, result: Any, async_op: bool) -> Any:
        """Run a plan on device memory, in order with the caller's streams; see [Note: streams and MPI]."""
        assert route.device is not None  # noqa: S101
        what = route.about(chosen)
        fence = Fence(route.device, (self.x, self.out))
        steps: Iterator[Wait] = iter(())
        if plan is not None:
            steps = fence.around(ready_side(route), plan.streams, plan.steps(*self.views()))
        if async_op:
            return self.comm.submit(what, steps, result, fence.join)
        self.comm.perform(what, steps)
        fence.join()
        return result

    def route(self) -> Route:
        """Return the call without its arrays."""
        assert self.dtype is not None  # noqa: S101  (bound with the input, or with the output where there is none)
        return Route(
            comm=self.comm,
            operation=self.operation,
            dtype=self.dtype,
            op=self.op,
            order=self.order,
            root=int(self.root),
            layout=self.layout,
            total=self.total,
            uneven=self.uneven,
            device=self.device,
        )

    @property
    def device(self) -> Device | None:
        """Return the device on which the buffers lie; None for host memory."""
        bound = self.out if self.x is None else self.x
        return None if bound is None else bound.view.device

    def views(self) -> tuple[View, View]:
        """Return the input and the output, empty where this rank has none."""
        assert self.dtype is not None  # noqa: S101
        device = self.device
        storage = self.dtype.storage
        empty = np.empty(0, storage) if device is None else DeviceArray(device, 0, 0, storage, None)
        nothing = View(empty, self.dtype)
        return (
            nothing if self.x is None else self.x.view,
            nothing if self.out is None else self.out.view,
        )

    def _steps(self, plan: Plan | None) -> Iterator[Wait]:
        """Run the plan step by step, and write packed results back."""
        if plan is not None:
            yield from plan.steps(*self.views())
        if self.out is not None:
            self.out.give_back()

    def _check_like(self, out: Any) -> None:
        kind_of(out, "out")
        if self.x is not None and device_of(out) is not self.x.view.device:
            x = self.x.view.device
            where, got = ("host memory" if device is None else str(device) for device in (x, device_of(out)))
            raise ArgumentTypeError(must_be("out", f"where x is, in {where}", got, "copy one of them to the other"))
        if self.x is not None and out.dtype != self.x.array.dtype:
            raise ArgumentTypeError(must_be("dtype of out", f"that of x, {self.x.array.dtype}", str(out.dtype)))


def _is_part(part: View, whole: View, start: int) -> bool:
    """Return whether `part` is exactly the elements of `whole` from `start` on."""
    where = whole.data[start : start + part.count]
    return bool(part.count) and address_of(part.data) == address_of(where)


def offsets_of(counts: Sequence[int], size: int, what: str = "counts") -> list[int]:
    """Return the element offsets of chunks of these lengths.

    Raises:
        ArgumentError: unless there is one whole number of 0 or more for each rank.
    """
    lengths: list[Any] = list(counts)
    whole = all(isinstance(count, int | np.integer) and count >= 0 for count in lengths)
    if len(lengths) != size or not whole:
        raise ArgumentError(must_be(what, f"{size} numbers of elements, one per rank", lengths))
    offsets = [0]
    for count in lengths:
        offsets.append(offsets[-1] + int(count))
    return offsets


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


def default_communicator(comm: Any) -> Any:
    """Return `comm`, or the world communicator; refuse anything else."""
    if comm is None:
        return world()  # starts MPI, at its first call
    if not hasattr(comm, "transport"):
        rule = "an mpizero.Communicator"
        remedy = "wrap an mpi4py communicator with mpizero.Communicator(comm)"
        raise ArgumentTypeError(must_be("comm", rule, type(comm).__name__, remedy))
    return comm
