"""Tensors in the shapes that the verbs take: flat, of dtypes that they know, lists of them as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpizero.arrays import DTYPES
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["as_list", "check_number", "joined", "movable", "only", "packed", "room_for", "uneven", "unpacking"]

KNOWN = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def movable(x: Tensor) -> Tensor:
    """Return `x`, or where the verbs do not know its dtype (float8, say) its bits as integers, without a copy.

    Raises:
        ArgumentTypeError: for a tensor that is not dense.
    """
    if x.layout is not torch.strided:
        raise ArgumentTypeError(must_be("a tensor", "dense", str(x.layout), "send its indices and values"))
    return x if x.dtype in KNOWN else x.detach().view(_SAME_WIDTH[x.element_size()])


def as_list(tensors: Any) -> list[Tensor]:
    """Return a tensor as a list of one, and a list as it is."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def only(tensors: Any, what: str) -> Any:
    """Return the one element of a list in which torch passes what belongs to the one device of this rank.

    Raises:
        ArgumentError: for more or fewer; several devices per rank are not supported.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(must_be(what, "one, since a rank has one device", len(tensors), "call once for each"))
    return tensors[0]


def check_number(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """Raise ArgumentError unless there is one tensor per rank."""
    if len(tensors) != size:
        raise ArgumentError(must_be(f"the number of tensors in {what}", f"{size}, one per rank", len(tensors)))


def uneven(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the numbers of elements; None where all are equal."""
    counts = [x.numel() for x in tensors]
    return counts if len(set(counts)) > 1 else None


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return, without a copy, the flat tensor of which these are the parts in order; None where they lie otherwise."""
    first = tensors[0]
    home, address, total = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for x in tensors:
        apart = x.data_ptr() != address or x.untyped_storage().data_ptr() != home or x.dtype != first.dtype
        if apart or not x.numel() or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        address += x.numel() * x.element_size()
        total += x.numel()
    return first.detach().as_strided((total,), (1,))


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all as one flat tensor, copied unless they lie one after the other already."""
    whole = joined(tensors)
    return torch.cat([x.detach().reshape(-1) for x in tensors]) if whole is None else whole


def room_for(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None] | None]:
    """Return a flat tensor for the elements of all, and what copies them into their places, if anything must."""
    whole = joined(tensors)
    if whole is not None:
        return whole, None
    room = tensors[0].detach().new_empty(sum(x.numel() for x in tensors))
    return room, unpacking(tensors, room)


def unpacking(tensors: Sequence[Tensor], room: Tensor) -> Callable[[], None]:
    """Return what copies the elements of a flat tensor into their places."""

    def unpack() -> None:
        for x, part in zip(tensors, room.split([x.numel() for x in tensors]), strict=True):
            x.detach().copy_(part.view(x.shape))

    return unpack
