"""A short measurement of the links between ranks: messages to and fro, within a host and between two."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpizero.comm.waiting import poll
from mpizero.errors import CollectiveTimeoutError

__all__ = ["Points", "measure_links"]

Points = list[tuple[int, float]]
"""(bytes of a message, seconds one way)."""

SIZES = ((8, 20), (512 << 10, 3), (2 << 20, 2))
"""Bytes, and how many times there and back; at 1 Gbit/s all of it takes some 0.15 s. Shorter ones would be carried by
what buffers on the way hold, and look faster than a wire is."""

LONG = 600.0


def measure_links(mpi_comm: Any, nodes: tuple[int, ...]) -> dict[str, Points]:
    """Time messages between two ranks of one node, and between the first two nodes. Collective.

    Args:
        mpi_comm: an mpi4py communicator in whose messages nobody else takes part.
        nodes: the node number of each rank.

    Returns:
        Points under `local` and `remote`, equal on all ranks; a kind of link that does not exist has none.
    """
    pairs = {"local": _first_pair(nodes, alike=True), "remote": _first_pair(nodes, alike=False)}
    found: dict[str, Points] = {}
    for kind, pair in pairs.items():
        points = _between(mpi_comm, *pair) if pair is not None else []
        _finish(mpi_comm.Ibarrier())  # ranks that wait in a blocking call would spin on the cores of those that measure
        found[kind] = mpi_comm.bcast(points, root=pair[0] if pair is not None else 0)
    return found


def _finish(request: Any) -> None:
    """Wait as collectives do."""
    if not poll(request.Test, LONG, lambda: "the first measurement of links waits for a peer"):
        raise CollectiveTimeoutError(f"a rank must answer within {LONG:.0f} s in the first measurement of links")


def _first_pair(nodes: tuple[int, ...], *, alike: bool) -> tuple[int, int] | None:
    """Return two ranks, of the same node or of different ones."""
    for low, first in enumerate(nodes):
        for high in range(low + 1, len(nodes)):
            if (nodes[high] == first) == alike:
                return low, high
    return None


def _between(mpi_comm: Any, one: int, other: int) -> Points:
    """Return the points of one pair; empty on the ranks beside it."""
    if mpi_comm.rank not in {one, other}:
        return []
    peer = other if mpi_comm.rank == one else one
    points = []
    for nbytes, times in SIZES:
        data = np.zeros(nbytes, np.uint8)
        seconds = []
        for _ in range(times + 1):
            start = time.perf_counter()
            for sends in (mpi_comm.rank == one, mpi_comm.rank != one):
                _finish(mpi_comm.Isend(data, peer) if sends else mpi_comm.Irecv(data, peer))
            seconds.append((time.perf_counter() - start) / 2)
        points.append((nbytes, float(np.median(seconds[1:]))))
    return points
