"""What is measured beside mpizero in the same run: torch's gloo, and mpi4py's blocking calls."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.comm.raw import mpi
from mpizero.errors import MpiZeroError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.bench.calls import Arrays
    from mpizero.bench.cases import Case, Plan
    from mpizero.bench.place import HostPlace

__all__ = ["Gloo", "Mpi4py", "open_peers"]


def open_peers(plan: Plan, comm: Any, place: HostPlace) -> dict[str, Gloo | Mpi4py]:
    """Return the peers that the plan asks for, by name. Collective.

    Args:
        plan: the plan.
        comm: the ranks.
        place: where the buffers lie.

    Raises:
        MpiZeroError: on all ranks, where torch's gloo could not be loaded on any of them.
    """
    makers: dict[str, Callable[[], Gloo | Mpi4py]] = {"gloo": lambda: Gloo(comm), "mpi4py": lambda: Mpi4py(comm, place)}
    return {name: makers[name]() for name in plan.versus}


class Mpi4py:
    """Call mpi4py's blocking collectives, as a program without mpizero would."""

    def __init__(self, comm: Any, place: HostPlace) -> None:
        """Use the ranks of `comm`, an mpizero communicator, for arrays at `place`."""
        self.mpi, self.comm, self.place = mpi(), comm.mpi, place

    def call(self, case: Case, plan: Plan, arrays: Arrays) -> Callable[[], Any]:
        """Return the collective on the arrays as a function of no arguments.

        On device memory all bytes are copied to page-locked host memory first, and the result's back behind it.
        """
        x, out, before, after = self.place.on_host(arrays.x, arrays.out)
        inner = self._inner(case, plan, x, out)

        def call() -> None:
            before()
            inner()
            after()

        return inner if before is after else call

    def _inner(self, case: Case, plan: Plan, x: Any, out: Any) -> Callable[[], Any]:
        op = getattr(self.mpi, case.op.upper(), None)
        in_place = self.mpi.IN_PLACE
        is_root = self.comm.rank == plan.root
        table: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(self.comm.Allreduce, in_place, x, op),
            "reduce_scatter": partial(self.comm.Reduce_scatter_block, x, out, op),
            "all_gather": partial(self.comm.Allgather, x, out),
            "all_to_all": partial(self.comm.Alltoall, x, out),
            "broadcast": partial(self.comm.Bcast, x, plan.root),
            "reduce": partial(self.comm.Reduce, in_place if is_root else x, x if is_root else None, op, plan.root),
        }
        return table[case.operation]

    def close(self) -> None:
        """Leave the communicator, which is mpizero's."""


class Gloo:
    """Call torch.distributed's gloo in the same processes."""

    def __init__(self, comm: Any) -> None:
        """Open a store on rank 0 and a process group over the same ranks. Collective.

        Raises:
            MpiZeroError: on all ranks, where torch's gloo could not be loaded on any of them.
        """
        reasons = [reason for reason in comm.mpi.allgather(_why_not()) if reason]
        if reasons:
            raise MpiZeroError(f"--versus gloo needs torch with gloo on every rank: {reasons[0]}")
        import torch.distributed

        dist: Any = torch.distributed
        self.dist = dist
        alone = len(set(comm.hosts)) == 1
        where = None
        if comm.rank == 0:
            address = "127.0.0.1" if alone else _address()
            store = dist.TCPStore(address, 0, comm.size, is_master=True, wait_for_workers=False)
            where = (address, store.port)
        address, port = comm.mpi.bcast(where)
        if comm.rank != 0:
            store = dist.TCPStore(address, port, comm.size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def call(self, case: Case, plan: Plan, arrays: Arrays) -> Callable[[], Any]:
        """Return the collective on the arrays, seen as tensors, as a function of no arguments."""
        dist = self.dist
        x, out = _tensor(arrays.x), None if arrays.out is None else _tensor(arrays.out)
        names = {"sum": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
        op = getattr(dist.ReduceOp, names.get(case.op, "SUM"))
        table: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, x, op),
            "reduce_scatter": partial(self._named("reduce_scatter_single", "reduce_scatter_tensor"), out, x, op),
            "all_gather": partial(self._named("all_gather_single", "all_gather_into_tensor"), out, x),
            "all_to_all": partial(dist.all_to_all_single, out, x),
            "broadcast": partial(dist.broadcast, x, plan.root),
            "reduce": partial(dist.reduce, x, plan.root, op),
        }
        return table[case.operation]

    def _named(self, name: str, before: str) -> Callable[..., Any]:
        """Return a function under its name, or under the one that older versions of torch have."""
        function: Callable[..., Any] = getattr(self.dist, name, None) or getattr(self.dist, before)
        return function

    def close(self) -> None:
        """End the process group. Collective."""
        self.dist.destroy_process_group()


def _tensor(array: Any) -> Any:
    import torch

    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def _why_not() -> str:
    """Return why gloo cannot be had in this process, "" where it can."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return str(error)
    return "" if dist.is_available() and dist.is_gloo_available() else "this torch was built without gloo"


def _address() -> str:
    """Return an address of this host by which other hosts can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: asks the kernel which address it would use
            address: str = probe.getsockname()[0]
        except OSError:
            address = socket.gethostbyname(socket.gethostname())
    return address
