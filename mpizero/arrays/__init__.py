"""What memory is: views of numpy and torch arrays, and the local arithmetic on them. Knows no ranks and no MPI."""

from mpizero.arrays.dtypes import DTYPES, DType, dtype_named
from mpizero.arrays.kernels import combine, copy
from mpizero.arrays.view import Borrowed, View, borrow, check_no_partial_overlap, kind_of, new_like, scratch_view

__all__ = [
    "DTYPES",
    "Borrowed",
    "DType",
    "View",
    "borrow",
    "check_no_partial_overlap",
    "combine",
    "copy",
    "dtype_named",
    "kind_of",
    "new_like",
    "scratch_view",
]
