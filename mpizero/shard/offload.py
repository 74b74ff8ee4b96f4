"""What is moved out of memory: the choice, and where a rank's part of the parameters then lies.

[Note: offloaded parts] Of one flat buffer, with k elements of this rank's, what `full` is filled from is its source:

- nothing is moved, or the master values stay in memory and are what is gathered: `master`, as ever;
- master values on disk, in another precision than is computed in: `working`, k elements in compute precision, which the
  optimizer's step writes together with the master values: a slice of `full` where that always lives, else of its own;
- parameters on disk: a region, from which a gather reads this rank's part straight into `full`.

Master values on disk are mapped: the shards that users, checkpoints and guards see are as ever, and their pages come
when they are touched. A change in place of these is brought to `working` before the next gather; the optimizer streams
past the mapping instead, see `optim.streaming`.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.arrays.disk import BLOCK, Region, Scratch
from mpizero.errors import ArgumentError, ArgumentTypeError, DiskError, MpiZeroError, must_be
from mpizero.shard.agree import raise_together

if TYPE_CHECKING:
    from mpizero.shard.policy import Lifetime

__all__ = ["Offload", "Source", "Spill", "check_spill", "checked_offload", "make_spill"]

CPU = "cpu"
Place = str | os.PathLike[str] | None
"""Memory or a folder."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Choose what lives outside the memory in which a sharded model computes (ZeRO-Offload, ZeRO-Infinity).

    Source: Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity", 2021.
    """

    optimizer: Place = CPU
    """Where the optimizer's state is, with the master values that it updates if those are not what is computed with:
    "cpu" for host memory, or a folder on a disk of this host. The optimizer has to come from `mpizero.offloaded`."""
    params: Place = None
    """Where this rank's part of the parameters is between its uses, at stage 3: None with the model, or a folder. The
    node's ranks then share no full parameters."""
    group_bytes: int = 32 << 20
    """Bytes of state that are read, updated and written at a time; three such groups are in memory in a step."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("optimizer", "params"):
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike, type(None))):
                rule = 'None, "cpu" or the path of a folder'
                raise ArgumentTypeError(must_be(f"Offload.{name}", rule, value))
        least = 16 * BLOCK
        most: Any = self.group_bytes
        if not isinstance(most, int) or isinstance(most, bool) or most < least:
            raise ArgumentError(must_be("Offload.group_bytes", f"a whole number, {least} or more", most))

    def folder(self, name: str) -> Path | None:
        """Return the folder on a disk that a field names; None for memory."""
        value = getattr(self, name)
        return None if value in {None, CPU} else Path(value)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return what all ranks have to choose alike: folders may differ between them."""
        return tuple(name for name in ("optimizer", "params") if self.folder(name) is not None)

    def check(self, stage: int, *, on_device: bool, node_shared: Any) -> None:
        """Raise ArgumentError where a stage, a device or shared parameters do not go with it."""
        if on_device:
            rule = "None for a model on a GPU, so far"
            raise ArgumentError(must_be("offload", rule, self, "put the model into host memory"))
        if stage == 0:
            remedy = "take stage 1, 2 or 3"
            raise ArgumentError(must_be("offload", "None at stage 0, where nothing is cut", self, remedy))
        if self.folder("params") is not None and stage != 3:
            rule = "None below stage 3, where full parameters always live"
            raise ArgumentError(must_be("Offload.params", rule, str(self.params)))
        if self.folder("params") is not None and node_shared:
            rule = "None or False with parameters on disk"
            raise ArgumentError(must_be("node_shared", rule, node_shared))


class Spill:
    """Hold the scratch files of one model's rank."""

    def __init__(self, offload: Offload) -> None:
        """Make the files.

        Raises:
            DiskError: if a folder cannot be used.
        """
        self.offload = offload
        folders = {name: offload.folder(name) for name in ("optimizer", "params")}
        made = {folder: Scratch(folder) for folder in dict.fromkeys(folders.values()) if folder is not None}
        self.files = list(made.values())
        self.optimizer = None if folders["optimizer"] is None else made[folders["optimizer"]]
        self.params = None if folders["params"] is None else made[folders["params"]]
        self.failure: MpiZeroError | str = ""
        """What failed while the model was moved, until all ranks know."""

    def source(self, master: Tensor, dtype: torch.dtype, lifetime: Lifetime, full: Tensor | None) -> Source:
        """Return where one flat buffer's part lies, its values moved there.

        Args:
            master: this rank's k master values.
            dtype: in which is computed.
            lifetime: of the full parameters.
            full: this rank's slice of those, where they always live.
        """
        try:
            return self._source(master, dtype, lifetime, full)
        except MpiZeroError as error:  # told when all ranks have come to the end of this
            self.failure = self.failure or error
            return Source(master)

    def _source(self, master: Tensor, dtype: torch.dtype, lifetime: Lifetime, full: Tensor | None) -> Source:
        apart = dtype != master.dtype
        to_disk = self.optimizer if apart else self.params
        region = None
        if to_disk is not None and master.numel():
            region = to_disk.grow(master.numel() * master.element_size())
            moved = torch.from_numpy(region.array()).view(master.dtype)
            moved.copy_(master)
            region.settle()
        else:
            moved = master
        source = Source(moved, region)
        if self.params is not None and apart and master.numel():
            source.on_disk = self.params.grow(master.numel() * dtype.itemsize)
            write(source.on_disk, master.to(dtype))
        elif self.params is not None and region is not None:
            source.on_disk = region
        elif apart and region is not None:
            source.working = master.to(dtype) if lifetime.release_parameters or full is None else full
            source.working.copy_(master)
        return source

    @property
    def nbytes(self) -> int:
        """Return the bytes of disk that are taken."""
        return sum(file.nbytes for file in self.files)

    @property
    def moved(self) -> int:
        """Return the bytes that were read and written so far."""
        return sum(file.bytes_read + file.bytes_written for file in self.files)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is a mapped part of a file; of one without elements, its storage."""
        return any(file.holds(tensor.untyped_storage().data_ptr()) for file in self.files)


class Source:
    """Be what a rank's part of a flat buffer's full parameters is filled from; see [Note: offloaded parts]."""

    def __init__(self, master: Tensor, region: Region | None = None) -> None:
        self.master = master
        self.region = region
        """Where the master values are on disk."""
        self.working: Tensor | None = None
        self.on_disk: Region | None = None
        """Where the values in compute precision are on disk."""
        self._known = self._version()
        """The master values' version of which the working values are."""
        self._streamed = False

    def fill(self, target: Tensor) -> None:
        """Put this rank's part, in compute precision, into memory of its size.

        Raises:
            DiskError: if the disk fails.
        """
        self._freshen(target.dtype)
        if self.on_disk is not None:
            self.on_disk.read(raw(target), buffered=True)  # where `expect` has it read ahead
        elif self.working is None:
            target.copy_(self.master)
        elif self.working.data_ptr() != target.data_ptr():
            target.copy_(self.working)

    def _freshen(self, dtype: torch.dtype) -> None:
        """Bring a change in place of the master values, by the user or by a load, to the working values."""
        if self._known == self._version():
            return
        if self.working is not None:
            self.working.copy_(self.master)
        elif self.on_disk is not None and self.on_disk is not self.region:
            write(self.on_disk, self.master.to(dtype))
        if self.region is not None:
            self.region.settle()
        self._known = self._version()

    def expect(self) -> None:
        """Have the disk begin to read what `fill` will soon need."""
        if self.on_disk is not None:
            self.on_disk.expect()

    def streamed(self) -> None:
        """Say that a step has written master and working values alike, past the mapping, where there was a gradient."""
        self._streamed = self._known == self._version()  # else somebody has changed more than the step has written
        if self.region is not None:
            torch.autograd.graph.increment_version(self.master)  # as a step in memory would have

    def stepped(self) -> None:
        """Say that an optimizer has stepped; torch's fused ones do not count as a change in place."""
        self._known = self._version() if self._streamed else -1
        self._streamed = False

    def _version(self) -> int:
        return self.master._version  # noqa: SLF001


def checked_offload(offload: Any, stage: int, *, on_device: bool, node_shared: Any) -> Offload | None:
    """Return it; raise ArgumentTypeError if it is something else, ArgumentError where it does not go with the rest."""
    if offload is None:
        return None
    if not isinstance(offload, Offload):
        remedy = 'write mpizero.Offload(optimizer="/path/of/a/local/disk")'
        raise ArgumentTypeError(must_be("offload", "an mpizero.Offload or None", offload, remedy))
    offload.check(stage, on_device=on_device, node_shared=node_shared)
    return offload


def make_spill(offload: Offload | None, comm: Any) -> Spill | None:
    """Make the scratch files of all ranks, if something is to be moved. Collective then.

    Raises:
        DiskError: on all ranks, if that of some rank cannot be made.
    """
    if offload is None:
        return None
    spill: Spill | None = None
    failure: MpiZeroError | str = ""
    try:
        spill = Spill(offload)
    except MpiZeroError as error:
        failure = error
    raise_together(comm, failure, DiskError)
    for file in spill.files if spill is not None and comm.rank == 0 else ():
        if file.in_memory:
            text = f"{file.folder} is memory (tmpfs), not a disk: what is moved there still takes it"
            warnings.warn(text, stacklevel=4)
    return spill


def check_spill(spill: Spill | None, comm: Any) -> None:
    """Raise DiskError on every rank if moving the model has failed on some. Collective where something was moved."""
    if spill is not None:
        raise_together(comm, spill.failure, DiskError)


def write(region: Region, values: Tensor) -> None:
    """Write a contiguous tensor to its region."""
    region.write(raw(values))


def raw(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory as bytes; the tensor has to outlive them.

    Not by `numpy`, after which torch would not let a storage be emptied any more.
    """
    nbytes = values.numel() * values.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(values.data_ptr())).cast("B")
