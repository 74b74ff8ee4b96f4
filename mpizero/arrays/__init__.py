"""What memory is: views of numpy and torch arrays, and the local arithmetic on them. Knows no ranks and no MPI."""

from mpizero.arrays.dtypes import DTYPES, DType, dtype_named
from mpizero.arrays.kernels import UFUNCS, Quiet, can_add_halves, combine, copy, halves_adder
from mpizero.arrays.view import (
    Borrowed,
    View,
    borrow,
    check_no_partial_overlap,
    flat_memory,
    from_memory,
    kind_of,
    new_like,
    parse_dtype,
    scratch_view,
)

__all__ = [
    "DTYPES",
    "UFUNCS",
    "Borrowed",
    "DType",
    "Quiet",
    "View",
    "borrow",
    "can_add_halves",
    "check_no_partial_overlap",
    "combine",
    "copy",
    "dtype_named",
    "flat_memory",
    "from_memory",
    "halves_adder",
    "kind_of",
    "new_like",
    "parse_dtype",
    "scratch_view",
]
