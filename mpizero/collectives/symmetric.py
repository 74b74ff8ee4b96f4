"""`mpizero.empty`: memory that the other ranks of the host can load and store like their own."""

from __future__ import annotations

import os
from typing import Any

from mpizero.arrays import from_memory, parse_dtype
from mpizero.collectives.call import default_communicator
from mpizero.errors import ArgumentError, must_be

__all__ = ["empty"]


def empty(shape: int | tuple[int, ...], dtype: Any = "float32", comm: Any = None) -> Any:
    """Return a new symmetric buffer: an array in memory that all ranks of this host have mapped. Collective.

    Collectives on such buffers move each byte once, by loads and stores, where other memory takes messages or the
    kernel's help. The memory is given back, for the next buffers, when the array and all its views have been dropped on
    every rank. Where /dev/shm has no room, one rank says so and all get private memory, slower and otherwise the same.

    Args:
        shape: of the array, the same on all ranks.
        dtype: a numpy dtype or its name for a numpy array, a torch dtype for a torch tensor.
        comm: the communicator; None means `mpizero.world()`.

    Returns:
        An uninitialised, C-ordered array.

    Raises:
        ArgumentError: for a negative extent.
        ArgumentTypeError: for a dtype that no collective takes.
    """
    comm = default_communicator(comm)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ArgumentError(must_be("shape", "whole numbers of 0 or more", shape))
    kind, library = parse_dtype(dtype)
    count = 1
    for extent in extents:
        count *= extent
    nbytes = count * kind.itemsize
    comm.notes.pop("plans", None)  # they may hold memory of buffers that are gone
    heap = getattr(comm, "heap", None)
    memory = None if heap is None else heap.allocate(nbytes)
    if memory is None and heap is not None and comm.node.rank == 0:
        os.write(2, _apology(nbytes, comm).encode())
    return from_memory(memory, extents, kind, library)


def _apology(nbytes: int, comm: Any) -> str:
    from mpizero.comm.segment import free_bytes

    ranks = comm.node.size
    return (
        f"mpizero: symmetric buffers need {nbytes * ranks:,} bytes of /dev/shm for {ranks} ranks on "
        f"{comm.hosts[comm.rank]} (got {free_bytes():,} free): private memory is used instead, which is slower; "
        "a container gets more with --shm-size\n"
    )
