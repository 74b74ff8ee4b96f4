"""What memory is: views of numpy, torch and CuPy arrays, and the local arithmetic on them. Knows no ranks, no MPI."""

from mpizero.arrays.borrow import (
    Borrowed,
    borrow,
    check_no_partial_overlap,
    flat_memory,
    from_device_memory,
    from_memory,
    kind_of,
    new_like,
    parse_dtype,
)
from mpizero.arrays.device import Device, Event, Stream
from mpizero.arrays.device_array import DeviceArray, address_of
from mpizero.arrays.dtypes import DTYPES, DType, dtype_named
from mpizero.arrays.gpus import device_of, gpus, parse_device
from mpizero.arrays.kernels import UFUNCS, Quiet, can_add_halves, combine, copy, halves_adder
from mpizero.arrays.view import View, scratch_view

__all__ = [
    "DTYPES",
    "UFUNCS",
    "Borrowed",
    "DType",
    "Device",
    "DeviceArray",
    "Event",
    "Quiet",
    "Stream",
    "View",
    "address_of",
    "borrow",
    "can_add_halves",
    "check_no_partial_overlap",
    "combine",
    "copy",
    "device_of",
    "dtype_named",
    "flat_memory",
    "from_device_memory",
    "from_memory",
    "gpus",
    "halves_adder",
    "kind_of",
    "new_like",
    "parse_device",
    "parse_dtype",
    "scratch_view",
]
