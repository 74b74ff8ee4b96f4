"""The gradients of one flat buffer, from autograd to the shards' `.grad`.

[Note: buffers of gradients] One-dimensional in the layout's order; n is its length, k a shard's.

- `accumulator`, k fp32 elements (n where nothing is cut): the reduced gradients, which `shards[i].grad` are views of.
  Where shards are on the host and the model is not, so is it, and what was reduced is brought down to it.
- `incoming`, n elements: this backward's gradients, from the first that arrives to the end of the reduction. It lies in
  room that the ranks of a node can read (see `reductions`), or in memory of its own. Where nothing is cut and no
  gradients are there yet it is the accumulator itself, and is reduced in place.
- `unsynced`, n elements in fp32: what `no_sync` has kept back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mpizero.shard.clipping import MARK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from mpizero.plan import Layout
    from mpizero.shard.home import Home
    from mpizero.shard.member import Member
    from mpizero.shard.policy import Lifetime
    from mpizero.shard.transfers import Transfers

__all__ = ["Buffer", "Gradients"]


class Buffer(Protocol):
    """Be the flat buffer whose gradients are taken; see `FlatParams`."""

    members: list[Member]
    layout: Layout
    lifetime: Lifetime
    home: Home
    transfers: Transfers | None
    early: Callable[[bool], None] | None
    label: str
    number: int
    trained: set[int]
    full_params: list[nn.Parameter]
    shards: list[nn.Parameter]

    def piece_of(self, shard: Tensor, index: int) -> Tensor:
        """Return the part of a parameter that lies in a shard-sized buffer."""
        ...


class Gradients:
    """Take the gradients of a flat buffer's full parameters, and give its shards the reduced ones."""

    def __init__(self, flat: Buffer, reduce_dtype: torch.dtype, accumulator: Tensor) -> None:
        """Start without gradients.

        Args:
            flat: the buffer.
            reduce_dtype: in which gradients are sent.
            accumulator: zeros, like the master values.
        """
        self.flat, self.dtype, self.accumulator = flat, reduce_dtype, accumulator
        self.nbytes = flat.layout.length * reduce_dtype.itemsize
        """Bytes of one backward's gradients."""
        self.views = [flat.piece_of(accumulator, index) for index in range(len(flat.members))]
        if flat.lifetime.cut:
            for view in self.views:
                setattr(view, MARK, True)
        self._gaps = flat.layout.gaps()
        self.room: Tensor | None = None
        """Memory for `incoming` that peers can read, lent for one backward."""
        self.incoming: Tensor | None = None
        self.unsynced: Tensor | None = None
        self.arrived: set[int] = set()
        self.kept: set[int] = set()
        """The parameters that `unsynced` has gradients of."""
        self._reducing = False
        """Whether a reduction is under way: what arrives meanwhile is late, and collected apart."""
        self._had: list[bool] = []
        """Which shards had a gradient when the reduction began."""
        self._whole = False
        """Whether every trained parameter has had one of this rank's when the reduction began."""

    def begin(self) -> None:
        """Begin a step in which micro-batches are summed in a fixed order; nothing to do for others."""

    @property
    def complete(self) -> bool:
        """Return whether the gradient of every trained parameter is there."""
        return len(self.arrived) >= len(self.flat.trained)

    def keep(self, index: int, *, sync: bool) -> None:
        """Move the gradient that autograd left on full parameter `index` into the buffers.

        Args:
            index: the parameter.
            sync: whether this backward will be reduced; if not, the gradient joins `unsynced`.
        """
        param = self.flat.full_params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:  # of nn.Embedding(sparse=True)
            grad = grad.to_dense()
        slot = self.flat.layout.slots[index]
        if sync:
            if self.incoming is None:
                self.incoming = self._new_incoming()
            if self.incoming is self.accumulator:
                target = self.views[index]
            else:
                target = self.incoming[slot.offset : slot.stop].view(slot.shape)
            target.add_(grad) if index in self.arrived else target.copy_(grad)
            self.arrived.add(index)
            return
        if self.unsynced is None:
            self.unsynced = self.accumulator.new_zeros(self.flat.layout.length, device=self.flat.home.device)
        self.unsynced[slot.offset : slot.stop].view(slot.shape).add_(grad)
        self.kept.add(index)

    def _new_incoming(self) -> Tensor:
        flat = self.flat
        if self.in_place:
            return self.accumulator  # its padding is zero
        fresh = self.room
        if fresh is None:
            fresh = self.accumulator.new_empty(flat.layout.length, dtype=self.dtype, device=flat.home.device)
        for start, stop in self._gaps:
            fresh[start:stop] = 0
        return fresh

    @property
    def in_place(self) -> bool:
        """Return whether gradients can be collected, and reduced, in the accumulator itself."""
        flat = self.flat
        elsewhere = flat.lifetime.cut or flat.transfers is not None
        if elsewhere or self._reducing or self.dtype != self.accumulator.dtype:
            return False
        return all(shard.grad is None for shard in flat.shards)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return the local gradients, zero where none arrived, with what `no_sync` kept back; begins a reduction.

        Returns:
            The n gradients to be reduced, and the k elements that the result is to be put into: None where it has to be
            added to what is there, is of another dtype, or has to go elsewhere.
        """
        self._whole = len(self.arrived | self.kept) >= len(self.flat.trained)
        total = self.collected()
        if self.unsynced is not None:
            total, self.unsynced = self.unsynced.add_(total), None
            self.kept.clear()
        self._reducing = True
        # What lies in the accumulator now is this backward's, and there was nothing before; see `in_place`.
        shards = range(len(self.flat.shards))
        self._had = [total is not self.accumulator and self._adopt(index) for index in shards]
        fresh = not any(self._had) and total.dtype == self.accumulator.dtype and self.flat.transfers is None
        return total, self.accumulator if fresh else None

    def collected(self) -> Tensor:
        """Return this backward's gradients, zero where none arrived; what arrives from now on is late."""
        total = self._new_incoming() if self.incoming is None else self.incoming
        for index, slot in enumerate(self.flat.layout.slots):
            if index not in self.arrived:  # or frozen, beside trained ones
                total[slot.offset : slot.stop] = 0
        self.incoming = self.room = None
        self.arrived.clear()
        return total

    def held(self) -> list[Tensor]:
        """Return the tensors that hold gradients beside the accumulator now, for memory reports."""
        return [tensor for tensor in (self.incoming, self.unsynced) if tensor is not None]

    def give(self, part: Tensor) -> None:
        """Add this rank's part of the reduced gradients to the accumulator; ends the reduction."""
        self._reducing = False
        if part.data_ptr() != self.accumulator.data_ptr() or not part.numel():
            self._accumulate(part)
        elif self.flat.early is not None:
            self.flat.early(self._whole)

    def _accumulate(self, part: Tensor) -> None:
        """Add to the gradients that shards already have, perhaps later; see [Note: transfers] in `transfers`."""
        add = partial(self._add, had=list(self._had), whole=self._whole)
        if self.flat.transfers is None:
            add(part)
        else:
            self.flat.transfers.bring_down(part, add)

    @torch.no_grad()
    def _add(self, part: Tensor, *, had: list[bool], whole: bool) -> None:
        """Add to the gradients that shards already have; start anew where `.grad` was None."""
        if not any(had):
            self.accumulator.copy_(part)
        elif all(had):
            self.accumulator.add_(part)
        else:
            for index, kept in enumerate(had):
                source, target = self.flat.piece_of(part, index), self.views[index]
                target.add_(source) if kept else target.copy_(source)
        if self.flat.early is not None:
            self.flat.early(whole)

    def _adopt(self, index: int) -> bool:
        """Return whether a shard has a gradient; one that the user put there moves into the accumulator."""
        shard = self.flat.shards[index]
        grad = shard.grad
        if grad is None:
            return False
        if grad is not self.views[index]:
            self.views[index].copy_(grad)
            shard.grad = self.views[index]
        return True

    def attach(self, used: list[bool]) -> None:
        """Give the shards of used parameters their gradients, on top of any that autograd has put there meanwhile."""
        for shard, view, is_used in zip(self.flat.shards, self.views, used, strict=True):
            if not is_used or not shard.requires_grad:
                continue
            if shard.grad is not None and shard.grad is not view:  # a penalty on shards that a loss holds
                view.add_(shard.grad)
            shard.grad = view

    def hold_place(self) -> None:
        """Give shards whose gradients wait in `unsynced` a gradient of zero, which `zero_grad` will then take away."""
        for index in self.kept:
            if self.flat.shards[index].grad is None:
                self.views[index].zero_()
                self.flat.shards[index].grad = self.views[index]

    def drop_zeroed(self) -> list[int]:
        """Forget the `unsynced` gradients of shards whose `.grad` the user has set to None; return which."""
        dropped = [index for index in self.kept if self.flat.shards[index].grad is None]
        for index in dropped:
            slot = self.flat.layout.slots[index]
            if self.unsynced is not None:
                self.unsynced[slot.offset : slot.stop] = 0
            self.kept.discard(index)
        if not self.kept:
            self.unsynced = None
        return dropped

    def forget(self) -> None:
        """Let go of what a backward that raised has brought."""
        self.incoming = self.room = None
        self._reducing = False
        self.arrived.clear()
