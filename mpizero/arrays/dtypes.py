"""What mpizero needs to know of an element type: its width, its kind, and the type in which it is accumulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpizero.errors import ArgumentTypeError, must_be

__all__ = ["DTYPES", "DType", "dtype_named"]


@dataclass(frozen=True, kw_only=True)
class DType:
    """Describe one element type.

    numpy has no bfloat16: such elements are stored as the `uint16` that holds their bits, hence `storage`.
    """

    name: str
    """The name that numpy and torch share, as `float32`."""
    kind: str
    """`f` float, `i` signed, `u` unsigned, `c` complex, `b` bool."""
    storage: npt.DTypeLike
    """The numpy dtype that holds one element's bytes."""
    accumulate: str
    """The name of the type in which sums of such elements are kept: float32 for 16-bit floats, else the type itself."""

    @cached_property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return np.dtype(self.storage).itemsize

    @property
    def is_half(self) -> bool:
        """Return whether this is a 16-bit float."""
        return self.kind == "f" and self.itemsize == 2

    def accumulator(self, op: str) -> DType:
        """Return the type of partial results of `op`: max and min never round, so they keep the type itself."""
        return self if op in {"max", "min"} else DTYPES[self.accumulate]


def _table() -> dict[str, DType]:
    table = {
        "bfloat16": DType(name="bfloat16", kind="f", storage=np.uint16, accumulate="float32"),
        "float16": DType(name="float16", kind="f", storage=np.float16, accumulate="float32"),
        "bool": DType(name="bool", kind="b", storage=np.bool_, accumulate="bool"),
    }
    plain = ["float32", "float64", "complex64", "complex128"]
    plain += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    for name in plain:
        table[name] = DType(name=name, kind=np.dtype(name).kind, storage=np.dtype(name), accumulate=name)
    return table


DTYPES: dict[str, DType] = _table()


def dtype_named(name: str, what: Any = "x") -> DType:
    """Return the type called `name`; raise ArgumentTypeError, with the known names, for any other."""
    try:
        return DTYPES[name]
    except KeyError:
        known = ", ".join(sorted(DTYPES))
        raise ArgumentTypeError(must_be(f"dtype of {what}", f"one of {known}", name, "cast it first")) from None
