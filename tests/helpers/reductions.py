"""Reductions by numpy as the GPU's kernels should do them, on arrays that numpy and the kernels both see."""

import itertools
from types import SimpleNamespace

import numpy as np

from mpizero.arrays import DTYPES, View
from mpizero.arrays.kernels import combine, copy

GUARDS = itertools.cycle(range(1, 252))  # other bytes around each array, or one copied too far would not be seen


class Memory:
    """An array between guard bytes, `offset` elements after a multiple of 64 bytes; seen by numpy and by address."""

    def __init__(self, name, values, offset=0):
        self.dtype, self.guard = DTYPES[name], next(GUARDS)
        start, nbytes = 64 + offset * self.dtype.itemsize, len(values) * self.dtype.itemsize
        whole = np.full(start + nbytes + 256, self.guard, np.uint8)
        shift = -whole.ctypes.data % 64
        self.around = [whole[: shift + start], whole[shift + start + nbytes :]]
        self.data = whole[shift + start : shift + start + nbytes].view(self.dtype.storage)
        self.data[:] = values
        self.host = View(self.data, self.dtype)
        self.device = SimpleNamespace(
            data=SimpleNamespace(address=self.data.ctypes.data, size=len(values), nbytes=nbytes), dtype=self.dtype
        )

    def check_guards(self):
        assert all((part == self.guard).all() for part in self.around)


def values_of(dtype, count, rng):
    """Elements of all sizes: every bit pattern of the narrow types, usual and special numbers of the wide ones."""
    storage = np.dtype(dtype.storage)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind == "c":
        parts = [values_of(DTYPES[f"float{storage.itemsize * 4}"], count, rng) for _ in range(2)]
        with np.errstate(invalid="ignore"):
            return np.stack(parts, axis=-1).reshape(-1).view(storage)
    patterns = rng.integers(0, 256, count * storage.itemsize, dtype=np.uint8).view(storage)
    if dtype.kind in "iu":
        return patterns
    usual = rng.standard_normal(count)
    if dtype.name == "bfloat16":
        usual = (usual.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        special = np.array([0x7F80, 0xFF80, 0x7FC0, 0x8000, 1, 0x7F7F], np.uint16)
    else:
        limits = np.finfo(storage)
        special = np.array([np.inf, -np.inf, np.nan, -0.0, limits.smallest_subnormal, limits.max], storage)
    picked = np.where(rng.random(count) < 0.7, usual.astype(storage), patterns)
    return np.where(rng.random(count) < 0.05, rng.choice(special, count), picked)


def accumulated(op, sources, target, divisor=1):
    """The canonical tree over host views, by numpy, into a new array of the type named `target`."""
    out = View(np.zeros(sources[0].count, DTYPES[target].storage), DTYPES[target])
    if len(sources) == 1:
        copy(out, sources[0], divisor)
        return out
    half = 1 << (len(sources) - 1).bit_length() - 1
    left, right = (
        part[0] if len(part) == 1 else accumulated(op, part, part[0].dtype.accumulator(op).name)
        for part in (sources[:half], sources[half:])
    )
    if out.dtype.kind == "c" and op == "prod":
        out.data[:] = product(left.data, right.data)
        copy(out, View(out.data.copy(), out.dtype), divisor)
    else:
        combine(op, out, left, right, divisor)
    return out


def product(a, b):
    """Numpy may fuse a complex product's operations, depending on the processor."""
    with np.errstate(all="ignore"):
        parts = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
        return np.stack(parts, axis=-1).reshape(-1).view(a.dtype)


def check_same(got, want, op):
    """Bits are equal, but for those of NaN beside bfloat16, and for the sign of zero in max and min."""
    assert got.dtype == want.dtype
    left, right = np.ascontiguousarray(got.data), np.ascontiguousarray(want.data)
    if got.dtype.kind == "c":
        left, right = (part.view(part.real.dtype) for part in (left, right))
    if left.dtype.kind == "f":
        nan = np.isnan(right)
        np.testing.assert_array_equal(np.isnan(left), nan)
        left, right = np.where(nan, 0, left), np.where(nan, 0, right)
    if op in {"max", "min"}:
        if got.dtype.name == "bfloat16":
            left, right = (np.where(part == 0x8000, 0, part) for part in (left, right))
        np.testing.assert_array_equal(left, right)
    else:
        np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8))
