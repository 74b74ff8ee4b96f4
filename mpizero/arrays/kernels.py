"""Local arithmetic on views: combine two into a third, copy with a cast. Exactly one rounding per result.

[Note: accumulation] 16-bit floats are widened to fp32 before they are combined, partial results stay fp32, and the
final result is rounded once (round to nearest, ties to even). A mean divides in the accumulation type before that
rounding, so that a mean of large fp16 values does not overflow on the way.

Large views are worked on in blocks that stay in a core's cache, since each of the few passes over a block (widen,
combine, divide, narrow) would otherwise go to memory.

numpy's floating-point warnings are off here: infinity minus infinity is the caller's data, and a warning that the
caller turned into an exception would stop one rank of a collective while the others wait.
"""

from __future__ import annotations

import contextvars
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.arrays.dtypes import DType
    from mpizero.arrays.view import View

__all__ = ["UFUNCS", "Quiet", "can_add_halves", "combine", "copy", "halves_adder"]

Array = np.ndarray[Any, Any]

BLOCK = 32768
"""Elements per block: 128 KiB of fp32, half of a small L2 cache with its operands."""

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_EXACT = {np.maximum, np.minimum}
"""These return one of their operands, so that 16-bit floats need no wider type."""


class Quiet:
    """Call things with numpy's floating-point warnings off, at a fraction of what `numpy.errstate` costs.

    numpy 2 keeps its settings in a context variable, so the call runs in a context of its own, where they are off. One
    thread at a time may use one of these, and not from within itself.
    """

    def __init__(self) -> None:
        context = contextvars.copy_context()
        before = np.geterr()
        context.run(np.seterr, all="ignore")
        apart = np.geterr() == before
        self.run: Callable[..., Any] = context.run if apart else _quietly
        """Call the first argument with the others."""
        if not apart:  # numpy 1, whose settings are the thread's
            np.seterr(**before)


def _quietly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments, **named)


def combine(op: str, dst: View, left: View, right: View, divisor: int = 1, *, once: bool = False) -> None:
    """Store `(left op right) / divisor` in `dst`, element by element.

    Args:
        op: sum, mean (adds; the division comes with `divisor`), prod, max or min; max and min propagate NaN.
        dst: the result; may be exactly `left` or `right`.
        left: the operand of the lower rank.
        right: the operand of the higher rank.
        divisor: 1 for a partial result, the number of ranks for the final result of a mean.
        once: whether no other rank computes the same elements. Sums of 16-bit floats then take torch's own addition,
            where torch is there, whose result has the same bits but for those of a NaN.
    """
    if once and divisor == 1 and op in {"sum", "mean"} and _add_by_torch(dst, left, right):
        return
    with np.errstate(all="ignore"):
        _combine(UFUNCS[op], dst, left, right, divisor)


def copy(dst: View, src: View, divisor: int = 1) -> None:
    """Store `src / divisor` in `dst`, with a cast where the types differ."""
    if dst.dtype == src.dtype and divisor == 1:
        np.copyto(dst.data, src.data)
        return
    with np.errstate(all="ignore"):
        for start in range(0, dst.count, BLOCK):
            part = slice(start, min(start + BLOCK, dst.count))
            value = _wide(src, part)
            _store(dst, part, value if divisor == 1 else _divided(value.copy(), divisor))


def _combine(ufunc: np.ufunc, dst: View, left: View, right: View, divisor: int) -> None:
    plain = dst.dtype == left.dtype == right.dtype and (not dst.dtype.is_half or ufunc in _EXACT)
    if plain and divisor == 1 and dst.dtype.name != "bfloat16":
        ufunc(left.data, right.data, out=dst.data)
        return
    for start in range(0, dst.count, BLOCK):
        part = slice(start, min(start + BLOCK, dst.count))
        operands = _wide(left, part), _wide(right, part)
        if dst.dtype.is_half:
            _store(dst, part, _divided(ufunc(*operands), divisor))
        else:
            _divided(ufunc(*operands, out=dst.data[part]), divisor)


def can_add_halves() -> bool:
    """Return whether torch is there to add 16-bit floats."""
    return "torch" in sys.modules


def halves_adder(dtype: DType, dst: Array, left: Array, right: Array) -> Callable[[int, int], None]:
    """Return a function of (start, stop) that adds those elements of two arrays of 16-bit floats into a third.

    As `combine(..., once=True)`, without the price of looking at the arrays for each block; they must be writable.
    """
    torch = sys.modules["torch"]
    total, low, high = (_as_torch(torch, array, dtype.name) for array in (dst, left, right))

    def add(start: int, stop: int) -> None:
        torch.add(low[start:stop], high[start:stop], out=total[start:stop])

    return add


def _add_by_torch(*views: View) -> bool:
    """Add the second and third view into the first, if a 16-bit float is among them and torch is there.

    torch widens a register at a time, adds in fp32 and rounds once. It warns of read-only memory, left to numpy here.
    """
    torch = sys.modules.get("torch")
    halves = any(view.dtype.is_half for view in views)
    if torch is None or not halves or not all(view.data.flags.writeable for view in views):
        return False
    dst, left, right = (
        _as_torch(torch, view.data, view.dtype.name) if view.dtype.is_half else torch.from_numpy(view.data)
        for view in views
    )
    if dst.dtype == torch.float32 and left.dtype == right.dtype != torch.float32:
        dst.copy_(left)
        dst.add_(right)
    else:
        torch.add(left, right, out=dst)
    return True


def _wide(view: View, part: slice) -> Array:
    """Return a part of a view in the type in which it is combined."""
    data: Array = view.data[part]
    if not view.dtype.is_half:
        return data
    torch = sys.modules.get("torch")
    if torch is not None and data.flags.writeable:  # torch warns of memory that it must not write
        return _as_torch(torch, data, view.dtype.name).float().numpy()  # type: ignore[no-any-return]
    if view.dtype.name == "float16":
        return data.astype(np.float32)
    return (data.astype(np.uint32) << 16).view(np.float32)


def _store(dst: View, part: slice, value: Array) -> None:
    """Round once, and store a block."""
    if dst.dtype.name != "bfloat16":
        dst.data[part] = value
        return
    torch = sys.modules.get("torch")
    if torch is None or np.isnan(value.min()):  # torch's bits for a NaN differ by processor
        dst.data[part] = _round_to_bfloat16(value)
    else:
        _as_torch(torch, dst.data[part], "bfloat16").copy_(torch.from_numpy(value))


def _divided(value: Array, divisor: int) -> Array:
    """Divide a block in place and return it."""
    if divisor != 1:
        # By parts: numpy divides complex numbers by (d + 0j), which rounds twice and makes NaN of infinity.
        reals = value.view(value.real.dtype)
        np.divide(reals, reals.dtype.type(divisor), out=reals)
    return value


def _round_to_bfloat16(value: Array) -> Array:
    """Return the upper halves of fp32 values, rounded to nearest with ties to even; every NaN becomes 0x7fc0."""
    bits = value.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def _as_torch(torch: Any, data: Array, name: str) -> Any:
    """Return numpy-held 16-bit floats as the torch tensor of the same memory."""
    return torch.from_numpy(data.view(np.int16)).view(getattr(torch, name))
