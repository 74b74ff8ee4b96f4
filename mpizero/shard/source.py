"""Where a rank's part of one flat buffer's parameters lies, and how full parameters are filled from it.

[Note: offloaded parts] Of one flat buffer, with k elements of this rank's, what `full` is filled from is its source:

- nothing is moved, or the master values stay in the model's memory and are what is gathered: `master`, as ever;
- master values elsewhere, on a disk in another precision than is computed in or, of a model on a GPU, on the host:
  `working`, k elements in compute precision in the model's memory, which follow a step; a slice of `full` where that
  always lives, else of its own;
- parameters on the host, of a model on a GPU: `parked`, k elements in compute precision, from which a gather copies;
- parameters on disk: a region, from which a gather reads this rank's part straight into `full`.

Master values on disk are mapped: the shards that users, checkpoints and guards see are as ever, and their pages come
when they are touched. A change in place of these is brought to what is filled from before the next gather; the
optimizer streams past the mapping instead, see `optim.streaming`.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from mpizero.arrays import Event
    from mpizero.arrays.disk import Region
    from mpizero.shard.transfers import Transfers

__all__ = ["Source", "raw", "write"]


class Source:
    """Be what a rank's part of a flat buffer's full parameters is filled from; see [Note: offloaded parts]."""

    def __init__(self, master: Tensor, region: Region | None = None, transfers: Transfers | None = None) -> None:
        self.master = master
        self.region = region
        """Where the master values are on disk."""
        self.transfers = transfers
        """Copies between the model's device and the host, where master values are; None where both are one."""
        self.working: Tensor | None = None
        self.parked: Tensor | None = None
        self.on_disk: Region | None = None
        """Where the values in compute precision are on disk."""
        self._staged: Tensor | None = None
        """Host memory of a copy up, and when that is done."""
        self._risen: Event | None = None
        self._known = self._version()
        """The master values' version of which the working values are."""
        self._streamed = False
        self._filling = threading.RLock()
        """Held by who fills or puts: updates beside backward do so in a thread of their own."""

    def aside(self) -> AbstractContextManager[None]:
        """Let the caller's stream compute on while `fill`, and the gather that is called next, work."""
        return nullcontext() if self.transfers is None else self.transfers.aside()

    def follow(self) -> None:
        """Have the caller's stream go on behind what was filled."""
        if self.transfers is not None:
            self.transfers.follow()

    def fill(self, target: Tensor) -> None:
        """Put this rank's part, in compute precision, into the model's memory of its size; inside `aside`.

        Raises:
            DiskError: if the disk fails.
        """
        with self._filling:
            self._fill(target)

    def _fill(self, target: Tensor) -> None:
        self._freshen(target.dtype)
        if self.transfers is not None:
            self._bring_up(self.transfers, target)
        elif self.on_disk is not None:
            self.on_disk.read(raw(target), buffered=True)  # where `expect` has it read ahead
        elif self.working is None:
            target.copy_(self.master)
        elif self.working.data_ptr() != target.data_ptr():
            target.copy_(self.working)

    def _bring_up(self, transfers: Transfers, target: Tensor) -> None:
        if self.on_disk is not None:
            staged = self._staging(transfers, target.numel(), target.dtype)
            self.on_disk.read(raw(staged), buffered=True)
            self._risen = transfers.bring_up(staged, target)
        elif self.parked is not None:
            self._risen = transfers.bring_up(self.parked, target)
        elif self.working is not None and self.working.data_ptr() != target.data_ptr():
            transfers.move(self.working, target)

    def _freshen(self, dtype: torch.dtype) -> None:
        """Bring a change of master values, by the user, a load or an optimizer in memory, to what is filled from."""
        if self._known == self._version():
            return
        if self.on_disk is not None and self.on_disk is not self.region:
            write(self.on_disk, self.master.to(dtype))
        self.put(0, self.master)
        if self.region is not None:
            self.region.settle()
        self._known = self._version()

    def put(self, start: int, values: Tensor) -> None:
        """Bring new master values, from an element on, to what gathers read, where that is in memory; inside `aside`.

        Args:
            start: the first one's place among the k.
            values: in host memory; the caller may change them at once.
        """
        with self._filling:
            self._put(slice(start, start + values.numel()), values)

    def _put(self, part: slice, values: Tensor) -> None:
        if self.parked is not None:
            self._await_copy()
            self.parked[part].copy_(values)
        elif self.working is not None and self.transfers is not None:
            staged = self._staging(self.transfers, self.master.numel(), self.working.dtype)
            staged[part].copy_(values)
            self._risen = self.transfers.bring_up(staged[part], self.working[part])
        elif self.working is not None:
            self.working[part].copy_(values)

    def _staging(self, transfers: Transfers, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory to copy up from, which no copy reads any more."""
        self._await_copy()
        if self._staged is None:
            self._staged = transfers.take(numel, dtype)
        return self._staged

    def _await_copy(self) -> None:
        if self._risen is not None:
            self._risen.synchronize()
            self._risen = None

    def expect(self) -> None:
        """Have the disk begin to read what `fill` will soon need."""
        if self.on_disk is not None:
            self.on_disk.expect()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let an optimizer inside change master values and `put` them: that is no change which is not known."""
        clean = self._known == self._version()
        yield
        if clean:
            self._known = self._version()

    def streamed(self) -> None:
        """Say that a step has written master and working values alike, past the mapping, where there was a gradient."""
        # Else somebody has changed more than the step has written; or it could not write where parameters are.
        self._streamed = self._known == self._version() and (self.region is not None or self.on_disk is None)
        if self.region is not None:
            torch.autograd.graph.increment_version(self.master)  # as a step in memory would have

    def stepped(self) -> None:
        """Say that an optimizer has stepped; torch's fused ones do not count as a change in place."""
        self._known = self._version() if self._streamed else -1
        self._streamed = False

    def _version(self) -> int:
        return self.master._version  # noqa: SLF001


def write(region: Region, values: Tensor) -> None:
    """Write a contiguous tensor to its region."""
    region.write(raw(values))


def raw(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory as bytes; the tensor has to outlive them.

    Not by `numpy`, after which torch would not let a storage be emptied any more.
    """
    nbytes = values.numel() * values.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(values.data_ptr())).cast("B")
