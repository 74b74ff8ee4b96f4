"""The reductions of gradients: which are under way, in what memory, and how many small ones make a bucket.

[Note: room for gradients] On a node a rank's peers sum its gradients where they lie, so the gradients of a unit that is
in backward are collected in memory that the node shares. There is room for the root, which collects all the time, and
for two more units: one that collects while the other's reduction waits for the slower ranks. A unit that finds no room
takes memory of its own, which peers reach by the kernel. Where nothing is cut the accumulators themselves are shared,
and reduced in place. On a GPU they are in memory of torch's allocator (see [Note: home stream] in `home`).
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.collectives import all_reduce, empty, reduce_scatter
from mpizero.errors import ShardError
from mpizero.plan.buckets import AT_ONCE, ROOMS
from mpizero.shard.agree import naming

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.comm import Work
    from mpizero.shard.gradients import Gradients
    from mpizero.shard.policy import Lifetime, Overlap, Ranks
    from mpizero.shard.transfers import Transfers
    from mpizero.shard.unit import Unit

__all__ = ["Reductions"]


@dataclass(kw_only=True, eq=False)
class _Job:
    """Be one reduction that is under way: of one flat buffer, or of several small ones packed into a bucket."""

    members: list[Gradients]
    units: list[Unit]
    work: Work | None
    part: Tensor
    """This rank's part of the result, once `work` is over."""
    total: Tensor
    """What is being reduced, kept alive."""
    dtype: torch.dtype
    """That of the gradients as they are to be sent: fp32 after `no_sync`; else the members'."""
    second: Work | None = None
    """The sum over replicas, in hybrid sharding."""
    began: float = field(default_factory=time.perf_counter)


class Reductions:
    """Run the reductions of one model in the order in which they are started, at most `AT_ONCE` that hold memory."""

    def __init__(
        self,
        ranks: Ranks,
        units: list[Unit],
        policy: tuple[Lifetime, Overlap],
        before_wait: Callable[[], None],
        observe: Callable[..., None],
        *,
        on_device: bool = False,
        transfers: Transfers | None = None,
    ) -> None:
        """Make room where ranks share memory. Collective.

        Args:
            ranks: who averages gradients.
            units: the model's, the root first.
            policy: what the stage means, and what the user chose.
            before_wait: called before this rank waits for others.
            observe: told what took time; see `Runtime.observe`.
            on_device: whether gradients are in a GPU's memory.
            transfers: what brings them to shards on the host, if these are there.
        """
        self._before_wait, self._tell = before_wait, observe
        lifetime, overlap = policy
        self.ranks, self.lifetime, self.bucket_bytes = ranks, lifetime, overlap.bucket_bytes
        self._on_device, self._transfers = on_device, transfers
        self._jobs: deque[_Job] = deque()
        self._held: list[Unit] = []
        self._held_bytes = 0
        self._first = True
        self._rooms: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        if lifetime.cut and ranks.group.board is not None and not on_device:
            sizes = [unit.gradient_bytes for unit in units]
            largest = max(sizes[1:], default=0)
            for nbytes in (sizes[0], *[largest] * min(ROOMS, len(units) - 1)):
                if nbytes >= self.bucket_bytes:
                    self._rooms.append(empty(nbytes, torch.uint8, ranks.group))
        self._largest = max((room.numel() for room in self._rooms), default=0)
        self.room_bytes = sum(room.numel() for room in self._rooms)
        """Bytes of shared memory that this rank's gradients are collected in."""

    def lend(self, unit: Unit) -> None:
        """Give a unit whose gradients begin to arrive a room that its peers can read, if one is free."""
        needed = unit.gradient_bytes
        if not self.bucket_bytes <= needed <= self._largest:  # small ones are packed with others, so copied anyway
            return
        if id(unit) in self._lent or any(gradients.incoming is not None for gradients in unit.gradients):
            return
        while not (fitting := [room for room in self._rooms if room.numel() >= needed]) and self._jobs:
            self._finish_first()
        if not fitting:
            return
        room = min(fitting, key=Tensor.numel)
        self._rooms = [other for other in self._rooms if other is not room]
        self._lent[id(unit)] = room
        at = 0
        for gradients in unit.gradients:
            gradients.room = room[at : at + gradients.nbytes].view(gradients.dtype)
            at += gradients.nbytes

    def start(self, unit: Unit) -> None:
        """Reduce a unit's gradients, or hold them until the bucket is full. Collective."""
        self._held.append(unit)
        self._held_bytes += unit.gradient_bytes
        if self._first or self._held_bytes >= self.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Start the reductions of the units in the bucket. Collective."""
        units, self._held, self._held_bytes = self._held, [], 0
        self._first = False
        if not units:
            return
        taken = [(gradients, *gradients.take()) for unit in units for gradients in unit.gradients]
        if self.ranks.everyone.size == 1:
            for gradients, total, _ in taken:
                gradients.give(total)
            return
        at_once = AT_ONCE if len(units) == 1 else 1
        for dtype in dict.fromkeys(total.dtype for _, total, _ in taken):
            alike = [item for item in taken if item[1].dtype == dtype]
            while len(self._jobs) >= at_once and self._is_bounded(alike):
                self._finish_first()
            self._jobs.append(self._launch(alike, units))

    def _is_bounded(self, taken: list[tuple[Gradients, Tensor, Tensor | None]]) -> bool:
        """Return whether a reduction holds memory of its own, so that there may be but few at a time.

        Where nothing is cut, cores of the host add gradients up where they lie, or give each bucket's memory back soon;
        the host of a GPU would issue the whole backward, and hold all its gradients, before the first sum is done.
        """
        in_place = len(taken) == 1 and taken[0][1] is taken[0][0].accumulator
        return self.lifetime.cut or (self._on_device and not in_place)

    def poll(self) -> None:
        """Advance what is under way without blocking."""
        if not self._jobs:
            return
        self.ranks.group.progress()
        if self.ranks.replicas is not None:
            self.ranks.replicas.progress()
            for job in self._jobs:
                if job.second is None and not (job.work is not None and job.work.done()):
                    break
                self._sum_over_replicas(job)

    def finish(self) -> None:
        """Reduce what is held and wait for everything that is under way. Collective."""
        self.flush()
        while self._jobs:
            self._finish_first()
        self._first = True
        if self._transfers is not None:
            self._transfers.settle()

    def forget(self) -> None:
        """Take the rooms back from a backward that raised."""
        self._held, self._held_bytes = [], 0
        while self._jobs:
            with suppress(ShardError):  # more of what it may have raised
                self._finish_first()
        self._first = True
        if self._transfers is not None:
            with suppress(ShardError):
                self._transfers.settle()
        self._rooms += self._lent.values()
        self._lent.clear()

    def _launch(self, taken: list[tuple[Gradients, Tensor, Tensor | None]], units: list[Unit]) -> _Job:
        members = [gradients for gradients, _, _ in taken]
        first, total, into = taken[0]
        if len(members) > 1:
            total, into = _pack(members, [total for _, total, _ in taken]), None
        if not total.numel():
            return _Job(members=members, units=units, work=None, part=total, total=total, dtype=total.dtype)
        dtype = total.dtype
        if self.ranks.replicas is not None:  # partial sums are fp32
            total = total.to(first.accumulator.dtype)
        op = "sum" if self.ranks.replicas is not None or self.lifetime.exact is not None else "mean"
        comm = self.ranks.group
        with comm.channel(2 * first.flat.number + 1, f"gradients of {first.flat.label}"):
            if self.lifetime.cut:
                if into is None:
                    into = total.new_empty(total.numel() // comm.size)
                work = reduce_scatter(total, comm, op=op, out=into, order="canonical", async_op=True)
            else:
                into = total if into is None else into
                out = None if into is total else into
                work = all_reduce(total, comm, op=op, out=out, order="canonical", async_op=True)
        return _Job(members=members, units=units, work=work, part=into, total=total, dtype=dtype)

    def _sum_over_replicas(self, job: _Job) -> None:
        """Begin to sum a part over the ranks that hold the same shards."""
        if job.second is None and job.work is not None:
            job.work.wait()
            replicas, flat = self.ranks.replicas, job.members[0].flat
            with replicas.channel(2 * flat.number + 1, f"gradients of {flat.label}"):
                job.second = all_reduce(job.part, replicas, order="canonical", async_op=True)

    def _finish_first(self) -> None:
        self._before_wait()
        job = self._jobs.popleft()
        start = time.perf_counter()
        with naming(f"gradients of {job.members[0].flat.label}"):
            part = job.part if job.work is None else job.work.wait()
            if self.ranks.replicas is not None and job.work is not None:
                self._sum_over_replicas(job)
                assert job.second is not None  # noqa: S101  (just begun)
                part = job.second.wait()
        if job.second is not None:
            if self.lifetime.exact is None:
                part.div_(self.ranks.everyone.size)
            part = part.to(job.dtype).to(part.dtype)  # rounded where the one sum of all ranks would be
        for gradients, piece in zip(job.members, _parts(job.members, part), strict=True):
            gradients.give(piece)
        self._observe(job, start)
        for unit in job.units:
            busy = any(unit in other.units for other in self._jobs)  # another dtype's is under way
            room = None if busy else self._lent.pop(id(unit), None)
            if room is not None:
                self._rooms.append(room)

    def _observe(self, job: _Job, start: float) -> None:
        """Tell of a reduction that is over, and of the wait for it."""
        last = job.second or job.work
        if last is None:
            return
        self._tell("wait", job.units[0].name, start)
        for unit in job.units:
            self._tell("reduce", unit.name, job.began, last.ended, unit.gradient_bytes)


def _pack(members: list[Gradients], totals: list[Tensor]) -> Tensor:
    """Return the gradients of small buffers as one, in which each rank's parts lie side by side."""
    if not members[0].flat.lifetime.cut:
        return torch.cat(totals)
    ranks = members[0].flat.layout.ranks
    return torch.cat([total.view(ranks, -1) for total in totals], dim=1).view(-1)


def _parts(members: list[Gradients], part: Tensor) -> Any:
    """Return each buffer's elements of a bucket's result."""
    if len(members) == 1:
        return [part]
    return part.split([gradients.accumulator.numel() for gradients in members])
