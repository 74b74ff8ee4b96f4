"""Measured memory beside `plan`'s formula: the storages that live in this process, and a sharded model's own report."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mpizero.shard import memory_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["live_bytes", "over_formula"]


@contextmanager
def live_bytes() -> Iterator[Callable[[], int]]:
    """Measure the bytes of all torch storages in host memory that are made inside a `with` block and are still alive.

    Yields:
        A function of no arguments that returns them: each storage once, whoever holds it, so that nothing the model
        forgot to report is missed. Storages that only autograd holds, as saved tensors, are not seen, and windows count
        whole, on each of the ranks that share them. Leave no garbage before you ask: call `gc.collect()` first.

    It freezes the garbage collector's older objects until the block ends, and so must not be nested.
    """
    gc.collect()
    gc.freeze()  # what is alive now is left out from here on
    try:
        yield _measure
    finally:
        gc.unfreeze()


def over_formula(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Return measured bytes over the stage's formula by kind: parameters, gradients, optimizer, total.

    Args:
        model: a sharded model between two steps.
        optimizer: its optimizer, after the first step; None leaves its state out.

    1.0 is the formula; padding makes it a little more. A kind of which there should be nothing is 1.0 if there is
    nothing, else infinity.
    """
    report = memory_report(model, optimizer)
    found = {}
    for kind in ("parameters", "gradients", "optimizer", "total"):
        measured, formula = getattr(report.measured, kind), getattr(report.formula, kind)
        found[kind] = measured / formula if formula else (float("inf") if measured else 1.0)
    return found


def _measure() -> int:
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (torch documents no public name for it)
                storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
