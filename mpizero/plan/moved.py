"""What is moved out of the memory in which a model computes: the choice, and the bytes that a step carries to and fro.

[Note: what is carried] With `disk`, the optimizer's step reads all state and writes it back, group by group, and at
stage 3 each gather of moved parameters reads this rank's part, in forward and again in backward; it follows
`mpizero.optim.streaming` and `mpizero.shard.source`. With `host`, each gradient shard goes to host memory once it is
reduced, in the precision in which it was sent, and the updated shard comes back in compute precision: after the step,
or, of parameters that live there, at each gather; it follows `mpizero.shard.transfers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.arrays.disk import whole_blocks
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.plan.groups import GROUP_BYTES, IN_MEMORY, LEAST, cut_groups, elements_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpizero.plan.flats import Flat

__all__ = ["DISK", "HOST", "Carried", "Carriers", "Moved", "groups_bytes", "streamed"]

HOST, DISK = "host", "disk"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Say what is moved, and where to; see `mpizero.Offload`, whose fields these are."""

    optimizer: str = ""
    """`disk`, `host`, or "" where the optimizer's state stays with the model."""
    params: str = ""
    """The same of this rank's part of the parameters between its uses, at stage 3."""
    group_bytes: int = GROUP_BYTES
    """Bytes of state that are read, updated and written at a time, from a disk."""

    def __post_init__(self) -> None:
        """Check the fields; raise ArgumentError, or ArgumentTypeError for a number that is not whole."""
        for name in ("optimizer", "params"):
            if (value := getattr(self, name)) not in {HOST, DISK, ""}:
                raise ArgumentError(must_be(f"offload of {name}", f"{DISK} or {HOST}", value))
        if not self.place:
            raise ArgumentError(must_be("offload", "of optimizer or params", "neither"))
        most: object = self.group_bytes
        if not isinstance(most, int) or isinstance(most, bool):
            raise ArgumentTypeError(must_be("group_bytes", "a whole number", most))
        if most < LEAST:
            raise ArgumentError(must_be("group_bytes", f"{LEAST} or more", most))

    @property
    def place(self) -> str:
        """Return where all that is moved goes."""
        return self.optimizer or self.params

    def at(self, stage: int) -> Moved | None:
        """Return what of it a stage can move: nothing at 0, which cuts nothing, and parameters at 3 alone."""
        if stage == 0 or (stage < 3 and not self.optimizer):
            return None
        return self if stage == 3 else Moved(optimizer=self.optimizer, group_bytes=self.group_bytes)

    def check(self, stage: int, *, on_gpu: bool, node_shared: bool) -> None:
        """Raise ArgumentError where a stage, a device or shared parameters do not go with it."""
        if stage == 0:
            raise ArgumentError(must_be("offload", "None at stage 0, where nothing is cut", self.place))
        if {self.optimizer, self.params} == {HOST, DISK}:
            got = f"optimizer={self.optimizer}, params={self.params}"
            raise ArgumentError(must_be("offload", "to one place, disk or host", got))
        if self.params == HOST and not self.optimizer:
            rule = "of optimizer and params: what the host has is updated there"
            raise ArgumentError(must_be("offload to host memory", rule, "params alone"))
        if self.params and stage != 3:
            rule = "left out below stage 3, where full parameters always live"
            raise ArgumentError(must_be("offload of params", rule, self.params))
        if on_gpu != (self.place == HOST):
            rule = f"to {HOST} for a model on a GPU: its way to a disk is not modelled yet"
            remedy = "take optimizer=host, or a model in host memory (--device cpu)"
            if not on_gpu:
                rule = f"to {DISK} for a model that lies in host memory"
                remedy = "take optimizer=disk, or a model on a GPU (--device gpu)"
            raise ArgumentError(must_be("offload", rule, self.place, remedy))
        if self.params and node_shared:
            raise ArgumentError(must_be("node_shared", "False or None where parameters are moved", node_shared))


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Hold the bytes that one rank moves from and to its disk or host memory in a step; see [Note: what is carried]."""

    gathered: float = 0
    """Read, or copied to the device, by gathers."""
    read: float = 0
    """The same for the optimizer's step, once."""
    written: float = 0
    """Written by the optimizer's step, or gradients that go to the host."""


@dataclass(frozen=True, kw_only=True)
class Carriers:
    """Say how long a byte takes, in each direction while as many go in the other: assumptions, until measured."""

    disk: float = 0.5e-9
    """Seconds per byte of a node's disk, of which its ranks have equal parts: 2 GB/s read and 2 GB/s written at once,
    as a local NVMe disk; `mpizero doctor --disk PATH` measures it."""
    host: float = 0.04e-9
    """Seconds per byte between one GPU and host memory: 25 GB/s, as PCIe 4 with 16 lanes."""

    def per_byte(self, moved: Moved | None, per_node: int) -> float:
        """Return the seconds per byte that one rank has, of so many on a node that all use the disk at once."""
        if moved is None:
            return 0.0
        return self.disk * per_node if moved.place == DISK else self.host


def streamed(flats: Iterable[Flat], moved: Moved | None, *, released: bool) -> Carried:
    """Return what a step carries once, the last blocks of a disk whole; gathers and reductions come on top.

    Args:
        flats: this rank's buffers.
        moved: the choice.
        released: whether full parameters live from a unit's gather to its release.
    """
    read = written = 0
    size = whole_blocks if moved is not None and moved.optimizer == DISK else int
    for flat in flats:
        if moved is None or not flat.trained:
            continue
        if moved.place == HOST:
            read += 0 if moved.params else flat.shard * flat.full
        else:
            to_read, to_write = _widths(flat, moved, released=released)
            read += sum(size(flat.shard * width) for width in to_read)
            written += sum(size(flat.shard * width) for width in to_write)
    return Carried(read=read, written=written)


def _widths(flat: Flat, moved: Moved, *, released: bool) -> tuple[list[int], list[int]]:
    """Return the bytes of an element in each array that a step over a disk reads, and in each that it writes."""
    apart = flat.full != flat.master
    there = bool(moved.optimizer) if apart else bool(moved.params) and released
    moments = [flat.master] * flat.moments if moved.optimizer else []
    both = [flat.master] * there + moments
    return both, both + ([flat.full] if apart and moved.params else [])


def groups_bytes(flats: Iterable[Flat], moved: Moved | None, *, released: bool) -> int:
    """Return the bytes of memory through which a step over a disk streams, from the second step on; 0 for others.

    Args:
        flats: this rank's buffers, those of the root first.
        moved: the choice.
        released: whether full parameters live from a unit's gather to its release.
    """
    if moved is None or moved.optimizer != DISK:
        return 0
    arrays = [(flat.shard, _widths(flat, moved, released=released)[1]) for flat in flats if flat.trained]
    widest = max((sum(widths) for _, widths in arrays), default=0)
    groups = cut_groups((length for length, _ in arrays), elements_of(moved.group_bytes, widest))
    sizes = (
        sum(whole_blocks((stop - start) * width) for index, start, stop in group for width in arrays[index][1])
        for group in groups
    )
    return IN_MEMORY * max(sizes, default=0)
