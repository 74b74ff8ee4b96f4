"""Sums of powers of gradients that do not depend on how the gradients are cut into shards.

[Note: an exact sum] A sum in fp64 is rounded at every addition, so it has other bits if ranks hold other parts. Here
|x|^p of each element is taken in fp64 and added up within blocks of 64 elements of a parameter, pairwise: as cuts fall
on multiples of 64 elements of a parameter (see `mpizero.plan.layout`), every rank makes the same blocks, and no block
lies on two. The blocks' sums, fp64, are added without any rounding, as whole multiples of 2^-1126: an integer of some
hundred digits, which ranks send each other, and whose sum is the same in every order. It is rounded once, to the
nearest fp64. Adding without rounding is Kulisch's long accumulator (Kulisch and Miranker, 1986); here numpy adds up the
halves of mantissas that have one exponent, 27 bits each, exactly in fp64, and Python the few sums that are left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.plan.layout import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WORDS", "ExactSum"]

CHUNK = 1 << 17
"""Elements that are widened at a time: 1 MiB of fp64, in cache."""
ON_DEVICE = 1 << 24
"""The same on a GPU, whose many small kernels would cost more than they do."""
SMALL_CHUNK = 1 << 14
"""As CHUNK for powers, below the 32,768 from which torch splits work over threads: where it splits, the last elements
of a part may have other bits than in the middle of one, which products and sums cannot."""
SCALE = 1126
"""Every fp64 number is a whole multiple of 2^-SCALE: the least is 2^-1074, with 52 zeros in its mantissa."""
WORDS = 36
"""Of 64 bits, in what a rank sends: room for 2^154 fp64 numbers, each below 2^(1024 + SCALE) units."""
AT_ONCE = 1 << 25
"""Numbers whose halves numpy may add up in fp64 before a sum of them could reach 2^53."""


class ExactSum:
    """Hold a sum of non-negative fp64 numbers that was never rounded."""

    def __init__(self) -> None:
        self.whole = 0
        """The finite terms, in units of 2^-SCALE."""
        self.rest = 0.0
        """The sum of the others: 0, infinity or NaN."""

    def add_powers(self, pieces: list[Tensor], norm_type: float) -> None:
        """Add |x|^p of every element.

        Args:
            pieces: one-dimensional, each from a multiple of 64 elements of its parameter on.
            norm_type: p, finite.

        The host reads one fp64 number for each 64 elements, at once.
        """
        size = CHUNK if norm_type in {1, 2} else SMALL_CHUNK
        sums = [
            _block_sums(chunk, norm_type)
            for piece in pieces
            if piece.numel()
            for chunk in piece.split(ON_DEVICE if piece.is_cuda else size)
        ]
        if sums:
            self.add(torch.cat(sums).cpu().numpy())

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Add non-negative fp64 numbers, shape (n,)."""
        finite = np.isfinite(values)
        if not finite.all():
            self.rest += float(values[~finite].sum())
            values = values[finite]
        for start in range(0, len(values), AT_ONCE):
            self._add_finite(values[start : start + AT_ONCE])

    def _add_finite(self, values: np.ndarray[Any, Any]) -> None:
        if not values.any():
            return
        fractions, exponents = np.frexp(values)  # fractions from 0.5 to 1, of 53 bits
        high, low = np.divmod(np.ldexp(fractions, 53), 2.0**27)
        least = int(exponents.min())
        for part, bits in ((high, 27), (low, 0)):
            for place, total in enumerate(np.bincount(exponents - least, weights=part).tolist()):
                self.whole += int(total) << (least + place - 53 + bits + SCALE)

    def words(self) -> np.ndarray[Any, Any]:
        """Return the sum as 1 + WORDS numbers of 64 bits, to be sent."""
        rest = np.array([self.rest]).view(np.uint64)
        return np.concatenate([rest, np.frombuffer(self.whole.to_bytes(8 * WORDS, "little"), np.uint64)])

    def add_words(self, words: np.ndarray[Any, Any]) -> None:
        """Add what another rank has sent."""
        self.rest += float(words[:1].view(np.float64)[0])
        self.whole += int.from_bytes(words[1:].tobytes(), "little")

    def rounded(self) -> float:
        """Return the nearest fp64 number, infinity if the sum is beyond them."""
        if self.rest != 0:
            return self.rest
        try:
            return self.whole / (1 << SCALE)  # Python rounds a quotient of integers once
        except OverflowError:
            return math.inf


def _block_sums(chunk: Tensor, norm_type: float) -> Tensor:
    """Return the sums of |x|^p over each 64 elements, the last ones filled up with zeros; shape (blocks,), fp64.

    Additions of whole tensors, since the order in which torch's own sum adds is not promised.
    """
    wide = chunk.to(torch.float64, copy=True)
    blocks = torch.nn.functional.pad(wide, (0, -len(wide) % ALIGNMENT)).view(-1, ALIGNMENT)
    if norm_type == 2:
        blocks.mul_(blocks)
    else:
        blocks.abs_()
        if norm_type != 1:
            blocks.pow_(norm_type)
    width = ALIGNMENT
    while width > 1:
        width //= 2
        blocks = blocks[:, :width] + blocks[:, width : 2 * width]
    return blocks.reshape(-1)
