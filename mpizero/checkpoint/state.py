"""What a model and its optimizer hold, by name: what of it is stored where, and what this rank has of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpizero.checkpoint.optimizers import Optimized
from mpizero.checkpoint.spaces import Space, Stored, range_key
from mpizero.checkpoint.tensors import DTYPES
from mpizero.checkpoint.values import encode
from mpizero.errors import ArgumentTypeError, must_be
from mpizero.shard.ranges import cuts_of, held_by, whole_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mpizero.checkpoint.spaces import Piece
    from mpizero.shard.ranges import Held

__all__ = ["Entry", "State", "named_buffers"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Hold this rank's elements of one tensor of a checkpoint."""

    stored: Stored
    data: Tensor = field(repr=False)
    start: int = 0
    """The first element held; all of a tensor that is not cut."""

    def part(self, piece: Piece) -> Tensor:
        """Return the elements of a piece, which this rank must hold, as one row."""
        return self.data.detach().reshape(-1)[piece.start - self.start : piece.stop - self.start]


class State:
    """Know what a model and its optimizer hold, and how it is stored."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Look at both; nothing is copied.

        Raises:
            ShardError: for a model that is not sharded.
            ArgumentError, ArgumentTypeError: for an optimizer of another model, or one that is none.
        """
        self.held = held_by(model)
        cuts = cuts_of(model)
        self.spaces = tuple(Space(length=cut.length, shards=cut.shards, copies=cut.copies) for cut in cuts)
        self.file = cuts[0].shard * cuts[0].copies + cuts[0].copy if cuts else 0
        """The number of the file that this rank writes."""
        self.entries: list[Entry] = []
        self.ties: dict[str, str] = {}
        self.whole: list[tuple[tuple[str, ...], Tensor]] = [((name,), param) for name, param in whole_parameters(model)]
        """Parameters that are not cut, and buffers, by their names: rank 0's count."""
        self.whole += named_buffers(model)
        for held in self.held:
            self._add("model", held.names, held, held.shard)
        for names, tensor in self.whole:
            self._add("model", names, None, tensor)
        self.optimized = None if optimizer is None else self._look_at(optimizer)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> Optimized:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(must_be("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__))
        known: dict[int, tuple[str, Held | None]] = {id(held.shard): (held.names[0], held) for held in self.held}
        known |= {id(tensor): (names[0], None) for names, tensor in self.whole}
        optimized = Optimized(optimizer, {number: name for number, (name, _) in known.items()})
        for param, name, key, value in optimized.elementwise():
            self._add(f"optimizer/{key}", (name,), known[id(param)][1], value)
        return optimized

    def _add(self, kind: str, names: tuple[str, ...], held: Held | None, data: Tensor) -> None:
        dtype = DTYPES.get(data.dtype)
        if dtype is None:
            raise ArgumentTypeError(
                must_be(f"dtype of {names[0]!r}", f"one of {', '.join(DTYPES.values())}", data.dtype)
            )
        key = f"{kind}/{names[0]}"
        if kind == "model":
            self.ties.update(dict.fromkeys(names[1:], names[0]))
        if held is None:
            self.entries.append(Entry(stored=Stored(key=key, dtype=dtype, shape=tuple(data.shape)), data=data))
            return
        stored = Stored(key=key, dtype=dtype, shape=held.shape, space=held.buffer, offset=held.offset)
        self.entries.append(Entry(stored=stored, data=data, start=held.start))

    def add_extra(self, extra: Any) -> Any:
        """Store the tensors of `extra`; return the rest as JSON. Raises ArgumentTypeError."""
        count = 0

        def store(tensor: Tensor) -> str:
            nonlocal count
            self._add("extra", (str(count),), None, tensor.cpu())
            count += 1
            return str(count - 1)

        return encode(extra, store)

    def own(self, rank: int) -> list[tuple[str, str, Tensor]]:
        """Return the ranges that this rank writes: key, dtype and elements. Whole tensors are rank 0's to write."""
        found = []
        for entry in self.entries:
            stored = entry.stored
            whole = Stored(
                key=stored.key, dtype=stored.dtype, shape=stored.shape, offset=self.file if rank == 0 else -1
            )
            piece = (whole if stored.space is None else stored).own(self.spaces, self.file)
            if piece is not None:
                found.append((range_key(stored.key, piece), stored.dtype, entry.part(piece)))
        return found


def named_buffers(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return the buffers that a state dict would have, each with all its names, in the model's order."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001  (torch tells it nowhere else)
                found.setdefault(id(buffer), ([], buffer))[0].append(f"{path}.{name}" if path else name)
    return [(tuple(names), buffer) for names, buffer in found.values()]
