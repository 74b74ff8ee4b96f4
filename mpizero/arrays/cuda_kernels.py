"""Local arithmetic on views of device memory: reduce any number of sources in one launch, move runs of bytes.

The kernels are the text `kernels.cu` beside this file. CuPy compiles it by NVRTC when a combination of element type,
operation and number of sources is first asked for, and keeps the binary on disk. Their results have the bits of
`mpizero.arrays.kernels`: the same tree over the sources, the same accumulation type, one rounding. They differ in what
numpy leaves to the processor: the bits of a NaN that is no bfloat16, which of +0 and -0 is the larger (here the left
one), and a fused operation in products of complex numbers (here there is none).

A launch is queued on the stream and returns before it has run; the caller keeps the memory alive until then.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from importlib import resources
from typing import TYPE_CHECKING, Any

from mpizero.arrays.dtypes import DTYPES
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.arrays.dtypes import DType
    from mpizero.arrays.view import View

__all__ = [
    "MOST",
    "THREADS",
    "CudaKernels",
    "MoveParams",
    "ReduceParams",
    "element_of",
    "grid_size",
    "move_params",
    "options",
    "reduce_params",
    "source_text",
]

MOST = 32
"""Sources or targets of one reduction, and runs of one launch: what the structures of kernels.cu have room for."""
THREADS = 256
"""Threads of a block; kernels.cu bounds its registers by it."""
LINE = 16
"""Bytes that a thread loads and stores at a time where pointers allow it."""
BLOCKS_PER_SM = 8
"""Blocks that a multiprocessor can hold at once; more work is a loop in the kernel."""

_OPS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "max", "min": "min", "copy": "copy"}
_KINDS = {"sum": "fiucb", "prod": "fiucb", "max": "fiub", "min": "fiub", "copy": "fiucb"}
"""The kinds of elements that an operation takes."""


class ReduceParams(ctypes.Structure):
    """Lay out the parameter of the kernel `reduce`, as `struct Reduce` of kernels.cu does."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * MOST),
        ("targets", ctypes.c_uint64 * MOST),
        ("count", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        ("divisor", ctypes.c_uint32),
        ("wide_sources", ctypes.c_uint32),
        ("wide_targets", ctypes.c_uint32),
        ("num_targets", ctypes.c_uint32),
    )


class MoveParams(ctypes.Structure):
    """Lay out the parameter of the kernel `move`, as `struct Move` of kernels.cu does."""

    _fields_ = (
        ("from", ctypes.c_uint64 * MOST),
        ("to", ctypes.c_uint64 * MOST),
        ("nbytes", ctypes.c_uint64 * MOST),
    )


class CudaKernels:
    """Launch the kernels of kernels.cu on the calling thread's current device.

    CuPy is loaded at the first launch. One object serves all devices and threads of a process.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[int, tuple[str, ...]], tuple[Any, int]] = {}
        """By device and options: a CuPy kernel, which keeps its module loaded, and its CUfunction."""
        self._num_sms: dict[int, int] = {}
        self._thread = threading.local()

    def reduce(self, op: str, targets: Sequence[View], sources: Sequence[View], divisor: int, stream: int) -> None:
        """Store the sources, combined in the canonical tree and divided, in every target, in one launch.

        Reads each source and writes each target once. A target may be exactly a source; any other overlap is undefined.

        Args:
            op: sum, mean (adds; the division comes with `divisor`), prod, max, min, or copy of one source.
            targets: 1 to 32, of one count, each of the element type or, where that is a 16-bit float, of fp32.
            sources: 1 to 32, in the order of their ranks, as targets; one alone is copied.
            divisor: 1, or what the result is divided by before it is rounded.
            stream: the address of the CUDA stream.

        Raises:
            ArgumentError: for more than 32 sources or targets, or none, or for counts that differ.
            ArgumentTypeError: for types that do not go together or that `op` does not take.
        """
        params, dtype = reduce_params(op, targets, sources, divisor)
        if params.count:
            size = grid_size(params.count * dtype.itemsize, self._sms())
            self._launch("reduce", options(dtype, op, len(sources)), (size, 1), params, stream)

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copy runs of bytes, 32 in a launch: what packs and unpacks.

        Args:
            runs: of (address to read, address to write, bytes); none may write what another reads or writes.
            stream: the address of the CUDA stream.
        """
        wanted = [run for run in runs if run[2]]
        for start in range(0, len(wanted), MOST):
            part = wanted[start : start + MOST]
            size = grid_size(max(nbytes for _, _, nbytes in part), self._sms())
            self._launch("move", options(), (size, len(part)), move_params(part), stream)

    def _sms(self) -> int:
        """Return the number of multiprocessors of the current device."""
        runtime = _cupy().cuda.runtime
        device = runtime.getDevice()
        if device not in self._num_sms:
            self._num_sms[device] = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
        return self._num_sms[device]

    def _function(self, name: str, chosen: tuple[str, ...], device: int) -> int:
        """Return the CUfunction of a kernel, compiled and loaded on first use."""
        key = (device, chosen)
        if key not in self._functions:
            kernel = _cupy().RawModule(code=source_text(), options=chosen).get_function(name).kernel
            self._functions[key] = kernel, kernel.ptr
        return self._functions[key][1]

    def _launch(
        self, name: str, chosen: tuple[str, ...], grid: tuple[int, int], params: ctypes.Structure, stream: int
    ) -> None:
        cuda = _cupy().cuda
        device = cuda.runtime.getDevice()
        if getattr(self._thread, "device", None) != device:
            cuda.runtime.free(0)  # gives this thread the device's context, without which the driver refuses launches
            self._thread.device = device
        function = self._function(name, chosen, device)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))  # CUDA copies what they point to during the call
        shape = (*grid, 1, THREADS, 1, 1)
        cuda.driver.launchKernel(function, *shape, 0, stream, ctypes.addressof(pointers), 0)


@functools.cache
def source_text() -> str:
    """Return the text of the kernels."""
    return resources.files("mpizero.arrays").joinpath("kernels.cu").read_text(encoding="utf-8")


def options(dtype: DType | None = None, op: str = "copy", num_sources: int = 1) -> tuple[str, ...]:
    """Return the options with which `reduce` is compiled; with no element type, those of `move`."""
    fixed = ("-std=c++17", "--fmad=false")
    if dtype is None:
        return fixed
    name = "copy" if num_sources == 1 else _OPS[op]
    return (*fixed, f"-DELEMENT={dtype.name}", f"-DOP={name}", f"-DSOURCES={num_sources}")


def grid_size(nbytes: int, num_sms: int) -> int:
    """Return the number of blocks for that many bytes of one array: a line per thread, at most what fits at once."""
    return max(1, min(-(-nbytes // (LINE * THREADS)), num_sms * BLOCKS_PER_SM))


def reduce_params(
    op: str, targets: Sequence[View], sources: Sequence[View], divisor: int
) -> tuple[ReduceParams, DType]:
    """Return the parameter of `reduce` and its element type; raise as `CudaKernels.reduce` does."""
    views = [*sources, *targets]
    _check_numbers(op, targets, sources)
    dtype = element_of(op, views)
    _check_divisor(op, divisor, dtype)
    params = ReduceParams(count=views[0].data.size, divisor=divisor, num_targets=len(targets))
    params.sources[: len(sources)] = [_address(view) for view in sources]
    params.targets[: len(targets)] = [_address(view) for view in targets]
    params.wide_sources = _mask(sources, dtype)
    params.wide_targets = _mask(targets, dtype)
    params.head = _head(views, dtype, params.count)
    return params, dtype


def move_params(runs: Sequence[tuple[int, int, int]]) -> MoveParams:
    """Return the parameter of `move` for at most 32 runs of (address to read, address to write, bytes)."""
    params = MoveParams()
    for index, (source, target, nbytes) in enumerate(runs):
        getattr(params, "from")[index] = source
        params.to[index] = target
        params.nbytes[index] = nbytes
    return params


def element_of(op: str, views: Sequence[View]) -> DType:
    """Return the element type of views of which some may hold its accumulation type.

    Raises:
        ArgumentTypeError: for types that do not go together or that `op` does not take.
    """
    names = sorted({view.dtype.name for view in views}, key=lambda name: (not DTYPES[name].is_half, name))
    dtype = DTYPES[names[0]]
    if not set(names) <= {dtype.name, dtype.accumulator(op).name}:
        remedy = "cast the others first"
        raise ArgumentTypeError(must_be("dtypes", f"one, or a 16-bit float and what {op} keeps it in", names, remedy))
    if dtype.kind not in _KINDS[_OPS[op]]:
        raise ArgumentTypeError(must_be("dtype", f"one that {op} is defined for", dtype.name))
    return dtype


def _check_numbers(op: str, targets: Sequence[View], sources: Sequence[View]) -> None:
    if op not in _OPS:
        raise ArgumentError(must_be("op", f"one of {', '.join(_OPS)}", op))
    for what, views in (("sources", sources), ("targets", targets)):
        if not 1 <= len(views) <= MOST:
            raise ArgumentError(must_be(f"number of {what}", f"1 to {MOST}", len(views), "reduce in several steps"))
    if op == "copy" and len(sources) > 1:
        raise ArgumentError(must_be("number of sources of a copy", "1", len(sources), "name an operation"))
    counts = {view.data.size for view in (*sources, *targets)}
    if len(counts) > 1:
        raise ArgumentError(must_be("counts of sources and targets", "equal", sorted(counts)))


def _check_divisor(op: str, divisor: int, dtype: DType) -> None:
    if divisor != 1 and op in {"max", "min"}:
        raise ArgumentError(must_be(f"divisor of {op}", "1", divisor))
    if divisor != 1 and dtype.kind not in "fc":
        raise ArgumentTypeError(must_be("dtype of a mean", "a float or complex", dtype.name, "cast it first"))
    if not 1 <= divisor < 1 << 32:
        raise ArgumentError(must_be("divisor", "from 1 to 2**32 - 1", divisor))


def _address(view: View) -> int:
    data: Any = view.data  # device memory has an address in place of elements
    return int(data.address)


def _mask(views: Sequence[View], dtype: DType) -> int:
    """Return the bits of the views that hold another type than the element's, which is its accumulation type."""
    return sum((view.dtype != dtype) << index for index, view in enumerate(views))


def _head(views: Sequence[View], dtype: DType, count: int) -> int:
    """Return how many elements come before the first at which every view is on 16 bytes; `count` if there is none."""
    ends = [(_address(view), view.dtype.itemsize) for view in views]
    period = math.ceil(LINE / dtype.itemsize)
    for head in range(min(period, count)):
        if all((address + head * itemsize) % LINE == 0 for address, itemsize in ends):
            return head
    return count


def _cupy() -> Any:
    import cupy

    return cupy
