"""Read ranges of a checkpoint's tensors from whichever files hold them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.files import ShardFile, Want
from mpizero.checkpoint.manifest import ITEMSIZE, shard_name
from mpizero.checkpoint.spaces import range_key
from mpizero.checkpoint.tensors import bytes_of, dtype_named

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Self

    from mpizero.checkpoint.manifest import Manifest
    from mpizero.checkpoint.spaces import Stored

__all__ = ["Reader"]

MOST_OPEN = 64
"""Files: a process may have no more than some 1,000."""
GENERATORS = re.compile(r"generators\[0:(\d+)\]")


class Memory(Protocol):
    """Give out memory that is somewhere else than torch's."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return so many elements."""
        ...

    def settle(self) -> None:
        """Be told that much has been written."""
        ...


class Reader:
    """Collect what is wanted, then read each file once."""

    def __init__(self, folder: Path, manifest: Manifest, memory: Memory | None = None) -> None:
        """Read from the checkpoint in `folder`, into torch's memory or this; opens nothing yet."""
        self.folder, self.manifest, self._memory = folder, manifest, memory
        self._wants: dict[int, list[Want]] = {}
        self._open: dict[int, ShardFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def file(self, number: int) -> ShardFile:
        """Return an open file; raises CheckpointError."""
        if number not in self._open:
            count = len(self.manifest.files)
            if not 0 <= number < count:
                raise CheckpointError(f"{self.folder} must have a file {number} (its manifest has {count})")
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            facts = self.manifest.files[number]
            path = self.folder / shard_name(number, count)
            self._open[number] = ShardFile(path, facts.nbytes, facts.header, self.manifest.block)
        return self._open[number]

    def ask(self, stored: Stored, start: int, stop: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor that `fetch` will fill with the elements from `start` to `stop`.

        Args:
            stored: the tensor.
            start: the first element.
            stop: the one after the last.
            shape: of the result; None gives a row.
        """
        item = ITEMSIZE[stored.dtype]
        numel, dtype = stop - start, dtype_named(stored.dtype)
        found = torch.empty(numel, dtype=dtype) if self._memory is None else self._memory.take(numel, dtype)
        row = bytes_of(found)
        for piece in stored.pieces(self.manifest.spaces, start, stop):
            low, high = max(piece.start, start), min(piece.stop, stop)
            target = row[(low - start) * item : (high - start) * item]
            want = Want(key=range_key(stored.key, piece), begin=(low - piece.start) * item, target=target)
            self._wants.setdefault(piece.file, []).append(want)
        return found if shape is None else found.view(shape)

    def ask_for_extra(self, number: str) -> Tensor:
        """Return a tensor of `extra` that `fetch` will fill."""
        stored = self.manifest.tensors[f"extra/{number}"]
        return self.ask(stored, 0, stored.numel, stored.shape)

    def fetch(self) -> None:
        """Read all that was asked for since. Raises CheckpointError."""
        for number, wants in sorted(self._wants.items()):
            self.file(number).read(wants)
            if self._memory is not None:
                self._memory.settle()
        self._wants.clear()

    def generators(self, number: int) -> np.ndarray[Any, Any] | None:
        """Return where the generators stood of the rank that wrote a file; None if that was not saved."""
        file = self.file(number)
        for key in file.places:
            if match := GENERATORS.fullmatch(key):
                row = np.empty(int(match.group(1)), np.uint8)
                file.read([Want(key=key, begin=0, target=row)])
                return row
        return None
