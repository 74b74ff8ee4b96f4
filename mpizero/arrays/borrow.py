"""Arrays of any library, checked and made flat views of, without a copy where possible; and arrays made of views."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from mpizero.arrays.device_array import DeviceArray
from mpizero.arrays.dtypes import DTYPES, DType, dtype_named
from mpizero.arrays.gpus import device_of, gpus, is_cupy
from mpizero.arrays.view import View
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

__all__ = [
    "Borrowed",
    "borrow",
    "check_no_partial_overlap",
    "flat_memory",
    "from_device_memory",
    "from_memory",
    "kind_of",
    "new_like",
    "parse_dtype",
]

_GPUS = gpus()
OVERLAP_WORK = 100_000
"""Steps that numpy may take to find out whether two strided arrays share an element; beyond, bounds decide."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Hold an array that was given to a collective, and the view on which the collective works.

    Where the array is not contiguous in C order, the view is a packed copy in index order (so that a Fortran-ordered
    array on one rank and a C-ordered one on another meet element by element) and `give_back` writes it back.
    """

    array: Any
    view: View
    packed: bool
    dense: Any = None
    """Of an array in device memory: the contiguous array of its library on which the collective works."""

    def give_back(self) -> None:
        """Write a packed copy back into the array that it came from."""
        if not self.packed:
            return
        if self.dense is not None:
            shape = tuple(self.array.shape)
            if _is_torch(self.array):
                self.array.detach().copy_(self.dense.view(shape))
            else:
                with self.array.device:
                    self.array[...] = self.dense.reshape(shape)
            return
        data = self.view.data.reshape(tuple(self.array.shape))
        if not _is_torch(self.array):
            np.copyto(self.array, data)
            return
        torch = sys.modules["torch"]
        is_bfloat16 = self.view.dtype.name == "bfloat16"
        source = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(data)
        self.array.detach().copy_(source)


def kind_of(x: Any, what: str = "x") -> str:
    """Return `numpy`, `torch` or `cupy`, the library that `x` belongs to.

    Raises:
        ArgumentTypeError: if `x` is of none of them, or is a torch tensor of another kind of device or with no dense
            storage.
    """
    if isinstance(x, np.ndarray):
        return "numpy"
    if is_cupy(x):
        return "cupy"
    if not _is_torch(x):
        rule = "a numpy array, a torch tensor or a CuPy array"
        raise ArgumentTypeError(must_be(what, rule, type(x).__name__, "wrap scalars with numpy.array"))
    if x.device.type not in {"cpu", "cuda"} or x.layout is not sys.modules["torch"].strided:
        rule = "a dense tensor in host memory or on a CUDA device"
        raise ArgumentTypeError(must_be(what, rule, f"{x.device}, {x.layout}"))
    return "torch"


def borrow(x: Any, what: str = "x", *, writable: bool) -> Borrowed:
    """Return `x` with a flat view of its elements in index order.

    Args:
        x: a numpy array, a torch tensor or a CuPy array, of any shape and strides.
        what: the argument's name, for errors.
        writable: whether the collective will write into it.

    Raises:
        ArgumentTypeError: for a dtype or byte order that no MPI here can carry.
        ArgumentError: for a read-only array that would be written, or one whose elements overlap each other.
    """
    kind = kind_of(x, what)
    if kind == "torch":
        return _borrow_torch(x, what, writable=writable)
    if kind == "cupy":
        return _borrow_cupy(x, what, writable=writable)
    if not x.dtype.isnative:
        remedy = "use x.astype(x.dtype.newbyteorder('='))"
        raise ArgumentTypeError(must_be(what, "in native byte order", str(x.dtype), remedy))
    dtype = dtype_named(_name_of(x.dtype), what)
    if writable and not x.flags.writeable:
        raise ArgumentError(must_be(what, "writable", "a read-only array", "pass a copy, or `out=`"))
    if writable and _overlaps_itself(x.shape, x.strides, x.itemsize):
        raise ArgumentError(must_be(what, "free of elements that share memory", f"strides {x.strides}", "pass a copy"))
    plain = np.asarray(x)  # a subclass, as numpy.matrix, may refuse to become one-dimensional
    contiguous = plain.flags.c_contiguous
    flat = np.ascontiguousarray(plain).reshape(-1)
    return Borrowed(x, View(flat, dtype), packed=not contiguous and writable)


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name, which numpy puts together anew each time."""
    return dtype.name


def new_like(x: Any, shape: tuple[int, ...]) -> Any:
    """Return an uninitialised C-ordered array of `x`'s library and dtype with the given shape."""
    if _is_torch(x):
        return x.detach().new_empty(shape)
    if not is_cupy(x):
        return np.empty(shape, x.dtype)
    with x.device:
        return sys.modules["cupy"].empty(shape, x.dtype)


def check_no_partial_overlap(x: Any, out: Any) -> bool:
    """Return whether `x` and `out` are the same elements in the same order (in place); refuse any other overlap.

    Raises:
        ArgumentError: if the two share memory without being the same: a part, another order (a transpose, a reversal),
            or another reading of it (a dtype, a torch conjugate).
    """
    first, second = _memory(x), _memory(out)
    if _layout(x, first) == _layout(out, second):
        return True
    try:
        shared = np.shares_memory(first, second, max_work=OVERLAP_WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        shared = np.may_share_memory(first, second)
    if shared:
        got = "an array that shares memory with x"
        raise ArgumentError(must_be("out", "x itself or memory apart from x", got, "pass a separate array as `out`"))
    return False


def _is_torch(x: Any) -> bool:
    # Another thread may be in the middle of importing it.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def _borrow_torch(x: Any, what: str, *, writable: bool) -> Borrowed:
    dtype = dtype_named(str(x.dtype).removeprefix("torch."), what)
    strides = tuple(stride * x.element_size() for stride in x.stride())
    if writable and _overlaps_itself(tuple(x.shape), strides, x.element_size()):
        raise ArgumentError(must_be(what, "free of elements that share memory", f"strides {x.stride()}", "pass a copy"))
    plain = x.detach()
    contiguous = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    dense = plain if contiguous else plain.resolve_conj().resolve_neg().contiguous()
    device = device_of(x)
    if device is not None:
        data = DeviceArray(device, dense.data_ptr(), dense.numel(), dtype.storage, dense)
        return Borrowed(x, View(data, dtype), packed=not contiguous and writable, dense=dense)
    flat = _as_numpy(dense.view(-1), np.dtype(dtype.storage).str)
    return Borrowed(x, View(flat, dtype), packed=not contiguous and writable)


def _borrow_cupy(x: Any, what: str, *, writable: bool) -> Borrowed:
    dtype = dtype_named(x.dtype.name, what)
    if writable and _overlaps_itself(x.shape, x.strides, x.itemsize):
        raise ArgumentError(must_be(what, "free of elements that share memory", f"strides {x.strides}", "pass a copy"))
    contiguous = bool(x.flags.c_contiguous)
    with x.device:
        dense = x if contiguous else sys.modules["cupy"].ascontiguousarray(x)
    data = DeviceArray(device_of(x), dense.data.ptr, dense.size, dtype.storage, dense)
    return Borrowed(x, View(data, dtype), packed=not contiguous and writable, dense=dense)


class _Memory:
    """Offer a torch tensor's memory by numpy's array interface, and keep the tensor alive.

    `Tensor.numpy()` would do, but marks the storage as one that can never be resized again, and units of `shard` live
    by emptying and refilling theirs.
    """

    def __init__(self, tensor: Any, typestr: str) -> None:
        width = tensor.element_size()
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "typestr": typestr,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
            "version": 3,
        }


class _Foreign:
    """Offer the addresses of a CuPy array's elements by numpy's array interface, for comparison alone."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "data": (array.data.ptr, False),
            "typestr": array.dtype.str,
            "shape": array.shape,
            "strides": array.strides,
            "version": 3,
        }


def _as_numpy(tensor: Any, typestr: str) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as a numpy array of its shape and strides, whatever its dtype and flips."""
    return np.asarray(_Memory(tensor, typestr)) if tensor.numel() else np.empty(tuple(tensor.shape), typestr)


def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two indices may name the same bytes, as in a broadcast array or in sliding windows.

    Takes the axes from the smallest stride up: each must step over all that the smaller ones reach. Slices and
    permutations of an array do; a few exotic layouts that do not are refused though no two of their elements meet.
    """
    if math.prod(shape) == 0:
        return False
    reach = itemsize
    for stride, extent in sorted((abs(stride), extent) for extent, stride in zip(shape, strides, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach += (extent - 1) * stride
    return False


def _memory(x: Any) -> np.ndarray[Any, Any]:
    """Return an array of the same elements, a tensor's as opaque bytes; never read, it may be device memory."""
    if is_cupy(x):
        return np.asarray(_Foreign(x)) if x.size else np.empty(x.shape, x.dtype)
    return _as_numpy(x, f"|V{x.element_size()}") if _is_torch(x) else np.asarray(x)


def _layout(x: Any, memory: np.ndarray[Any, Any]) -> tuple[object, ...]:
    """Return what two arrays must have in common to be the same elements in the same order."""
    flips = (x.is_conj(), x.is_neg()) if _is_torch(x) else (False, False)
    # The stride of an axis of one element means nothing, and libraries fill it in differently.
    strides = tuple(stride for extent, stride in zip(memory.shape, memory.strides, strict=True) if extent > 1)
    order = None if memory.flags.c_contiguous else (memory.shape, strides)
    return (memory.__array_interface__["data"][0], memory.size, x.dtype, order, *flips)


def parse_dtype(dtype: Any) -> tuple[DType, str]:
    """Return the element type that a numpy or torch dtype (or a name) means, and its library.

    Raises:
        ArgumentTypeError: for a dtype that collectives do not know, and for bfloat16 without torch.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return dtype_named(str(dtype).removeprefix("torch."), "the buffer"), "torch"
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    kind = dtype_named(name, "the buffer")
    if kind.name == "bfloat16":
        raise ArgumentTypeError(must_be("dtype", "torch.bfloat16, since numpy has none", name))
    return kind, "numpy"


def from_memory(memory: np.ndarray[Any, Any] | None, shape: tuple[int, ...], dtype: DType, library: str) -> Any:
    """Return bytes as an array of a library, or new memory of its own where there are none.

    Args:
        memory: contiguous uint8, as many bytes as the array needs; the array keeps it alive.
        shape: of the array.
        dtype: of its elements.
        library: numpy or torch.
    """
    if memory is None:
        memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    if library == "numpy":
        return memory.view(dtype.storage).reshape(shape)
    torch = sys.modules["torch"]
    return torch.from_numpy(memory).view(getattr(torch, dtype.name)).view(shape)


def from_device_memory(memory: DeviceArray, shape: tuple[int, ...], dtype: DType, library: str) -> Any:
    """Return bytes of device memory as an array.

    Args:
        memory: bytes, as many as the array needs; the array keeps them alive.
        shape: of the array.
        dtype: of its elements.
        library: `torch` for a torch tensor, else a CuPy array.
    """
    if memory.device is _GPUS.stand_in:
        return from_memory(np.asarray(_OnHost(memory)), shape, dtype, library)
    if library == "torch":
        torch = sys.modules["torch"]
        flat = torch.as_tensor(memory, device=f"cuda:{memory.device.number}")
        return flat.view(getattr(torch, dtype.name)).view(shape)
    cupy = import_module("cupy")
    owned = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory, memory.device.number)
    return cupy.ndarray(shape, dtype.storage, cupy.cuda.MemoryPointer(owned, 0))


class _OnHost:
    """Offer the memory of a device that the host plays."""

    def __init__(self, memory: DeviceArray) -> None:
        self.memory = memory
        data = (memory.address, False)
        self.__array_interface__ = {"data": data, "typestr": "|u1", "shape": (memory.size,), "version": 3}


def flat_memory(x: Any) -> np.ndarray[Any, Any] | None:
    """Return the elements of a plain array as a flat array of their storage; None for one that needs care.

    Plain is what needs no packing: a C-ordered numpy array in native byte order, or a dense C-ordered torch CPU tensor.
    """
    if type(x) is np.ndarray:
        return x.reshape(-1) if x.flags.c_contiguous and x.dtype.isnative else None
    if (
        not _is_torch(x)
        or not x.is_cpu
        or _GPUS.stand_in is not None
        or not x.is_contiguous()
        or x.is_conj()
        or x.is_neg()
        or not x.numel()
    ):
        return None
    storage = _torch_storage(x.dtype)
    if storage is None:
        return None
    # As `_Memory`, at a fourth of the price, which is half of a short collective's.
    memory = _bytes_type(x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return np.frombuffer(memory, storage)


@lru_cache(maxsize=256)
def _bytes_type(nbytes: int) -> Any:
    """Return the ctypes array of so many bytes."""
    return ctypes.c_char * nbytes


@lru_cache(maxsize=64)
def _torch_storage(dtype: Any) -> np.dtype[Any] | None:
    """Return what holds an element of a torch dtype in numpy; None for a dtype that collectives do not know."""
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    return None if known is None else np.dtype(known.storage)
