"""Operations that reduce: by the verbs, or for reductions that these lack, by moving operands and combining them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpizero import collectives as mz
from mpizero.c10d.ops import Reduction, reduction
from mpizero.c10d.tensors import joined, packed, unpacking
from mpizero.errors import ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mpizero.c10d.work import Operation

__all__ = ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter"]

SMALL = 256 << 10
"""Bytes of a tensor up to which coalesced operations pack it with its neighbours: a copy costs less than a call."""


def all_reduce(call: Operation, x: Tensor, opts: Any) -> None:
    """Start an all-reduce in place.

    PREMUL_SUM multiplies in place first. BAND, BOR and BXOR gather: they move (p-1) S bytes for S, and need p S.
    """
    how = _checked(x, opts)
    if how.fold is not None:
        parts = x.new_empty((call.comm.size, *x.shape))
        call.start(mz.all_gather, x, out=parts)
        call.then(_folding(x, parts, how.fold))
        return
    if how.factor is not None:
        x.detach().copy_(_scaled(x, how.factor))
    call.start(mz.all_reduce, x, op=how.verb)


def all_reduce_coalesced(call: Operation, tensors: Sequence[Tensor], opts: Any) -> None:
    """Start an all-reduce of each tensor; runs of small ones of a dtype are packed into one."""
    for run in _runs(tensors):
        if len(run) == 1:
            all_reduce(call, run[0], opts)
            continue
        whole = packed(run)
        all_reduce(call, whole, opts)
        if joined(run) is None:
            call.then(unpacking(run, whole))


def reduce(call: Operation, x: Tensor, opts: Any) -> None:
    """Start a reduce; ranks other than the root keep what they have."""
    how, root = _checked(x, opts), int(getattr(opts, "rootRank", 0))
    here = call.comm.rank == root
    if how.fold is not None:
        parts = x.new_empty((call.comm.size, *x.shape)) if here else None
        call.start(mz.gather, x, root=root, out=parts)
        if parts is not None:
            call.then(_folding(x, parts, how.fold))
        return
    out = None
    if how.factor is not None:
        out = x if here else None
        x = _scaled(x, how.factor)
    call.start(mz.reduce, x, root=root, op=how.verb, out=out)


def reduce_scatter(call: Operation, out: Tensor, x: Tensor, opts: Any, counts: list[int] | None = None) -> None:
    """Start a reduce-scatter of a tensor that may be cut unevenly; `x` keeps what it has."""
    how = _checked(x, opts)
    if how.fold is not None:
        size, flat = call.comm.size, x.detach().reshape(-1)
        parts = flat.new_empty((size, *out.shape))
        leaving = [flat.numel() // size] * size if counts is None else counts
        call.start(mz.all_to_all, flat, out=parts, counts=leaving, out_counts=[out.numel()] * size)
        call.then(_folding(out, parts, how.fold))
        return
    if how.factor is not None:
        x = _scaled(x, how.factor)
    call.start(mz.reduce_scatter, x, out=out, op=how.verb, counts=counts)


def _checked(x: Tensor, opts: Any) -> Reduction:
    """Return the reduction that options ask for.

    Raises:
        ArgumentTypeError: for PREMUL_SUM of integers and bitwise reductions of floats, which no backend has.
    """
    how, inexact = reduction(opts), x.is_floating_point() or x.is_complex()
    if how.fold is not None and inexact:
        raise ArgumentTypeError(must_be("a tensor for BAND, BOR and BXOR", "of integers or bool", str(x.dtype)))
    if how.factor is not None and not inexact:
        raise ArgumentTypeError(must_be("a tensor for PREMUL_SUM", "of floats", str(x.dtype), "cast to float first"))
    return how


def _scaled(x: Tensor, factor: Any) -> Tensor:
    """Return `x` times a factor, in x's dtype."""
    return (x.detach() * factor).to(x.dtype)


def _folding(out: Tensor, parts: Tensor, fold: Callable[..., Tensor]) -> Callable[[], None]:
    def act() -> None:
        total = parts[0]
        for part in parts[1:]:
            total = fold(total, part)
        out.detach().copy_(total)

    return act


def _runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in order, neighbours that are small and alike together."""
    runs: list[list[Tensor]] = []
    for x in tensors:
        last = runs[-1] if runs else None
        if last is not None and last[0].dtype == x.dtype and _is_small(x) and _is_small(last[0]):
            last.append(x)
        else:
            runs.append([x])
    return runs


def _is_small(x: Tensor) -> bool:
    return x.layout is torch.strided and x.numel() * x.element_size() <= SMALL
