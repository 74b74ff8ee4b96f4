"""What every rank does in a training step, in its order: computations, and collectives begun and waited for.

It is the order of `shard` from its second step on (docs/sharding.md): gathers `prefetch` units ahead at stage 3 and all
at once at stages 1 and 2, reductions in buckets of which at most two are under way where gradients are cut, and the
meetings in which ranks tell each other what they are about to do. Around it goes what is carried from and to a disk or
host memory; see [Note: what is carried] in `moved`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mpizero.plan.buckets import AT_ONCE
from mpizero.plan.flats import flats_of
from mpizero.plan.instructions import CARRIERS, GROUP, INWARD, OUTWARD, REPLICAS, WORLD, Job, Program
from mpizero.plan.layout import layout_of
from mpizero.plan.moved import DISK, HOST, streamed
from mpizero.plan.prices import Price, Prices, group_of, replicas_of
from mpizero.plan.training import setup_of

if TYPE_CHECKING:
    from mpizero.collectives.links import Cluster
    from mpizero.plan.model import UnitShape
    from mpizero.plan.training import Speeds, Training

__all__ = ["program_of"]

RECORD = 20
"""Bytes that each rank tells the others in a meeting."""


class _Unit(NamedTuple):
    """Hold what the program needs of a unit of the model."""

    name: str
    length: int
    """Elements of its flat buffer, padding included."""
    flops: float


def program_of(training: Training, cluster: Cluster, speeds: Speeds, *, group: int, choice: str) -> Program:
    """Return the program of one step.

    Args:
        training: the work.
        cluster: all ranks, placed node by node.
        speeds: how fast a rank works.
        group: over how many ranks a parameter is cut.
        choice: how algorithms are chosen; see `prices`.
    """
    return _Writer(training, cluster, speeds, group, choice).step()


class _Writer:
    """Write a program: what is where, what was begun, and what is held back."""

    def __init__(self, training: Training, cluster: Cluster, speeds: Speeds, group: int, choice: str) -> None:
        self.training, self.speeds, self.cluster = training, speeds, cluster
        self.alone = cluster.size == 1
        self.cut = training.stage >= 1 and group > 1
        self.group = group if self.cut else cluster.size
        self.hybrid = self.group < cluster.size
        self.program = Program(group=self.group, stage=training.stage if self.cut else 0, drive=speeds.drive)
        self.prices = {
            WORLD: Prices(cluster=cluster, choice=choice),
            GROUP: Prices(cluster=group_of(cluster, self.group), choice=choice),
            REPLICAS: Prices(cluster=replicas_of(cluster, self.group), choice=choice),
        }
        *blocks, root = (self._unit(unit) for unit in training.model.units)
        self.blocks, self.root = blocks, root
        self.parameters = sum(len(unit.parameters) for unit in training.model.units)
        self.gathers = self.cut and not training.node_shared
        moved = training.offload
        self.optimizer, self.params = (moved.optimizer, moved.params) if moved is not None else ("", "")
        self.released = (self.gathers or bool(self.params)) and training.stage == 3
        again = training.reshard_after_forward
        self.kept = {unit: (not again if again is not None else unit is root) for unit in (root, *blocks)}
        self.begun: dict[_Unit, int] = {}
        """Gathers that were begun and not needed so far."""
        self.reads: dict[_Unit, int] = {}
        """The same of what a disk reads ahead of a gather."""
        self.stores: list[int] = []
        """Gradients that are on their way to host memory."""
        self.held: list[_Unit] = []
        self.reducing: list[int] = []
        self.first = True
        self.meeting = -1

    def _unit(self, unit: UnitShape) -> _Unit:
        return _Unit(unit.name or "root", _length(unit.parameters, self.group), unit.flops)

    def step(self) -> Program:
        """Return the program of a step."""
        for number in range(self.training.backwards):
            last = number == self.training.backwards - 1
            self._forward(fresh=number == 0)
            self._backward(sync=last or not self.training.no_sync)
        self._update()
        return self.program

    def _forward(self, *, fresh: bool) -> None:
        """Write a forward; `fresh` says that parameters have changed since the last one."""
        order = [self.root, *self.blocks]
        if self.cut:
            self._meet(RECORD)
        if self.gathers and not self.released and fresh:
            self.begun = {unit: self._gather(unit) for unit in order}
        self._need(order, 0)
        for index, block in enumerate(self.blocks):
            self._need(order, index + 1)
            self.program.run(self._seconds(block), f"forward {block.name}")
        self.program.run(self._seconds(self.root), "forward root")

    def _need(self, order: list[_Unit], index: int) -> None:
        """Wait for a unit's parameters, and begin the gathers of those that follow."""
        unit = order[index]
        if self.released:
            if unit not in self.begun:
                self.begun[unit] = self._gather(unit)
            self._ahead(order, index + 1, self.training.prefetch)
            for later in order[index + 1 + self.training.prefetch :][:1]:
                self._expect(later)
        if (gather := self.begun.pop(unit, -1)) >= 0:
            self.program.wait(gather)

    def _expect(self, unit: _Unit) -> None:
        """Have the disk read a unit's part ahead of its gather."""
        if self.params == DISK and unit not in self.begun and unit not in self.reads:
            self.reads[unit] = self.program.post(self._carry(f"read {unit.name}", INWARD, self._part(unit)))

    def _part(self, unit: _Unit) -> float:
        """Return the bytes of a rank's part of a unit's parameters."""
        return unit.length / (self.group if self.cut else 1) * self.training.working_bytes

    def _carry(self, label: str, scope: str, nbytes: float) -> Job:
        """Return the job of moving bytes from or to this rank's disk or host memory."""
        link = CARRIERS[self.optimizer or self.params, scope]
        return Job(label, scope, Price(nbytes * self.speeds.carry, link, nbytes, 0.0, "none"))

    def _ahead(self, order: list[_Unit], start: int, count: int) -> None:
        for unit in order[start : start + count]:
            if unit not in self.begun:
                self.begun[unit] = self._gather(unit)

    def _gather(self, unit: _Unit) -> int:
        """Begin a gather, behind what it needs of a disk, which is waited for, or of host memory."""
        width = self.training.working_bytes
        if self.params == DISK:
            self._expect(unit)
            self.program.wait(self.reads.pop(unit))
        if not self.cut:
            load = self._carry(f"load {unit.name}", INWARD, self._part(unit))
            return self.program.post(load) if self.params == HOST else -1
        gather = Job(f"gather {unit.name}", GROUP, self.prices[GROUP].of("all_gather", unit.length * width, width))
        if self.params == HOST:
            return self.program.post(self._carry(f"load {unit.name}", INWARD, self._part(unit)), gather)
        return self.program.post(gather)

    def _backward(self, *, sync: bool) -> None:
        order = [unit for unit in (self.root, *reversed(self.blocks)) if not self.kept[unit]] if self.released else []
        self._ahead(order, 0, self.training.prefetch)
        if not self.alone and (sync or self.released):
            self._meet(RECORD, wait=False)
        self._enter(order, self.root)
        self.program.run(self._seconds(self.root, back=True), "backward root")
        before = None
        for block in reversed(self.blocks):
            if self.released and sync and before is not None:
                self._reduce(before)
            self._enter(order, block)
            again = self._seconds(block) if self.training.recompute else 0.0
            self.program.run(self._seconds(block, back=True) + again, f"backward {block.name}")
            if sync and not self.released:
                self._reduce(block)
            before = block
        if sync:
            self._end_backward(before)

    def _enter(self, order: list[_Unit], unit: _Unit) -> None:
        if unit in order:
            self._look()
            self._need(order, order.index(unit))

    def _end_backward(self, before: _Unit | None) -> None:
        """Write the reductions that are left, the wait for all, and the meeting about what was used."""
        if self.released and before is not None:
            self._reduce(before)
        self._reduce(self.root)
        self._flush()
        self._look()
        while self.reducing:
            self.program.wait(self.reducing.pop(0))
        self.first = True
        if not self.alone:
            self._meet(2 * RECORD + self.parameters)

    def _reduce(self, unit: _Unit) -> None:
        self.held.append(unit)
        if self.first or sum(unit.length for unit in self.held) * self._sent() >= self.training.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        """Write the reduction of what is held, after those that have to be over before."""
        held, self.held, self.first = self.held, [], False
        if not held:
            return
        length, width = sum(unit.length for unit in held), self._sent()
        label = held[0].name if len(held) == 1 else f"{held[0].name} to {held[-1].name}"
        if self.alone:
            self.stores += [self.program.post(job) for job in self._stores(label, length)]
            return
        while len(self.reducing) >= (AT_ONCE if len(held) == 1 else 1) and self._is_bounded(held):
            self._look()
            self.program.wait(self.reducing.pop(0))
        operation = "reduce_scatter" if self.cut else "all_reduce"
        jobs = [Job(f"reduce {label}", GROUP, self.prices[GROUP].of(operation, length * width, width))]
        if self.hybrid:
            share = self.prices[REPLICAS].of("all_reduce", length / self.group * 4, 4)
            jobs.append(Job(f"replicas {label}", REPLICAS, share))
        stores = self._stores(label, length)
        last = self.program.post(*jobs, *stores)
        self.reducing.append(last - len(stores))
        self.stores += [last] * len(stores)

    def _is_bounded(self, held: list[_Unit]) -> bool:
        """Return whether a reduction holds memory of its own, as `Buckets` of `plan.buckets` and `shard` have it."""
        training = self.training
        in_place = len(held) == 1 and training.wire_bytes == max(4, training.working_bytes) and not training.kept
        return self.cut or (training.device and not in_place)

    def _stores(self, label: str, length: int) -> list[Job]:
        """Return the job of sending reduced gradients to host memory, where they are to go there."""
        if self.optimizer != HOST:
            return []
        nbytes = length / (self.group if self.cut else 1) * self._sent()
        return [self._carry(f"store {label}", OUTWARD, nbytes)]

    def _sent(self) -> int:
        """Return the bytes of a gradient on the wire: fp32 where `no_sync` or replicas add to it."""
        return max(4, self.training.wire_bytes) if self.training.kept or self.hybrid else self.training.wire_bytes

    def _meet(self, nbytes: int, *, wait: bool = True) -> None:
        """Write a meeting of all ranks, for which every one of them sends so many bytes."""
        price = self.prices[WORLD].meeting(nbytes)
        # Without groups the meetings are on the communicator of the gathers, and queue behind them.
        scope = WORLD if self.hybrid else GROUP
        self.meeting = self.program.post(Job("meet", scope, price))
        if wait:
            self._look()

    def _look(self) -> None:
        if self.meeting >= 0:
            self.program.wait(self.meeting)
            self.meeting = -1

    def _seconds(self, unit: _Unit, *, back: bool = False) -> float:
        factor = self.speeds.backward if back else 1.0
        return unit.flops * self.training.tokens / self.speeds.flops * factor + self.speeds.launch

    def _update(self) -> None:
        """Write the optimizer's step, beside it what it streams, and the casts into a node's shared copy."""
        for store in self.stores:
            self.program.wait(store)
        streams = self._streams()
        elements = sum(unit.length for unit in (self.root, *self.blocks)) / (self.group if self.cut else 1)
        casts = 0.0
        if self.training.node_shared and self.cut and self.training.working_bytes < 4:
            casts = elements * self.training.working_bytes * self.cluster.copy
        self.program.run(elements * self.speeds.update + casts, "optimizer")
        for stream in streams:
            self.program.wait(stream)

    def _streams(self) -> list[int]:
        """Begin to move what the optimizer's step reads and writes of a disk, or what comes back from host memory."""
        setup = setup_of(self.training, self.cluster)
        flats = [flat for unit in self.training.model.units for flat in flats_of(unit, setup)]
        moved = streamed(flats, setup.offload, released=setup.release)
        ways = [(INWARD, moved.read)] + [(OUTWARD, moved.written)] * ((self.optimizer or self.params) == DISK)
        return [self.program.post(self._carry("stream state", scope, nbytes)) for scope, nbytes in ways if nbytes]


@lru_cache(maxsize=512)
def _length(parameters: tuple[tuple[str, tuple[int, ...]], ...], ranks: int) -> int:
    return layout_of(parameters, ranks).length
