"""What is moved out of a model's memory: the choice, and the files and copies that it takes."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.arrays import device_of
from mpizero.arrays.disk import Region, Scratch
from mpizero.arrays.trim import give_back
from mpizero.errors import ArgumentError, ArgumentTypeError, DeviceMemoryError, DiskError, MpiZeroError, must_be
from mpizero.plan.groups import GROUP_BYTES, LEAST
from mpizero.shard.agree import raise_together
from mpizero.shard.source import Source, write
from mpizero.shard.transfers import Transfers

if TYPE_CHECKING:
    from mpizero.shard.policy import Lifetime

__all__ = ["Offload", "OnLoan", "Spill", "check_spill", "checked_offload", "make_spill"]

CPU = "cpu"
FIELDS = ("optimizer", "params")
Place = str | os.PathLike[str] | None
"""Memory or a folder."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Choose what lives outside the memory in which a sharded model computes (ZeRO-Offload, ZeRO-Infinity).

    Source: Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity", 2021.
    """

    optimizer: Place = CPU
    """Where the optimizer's state is, with the master values that it updates if those are not what is computed with:
    "cpu" for host memory, where those of a model in host memory are anyway, or a folder on a disk of this host, with
    which the optimizer has to come from `mpizero.offloaded`. Of a model on a GPU the shards, their gradients and all
    that the optimizer does move to the host."""
    params: Place = None
    """Where this rank's part of the parameters is between its uses, at stage 3: None with the model, "cpu" in host
    memory, or a folder. With a folder the node's ranks share no full parameters."""
    pin: bool = True
    """Whether host memory that a GPU copies from and to is page-locked; means nothing for a model in host memory."""
    group_bytes: int = GROUP_BYTES
    """Bytes of state that are read, updated and written at a time; three such groups are in memory in a step."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in FIELDS:
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike, type(None))):
                rule = 'None, "cpu" or the path of a folder'
                raise ArgumentTypeError(must_be(f"Offload.{name}", rule, value))
            if value in {"disk", "host", "gpu", "cuda"}:
                rule = '"cpu" for host memory, or the path of a folder on a disk'
                raise ArgumentError(must_be(f"Offload.{name}", rule, value, 'write "./" before the name of a folder'))
        if not isinstance(self.pin, bool):
            raise ArgumentTypeError(must_be("Offload.pin", "True or False", self.pin))
        most: Any = self.group_bytes
        if not isinstance(most, int) or isinstance(most, bool) or most < LEAST:
            raise ArgumentError(must_be("Offload.group_bytes", f"a whole number, {LEAST} or more", most))

    def folder(self, name: str) -> Path | None:
        """Return the folder on a disk that a field names; None for memory."""
        value = getattr(self, name)
        return None if value in {None, CPU} else Path(value)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return what all ranks have to choose alike: folders may differ between them."""
        found = {name: "disk" if self.folder(name) is not None else getattr(self, name) for name in FIELDS}
        return tuple(f"{name} {value}" for name, value in found.items())

    def check(self, stage: int, *, node_shared: Any) -> None:
        """Raise ArgumentError where a stage or shared parameters do not go with it."""
        if stage == 0:
            remedy = "take stage 1, 2 or 3"
            raise ArgumentError(must_be("offload", "None at stage 0, where nothing is cut", self, remedy))
        if self.params is not None and stage != 3:
            rule = "None below stage 3, where full parameters always live"
            raise ArgumentError(must_be("Offload.params", rule, str(self.params), "take stage 3"))
        if self.folder("params") is not None and node_shared:
            rule = "None or False with parameters on disk"
            raise ArgumentError(must_be("node_shared", rule, node_shared))


class Spill:
    """Hold the scratch files of one model's rank, and its copies between a GPU and the host."""

    def __init__(self, offload: Offload, device: torch.device) -> None:
        """Make the files.

        Args:
            offload: what goes where.
            device: where the model is.

        Raises:
            ArgumentTypeError: for a GPU where CuPy is not installed.
            DiskError: if a folder cannot be used.
        """
        self.offload = offload
        found = device_of(torch.empty(0, device=device))
        self.transfers = None if found is None else Transfers(found, pin=offload.pin)
        """Copies between the model's device and the host; None for a model in host memory."""
        folders = {name: offload.folder(name) for name in FIELDS}
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
        if self.files:
            give_back()  # of the buffer before
        try:
            return self._source(master, dtype, None if lifetime.release_parameters else full)
        except MpiZeroError as error:  # told when all ranks have come to the end of this
            self.failure = self.failure or error
            return Source(master)

    def _source(self, master: Tensor, dtype: torch.dtype, full: Tensor | None) -> Source:
        apart = self.transfers is not None or dtype != master.dtype
        moved, region = self._moved(master, self.optimizer if apart else self.params)
        source = Source(moved, region, self.transfers)
        if self.params is not None and master.numel():
            source.on_disk = region
            if apart and not (region is not None and region.scratch is self.params and dtype == master.dtype):
                source.on_disk = self.params.grow(master.numel() * dtype.itemsize)
                write(source.on_disk, moved.to(dtype))
                if region is not None:
                    region.settle()
        elif self.transfers is not None and self.offload.params == CPU:
            source.parked = self.transfers.take(master.numel(), dtype).copy_(moved)
        elif apart and (region is not None or self.transfers is not None):
            source.working = master.to(dtype, copy=True) if full is None else full
            source.working.copy_(master)
        return source

    def _moved(self, master: Tensor, to_disk: Scratch | None) -> tuple[Tensor, Region | None]:
        """Return the master values where they will be, and the region that is that on a disk."""
        if to_disk is None or not master.numel():
            if self.transfers is None:
                return master, None
            return self.transfers.take(master.numel(), master.dtype).copy_(master), None
        region = to_disk.grow(master.numel() * master.element_size())
        moved = torch.from_numpy(region.array()).view(master.dtype)
        moved.copy_(master)
        region.settle()
        return moved, region

    @property
    def nbytes(self) -> int:
        """Return the bytes of disk that are taken."""
        return sum(file.nbytes for file in self.files)

    @property
    def moved(self) -> int:
        """Return the bytes that were read and written so far."""
        return sum(file.bytes_read + file.bytes_written for file in self.files)

    @property
    def copied(self) -> int:
        """Return the bytes that went between the model's device and host memory so far."""
        return 0 if self.transfers is None else self.transfers.bytes_down + self.transfers.bytes_up

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is a mapped part of a file; of one without elements, its storage."""
        return any(file.holds(tensor.untyped_storage().data_ptr()) for file in self.files)


class OnLoan:
    """Give out memory on the disk of an offloaded model, for tensors that are there for a while."""

    def __init__(self, spill: Spill) -> None:
        """Make a file beside the model's own, which is gone with the last of the tensors.

        Raises:
            DiskError: if it cannot be made.
        """
        self._scratch = Scratch(spill.files[0].folder)
        self._regions: list[Region] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return so many elements; raise DiskError where the disk has no room."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        region = self._scratch.grow(numel * dtype.itemsize)
        self._regions.append(region)
        return torch.from_numpy(region.array()).view(dtype)

    def settle(self) -> None:
        """Take what has been touched out of this process's memory."""
        for region in self._regions:
            region.settle()


def checked_offload(offload: Any, stage: int, *, node_shared: Any) -> Offload | None:
    """Return it; raise ArgumentTypeError if it is something else, ArgumentError where it does not go with the rest."""
    if offload is None:
        return None
    if not isinstance(offload, Offload):
        remedy = 'write mpizero.Offload(optimizer="/path/of/a/local/disk")'
        raise ArgumentTypeError(must_be("offload", "an mpizero.Offload or None", offload, remedy))
    offload.check(stage, node_shared=node_shared)
    return offload


def make_spill(offload: Offload | None, comm: Any, device: torch.device) -> Spill | None:
    """Make the scratch files of all ranks, if something is to be moved. Collective then.

    Args:
        offload: what goes where; None for nothing.
        comm: the model's ranks.
        device: where the model is.

    Raises:
        DiskError: on all ranks, if that of some rank cannot be made.
    """
    if offload is None:
        return None
    spill: Spill | None = None
    failure: MpiZeroError | str = ""
    try:
        spill = Spill(offload, device)
    except MpiZeroError as error:
        failure = error
    raise_together(comm, failure, DiskError)
    for file in spill.files if spill is not None and comm.rank == 0 else ():
        if file.in_memory:
            text = f"{file.folder} is memory (tmpfs), not a disk: what is moved there still takes it"
            warnings.warn(text, stacklevel=4)
    return spill


def check_spill(spill: Spill | None, comm: Any) -> None:
    """Raise on every rank what moving the model has failed with on some. Collective where something was moved."""
    if spill is not None:
        if spill.files:
            give_back()
        raise_together(comm, spill.failure, DiskError if spill.files else DeviceMemoryError)
