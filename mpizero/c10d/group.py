"""The process group: torch's names for operations, given to the verbs.

torch calls a Python group's methods directly from `torch.distributed`, and through a table of virtual functions from
its C++ side (DDP, functional collectives). Names have changed between versions of torch; a method has all that it had.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from mpizero import collectives as mz
from mpizero.c10d import combine
from mpizero.c10d.kept import keep
from mpizero.c10d.members import Members, Place, meet
from mpizero.c10d.ops import PLAIN
from mpizero.c10d.tensors import as_list, check_number, movable, only, packed, room_for, uneven
from mpizero.c10d.work import Operation, Pending, Work, seconds_of
from mpizero.errors import ArgumentError, CollectiveError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

__all__ = ["ProcessGroup", "create"]

NAME = "mpizero"
_torch: Any = dist  # whose type hints differ between versions
_TorchGroup: Any = dist.ProcessGroup


class ProcessGroup(_TorchGroup):
    """Be a group of ranks in torch.distributed.

    Made by `dist.init_process_group`, `dist.new_group` and what calls them. Every method of an operation starts it and
    returns a `Work`; with options that say `asyncOp=False` it is over then. Operations of one group run in the order of
    their calls; groups do not wait for each other.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(self, place: Place, members: Members) -> None:
        """Be a member of a group; `create` makes one."""
        super().__init__(place.rank, place.size)
        self.members = members
        self.comm = members.comm
        """mpizero's communicator of the group's ranks."""
        self._place = place
        self._name, self._desc = place.name, "undefined"
        self._coalesced: list[Work] | None = None
        self._closed = False

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce a tensor over all ranks, in place, by any of torch's reductions."""
        x = tensors[0] if type(tensors) is list and len(tensors) == 1 else only(tensors, "the number of tensors")
        if not getattr(opts, "asyncOp", True) and timeout is None and opts.timeout.days < 0:
            verb = PLAIN.get(hash(opts.reduceOp))
            if verb is not None:
                mz.all_reduce(x, self.comm, op=verb)
                return Work([x])
        call = Operation(self.comm, opts, timeout)
        combine.all_reduce(call, x, opts)
        return self._started(call.work([x]))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors, small ones of a dtype together."""
        call = Operation(self.comm, opts)
        combine.all_reduce_coalesced(call, tensors, opts)
        return self._started(call.work(list(tensors)))

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce a tensor to the root, in place; the other ranks' are not changed."""
        x, call = only(tensors, "the number of tensors"), Operation(self.comm, opts)
        combine.reduce(call, x, opts)
        return self._started(call.work([x]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, one per rank, of equal or different sizes, and give each rank its own."""
        out, parts, call = only(outputs, "the number of outputs"), inputs[0], Operation(self.comm, opts)
        check_number(parts, self.comm.size, "the input")
        combine.reduce_scatter(call, out, packed(parts), opts, uneven(parts))
        return self._started(call.work([out]))

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        """Reduce a tensor and give each rank its part, all of one size."""
        call = Operation(self.comm, opts)
        combine.reduce_scatter(call, output, x, opts)
        return self._started(call.work([output]))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do several `reduce_scatter_single`."""
        call = Operation(self.comm, opts)
        for out, x in zip(outputs, inputs, strict=True):
            combine.reduce_scatter(call, out, x, opts)
        return self._started(call.work(list(outputs)))

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Give every rank the root's tensors."""
        tensors, call = as_list(tensors), Operation(self.comm, opts)
        for x in tensors:
            call.start(mz.broadcast, movable(x), root=_root(opts))
        return self._started(call.work(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give every rank all ranks' tensors, of equal or different sizes, as a list."""
        outs, x, call = outputs[0], only(inputs, "the number of inputs"), Operation(self.comm, opts)
        self._gather_into(call, outs, x)
        return self._started(call.work(list(outs)))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do several `allgather`; `outputs[r][i]` gets rank r's `inputs[i]`."""
        call = Operation(self.comm, opts)
        check_number(outputs, self.comm.size, "the output")  # type: ignore[arg-type]
        for at, x in enumerate(inputs):
            self._gather_into(call, [of_rank[at] for of_rank in outputs], x)
        return self._started(call.work([x for of_rank in outputs for x in of_rank]))

    def _gather_into(self, call: Operation, outs: Sequence[Tensor], x: Tensor) -> None:
        check_number(outs, self.comm.size, "the output")
        room, unpack = room_for([movable(out) for out in outs])
        call.start(mz.all_gather, movable(x), out=room, counts=uneven(outs))
        call.then(unpack)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        """Give every rank all ranks' tensors, of one size, as one tensor."""
        call = Operation(self.comm, opts)
        call.start(mz.all_gather, movable(x), out=movable(output))
        return self._started(call.work([output]))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do several `all_gather_single`."""
        call = Operation(self.comm, opts)
        for out, x in zip(outputs, inputs, strict=True):
            call.start(mz.all_gather, movable(x), out=movable(out))
        return self._started(call.work(list(outputs)))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give the root all ranks' tensors, of one size, as a list."""
        x, call, root = only(inputs, "the number of inputs"), Operation(self.comm, opts), _root(opts)
        if self.comm.rank != root:
            call.start(mz.gather, movable(x), root=root)
            return self._started(call.work([]))
        outs = outputs[0]
        check_number(outs, self.comm.size, "the output")
        room, unpack = room_for([movable(out) for out in outs])
        call.start(mz.gather, movable(x), root=root, out=room)
        call.then(unpack)
        return self._started(call.work(list(outs)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank one of the root's tensors, all of one size."""
        out, call, root = only(outputs, "the number of outputs"), Operation(self.comm, opts), _root(opts)
        whole = None
        if self.comm.rank == root:
            check_number(inputs[0], self.comm.size, "the input")
            whole = packed([movable(part) for part in inputs[0]])
        target = movable(out)
        call.start(mz.scatter, whole, root=root, out=target, counts=[out.numel()] * self.comm.size)
        return self._started(call.work([out]))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Give rank d `inputs[d]`, and take what rank s has for this one into `outputs[s]`; sizes may all differ."""
        call = Operation(self.comm, opts)
        check_number(inputs, self.comm.size, "the input")
        check_number(outputs, self.comm.size, "the output")
        room, unpack = room_for([movable(out) for out in outputs])
        counts, out_counts = [x.numel() for x in inputs], [out.numel() for out in outputs]
        x = packed([movable(x) for x in inputs])
        call.start(mz.all_to_all, x, out=room, counts=counts, out_counts=out_counts)
        call.then(unpack)
        return self._started(call.work(list(outputs)))

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Send rows to every rank, equally many or as many as the splits say. All ranks give splits, or none does."""
        call, named = Operation(self.comm, opts), {}
        if output_split_sizes or input_split_sizes:
            named = {
                "counts": self._elements(x, input_split_sizes, "input"),
                "out_counts": self._elements(output, output_split_sizes, "output"),
            }
        call.start(mz.all_to_all, movable(x), out=movable(output), **named)
        return self._started(call.work([output]))

    def _elements(self, x: Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Return the elements that each rank sends or gets, from numbers of rows."""
        rows = x.shape[0] if x.dim() else 0
        if not splits:
            splits = [rows // self.comm.size] * self.comm.size
        if len(splits) != self.comm.size or sum(splits) != rows:
            rule = f"{self.comm.size} numbers that add up to its rows, {rows}"
            raise ArgumentError(must_be(f"{what}_split_sizes", rule, list(splits)))
        width = x.numel() // rows if rows else 0
        return [rows_of_rank * width for rows_of_rank in splits]

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Return, or be over, once every rank has come."""
        call = Operation(self.comm, opts, timeout)
        call.start(lambda _, comm, async_op: mz.barrier(comm, async_op=async_op), None)
        return self._started(call.work([]))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002
        """Return once every rank has come; rank 0 names those that do not; see `Link.monitored_barrier`.

        A method of the group alone: `dist.monitored_barrier` asks for gloo before it looks at the group.
        """
        self.members.link.monitored_barrier(seconds_of(timeout), wait_all_ranks=wait_all_ranks)

    # Messages.

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        x = only(tensors, "the number of tensors")
        return self._started(Work([x], self.members.link.send(x, peer, tag)))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group."""
        x = only(tensors, "the number of tensors")
        return self._started(Work([x], self.members.link.receive(x, peer, tag)))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from any rank of the group; the work's `source_rank` tells from which."""
        x = only(tensors, "the number of tensors")
        return self._started(Work([x], self.members.link.receive(x, None, tag)))

    # What torch asks of a group beside its operations.

    def _started(self, work: Work) -> Work:
        if work.pending is not None:
            keep(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return Work([x for work in works for x in work.result()], _Several(works))

    def split_group(self, new_ranks: list[int], timeout: Any = None, *_: Any, **named: Any) -> ProcessGroup | None:
        """Return the group of some of this group's ranks, in their order; None on the others. Collective over them."""
        if self.rank() not in new_ranks:
            return None
        name = named.get("group_name") or f"{self._name}:{','.join(map(str, new_ranks))}"
        place = Place(
            store=_torch.PrefixStore(f"{name}/", self._place.store),
            rank=new_ranks.index(self.rank()),
            size=len(new_ranks),
            name=name,
            seconds=seconds_of(timeout) or self._place.seconds,
        )
        group = _made(place, [self.members.ranks[rank] for rank in new_ranks])
        group.setGroupDesc(named.get("group_desc") or "undefined")
        return group

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Do nothing: members make a group alone."""

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Do nothing: the communicators are there."""

    def get_group_store(self) -> Any:
        """Return the store of the group's members."""
        return self._place.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time-out of what is started from now on."""
        self.members.set_timeout(seconds_of(timeout))

    _set_default_timeout = set_timeout

    def _get_backend(self, device: Any = None) -> ProcessGroup:  # noqa: ARG002
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))]

    def getBackendName(self) -> str:  # noqa: N802  (torch's)
        """Return "mpizero"."""
        return NAME

    name = _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch's C++ side finds the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return self._desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815
    group_name = pg_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the communicators count for themselves."""

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        """Refuse: ranks of other MPI jobs cannot join."""
        raise CollectiveError("merge_remote_group: a group must be of ranks of one MPI job: use dist.new_group")

    def shutdown(self) -> None:
        """Free the group's communicators; `dist.destroy_process_group` calls it. Again it does nothing."""
        if not self._closed:
            self._closed = True
            self.members.close()
            _open_groups().pop(id(self), None)

    abort = shutdown

    def __repr__(self) -> str:
        """Return name, rank and size."""
        return f"<mpizero.c10d.ProcessGroup {self._name!r}, rank {self.rank()} of {self.size()}>"

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Several:
    """Be several works at once."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    @property
    def error(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def follow(self, then: Any) -> None:
        """Call `then` after the last; the others are over before it, or soon after, and its future waits for them."""
        pending: list[Pending] = [work.pending for work in self._works if work.pending is not None]
        if pending:
            pending[-1].follow(then)
        else:
            then()


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Make the group that torch asks for; the function that is registered as the backend."""
    ranks = list(options.global_ranks_in_group)
    place = Place(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        name=str(options.group_id),
        seconds=seconds_of(options.timeout),
    )
    default = dist.group.WORLD
    if ranks and isinstance(default, ProcessGroup):
        return _made(place, [default.members.ranks[rank] for rank in ranks])
    return _made(place, None)


def _made(place: Place, ranks: list[int] | None) -> ProcessGroup:
    _close_forgotten()
    group = ProcessGroup(place, meet(place, ranks))
    _open_groups()[id(group)] = group
    return group


@cache
def _open_groups() -> dict[int, ProcessGroup]:
    """Return the groups that were made here and are not closed."""
    return {}


def _close_forgotten() -> None:
    """Close groups that were destroyed by a torch that does not tell them so (before `ProcessGroup.shutdown`)."""
    if hasattr(dist.ProcessGroup, "shutdown"):
        return
    known = {id(group) for group in dist.distributed_c10d._world.pg_map}  # noqa: SLF001
    for group in [group for at, group in _open_groups().items() if at not in known]:
        group.shutdown()


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))
