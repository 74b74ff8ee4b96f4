"""The gradients of one flat buffer where micro-batches are summed in one order, whatever the number of ranks.

[Note: memory of exact sums] With T micro-batches on each rank, n the buffer's elements and k a shard's, all in the
master values' precision: interleaved, up to log2(T) + 1 sums of k elements are held between the backwards of a step (of
n elements where nothing is cut); blocked, as many of n elements at every stage, since they are this rank's alone. The
accumulator comes on top, and no gradients are collected in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.errors import ShardError
from mpizero.shard.gradients import Gradients

if TYPE_CHECKING:
    from mpizero.shard.gradients import Buffer

__all__ = ["ExactGradients", "TreeSum"]


class TreeSum:
    """Add up tensors that come one by one in the canonical order: pair neighbours, carry the odd one, repeat."""

    def __init__(self) -> None:
        self.held: list[tuple[int, Tensor]] = []
        """Sums of finished subtrees and how many terms each has, the largest, and first, one first."""

    def add(self, term: Tensor) -> None:
        """Take the next term, whose memory is this sum's from now on."""
        terms = 1
        while self.held and self.held[-1][0] == terms:
            torch.add(self.held.pop()[1], term, out=term)
            terms *= 2
        self.held.append((terms, term))

    def end_with(self, term: Tensor) -> Tensor:
        """Take the last term; return the sum of all, in the last term's memory, and begin anew."""
        while self.held:
            torch.add(self.held.pop()[1], term, out=term)
        return term

    def clear(self) -> None:
        """Begin anew."""
        self.held.clear()


class ExactGradients(Gradients):
    """Take one micro-batch's gradients after the other; give the shards the mean of all at the last one.

    `.grad` of the shards stays as it is until then. What the ranks reduce is a sum; it is divided once, by the number
    of micro-batches, after the last of them.
    """

    def __init__(self, flat: Buffer, reduce_dtype: torch.dtype, accumulator: Tensor) -> None:
        """Start without gradients; see `Gradients`."""
        super().__init__(flat, reduce_dtype, accumulator)
        assert flat.lifetime.exact is not None  # noqa: S101  (who makes these asks for it)
        self.course = flat.lifetime.exact
        self.sums = TreeSum()
        self._touched = False
        self.begin()

    def begin(self) -> None:
        """Begin a step, forgetting one that was not finished."""
        self.forget()
        self._used = [False] * len(self.flat.shards)
        self._before = [_mark(shard.grad) for shard in self.flat.shards]

    @property
    def in_place(self) -> bool:
        """Return False: the accumulator may have what an earlier step left, until the last micro-batch."""
        return False

    def keep(self, index: int, *, sync: bool) -> None:  # noqa: ARG002  (each micro-batch is a term of its own)
        """Move the gradient that autograd left on full parameter `index` into this micro-batch's."""
        super().keep(index, sync=True)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return what is to be summed over ranks: of this micro-batch, or of all of this rank's, where blocked."""
        total = self.collected()
        self._reducing = True
        return self.sums.end_with(total) if self.course.blocked else total, None

    def give(self, part: Tensor) -> None:
        """Add this rank's part of the reduced gradients to the sum; at its end, to the accumulator."""
        self._reducing = False
        if not self.course.last:
            self.sums.add(part)
            return
        self._check_untouched()
        mean = self.sums.end_with(part).div_(self.course.total)
        self._had = [self._adopt(index) for index in range(len(self.flat.shards))]
        self._accumulate(mean)

    def attach(self, used: list[bool]) -> None:
        """Note which parameters were used; after the last micro-batch give their shards the gradients."""
        self._used = [one or other for one, other in zip(self._used, used, strict=True)]
        if not self.course.last:
            self._check_untouched()
        else:
            self._touched |= any(
                shard.grad is not None and shard.grad is not view
                for shard, view in zip(self.flat.shards, self.views, strict=True)
            )
        if self._touched:
            raise ShardError(
                f"gradients of the shards of {self.flat.label} must be left alone between a step's first micro-batch "
                "and its last with exact=True (got other ones): call zero_grad before the loop, and put a penalty on "
                "parameters into the optimizer's weight_decay, or into forward"
            )
        if self.course.last:
            super().attach(self._used)

    def hold_place(self) -> None:
        """End a backward that is not reduced: this micro-batch's gradients join the sum of this rank's."""
        self.sums.add(self.collected())
        self._check_untouched()

    def drop_zeroed(self) -> list[int]:
        """Return nothing: until the last micro-batch there is nothing that `zero_grad` takes away."""
        return []

    def forget(self) -> None:
        """Let go of a step that was not finished."""
        super().forget()
        self.sums.clear()
        self._touched = False

    def held(self) -> list[Tensor]:
        """Return the tensors that hold gradients beside the accumulator now, for memory reports."""
        return [*super().held(), *(total for _, total in self.sums.held)]

    def _check_untouched(self) -> None:
        """Note, to be told at the end of the backward, if anyone but this object has changed `.grad`."""
        pairs = zip(self._before, self.flat.shards, strict=True)
        self._touched |= any(before != _mark(shard.grad) for before, shard in pairs if shard.requires_grad)


def _mark(grad: Tensor | None) -> Any:
    """Return what changes when a gradient is replaced or changed in place."""
    return None if grad is None else (id(grad), grad._version)  # noqa: SLF001
