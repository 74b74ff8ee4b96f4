"""Hand each rank its micro-batches of a step, so that the result does not depend on the number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from mpizero.errors import ArgumentError, ShardError, must_be
from mpizero.shard.agree import check_same
from mpizero.shard.exact import BLOCKED, INTERLEAVED, is_power_of_two
from mpizero.shard.home import random_state, set_random_state
from mpizero.shard.runtime import runtime_of
from mpizero.shard.trees import mapped
from mpizero.shard.verb import no_sync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.shard.exact import Course
    from mpizero.shard.runtime import Runtime

__all__ = ["micro_batches"]


def micro_batches(
    model: nn.Module,
    batch: Any,
    num_micro_batches: int,
    *,
    numbering: str = INTERLEAVED,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[Any]:
    """Yield this rank's micro-batches of one step, for a model that was sharded with `exact=True`.

    A step is::

        for micro in mpizero.micro_batches(model, batch, 8):
            loss_of(model, micro).backward()  # the micro-batch's own mean; once, and no optimizer step here
        mpizero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    After the last backward the shards' `.grad` is the sum over all M micro-batches of all ranks, in one order, divided
    by M, on top of what was there before; until then `.grad` stays as it is. The same M, seed, steps and batches give
    the same bits on 1, 2, 4, 8, ... ranks, at every stage and with either numbering. Leaving the loop by `break` or an
    exception, on all ranks, gives the step up.

    Args:
        model: a model sharded with `exact=True`.
        batch: the whole step's batch, the same on all ranks: a tensor, or tensors in tuples, lists and dicts, cut along
            dimension 0 into M equal parts. To load no more than a rank's own part, pass the indices of its examples.
        num_micro_batches: M, a multiple of the number of ranks p.
        numbering: "interleaved": rank r takes r, r + p, ... and every backward reduces: M/p times the messages of a
            step, and log2(M/p) + 1 more gradients of a shard's size. "blocked": it takes r M/p, r M/p + 1, ... and the
            last backward reduces: one step's messages, and log2(M/p) + 1 more gradients of the model's size on every
            rank, 4 bytes per parameter each, with M/p a power of two.
        seed: of the training's random numbers; 0 or more.
        step: the number of the step, 0 or more, which a training that goes on from a checkpoint has to say; None counts
            the finished loops of this model.

    Yields:
        The micro-batch, copied into memory of its own: where a tensor begins can change the bits of small products.
        Before each one torch's global generators, those of GPUs too, are seeded from (seed, step, its number among M);
        afterwards those of the host and of the model's device are put back where they were before the loop. Python's
        and numpy's generators are left alone.

    Raises:
        ArgumentError: for numbers that do not fit, a batch that cannot be cut so, one that is not the same on all
            ranks, or a model that has running statistics in train mode by now.
        ShardError: if `model` is not sharded; from the loop, if a micro-batch had no backward.

    Collective: an all-gather of 16 bytes per rank, for which each rank reads the batch once; a batch in a GPU's memory
    is copied to the host for that, which waits for the device once per step.
    """
    runtime = runtime_of(model)
    course = runtime.exact
    if course is None:
        got, remedy = "without", "pass exact=True to mpizero.shard"
        raise ArgumentError(must_be("model of micro_batches", "sharded with exact=True", got, remedy))
    step = course.steps if step is None else step
    for what, value in (("seed", seed), ("step", step)):
        if value < 0:
            raise ArgumentError(must_be(what, "0 or more", value))
    _check_numbers(num_micro_batches, numbering, runtime.comm.size)
    tensors = _tensors(batch)
    _check_rows(tensors, num_micro_batches)
    if runtime.comm.size > 1:
        lines = [f"seed {seed}", f"step {step}", f"{num_micro_batches} micro-batches, {numbering}"]
        lines += [f"tensor {i} of batch, {t.dtype} {tuple(t.shape)}: {_checksum(t):x}" for i, t in enumerate(tensors)]
        check_same(runtime.comm, lines + course.lines, "batch and numbers of a step")
    each = num_micro_batches // runtime.comm.size
    serial = course.start(step, num_micro_batches, each, blocked=numbering == BLOCKED)
    runtime.backward.begin_step()
    first, stride = (runtime.comm.rank * each, 1) if course.blocked else (runtime.comm.rank, runtime.comm.size)
    numbers = range(first, first + each * stride, stride)
    return _handed_out(runtime, batch, numbers, seed=seed, serial=serial)


def _handed_out(runtime: Runtime, batch: Any, numbers: range, *, seed: int, serial: int) -> Iterator[Any]:
    course, before = runtime.exact, random_state(runtime.home.device)
    assert course is not None  # noqa: S101  (asked before)
    try:
        for at, number in enumerate(numbers):
            _check_current(course, serial)
            course.enter(at)
            micro = _part(batch, number, course.total)
            torch.manual_seed(_mixed(seed, course.step, number))
            with nullcontext() if course.sync else no_sync(runtime.model):
                yield micro
            _check_current(course, serial)
            course.leave()
    finally:
        set_random_state(runtime.home.device, before)
        if course.serial == serial:
            course.stop()
            runtime.backward.begin_step()


def _check_current(course: Course, serial: int) -> None:
    if course.serial != serial:
        raise ShardError("a loop over mpizero.micro_batches must end before the next one begins (got another inside)")


def _check_numbers(total: Any, numbering: str, ranks: int) -> None:
    if numbering not in {INTERLEAVED, BLOCKED}:
        raise ArgumentError(must_be("numbering", f"{INTERLEAVED!r} or {BLOCKED!r}", numbering))
    if not isinstance(total, int) or total < 1 or total % ranks:
        raise ArgumentError(must_be("num_micro_batches", f"a multiple of the number of ranks, {ranks}", total))
    if numbering == BLOCKED and ranks > 1 and not is_power_of_two(total // ranks):
        rule = f"{ranks} times a power of two with {BLOCKED!r} numbering"
        raise ArgumentError(must_be("num_micro_batches", rule, total, f"take another number, or {INTERLEAVED!r}"))


def _check_rows(tensors: list[Tensor], total: int) -> None:
    rows = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or min(rows) < total or min(rows) % total:
        rule = f"tensors with equally many rows, a multiple of {total}"
        got = [tuple(tensor.shape) for tensor in tensors]
        raise ArgumentError(must_be("batch", rule, got, "leave the last, smaller batch of a data set out"))


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(batch, note)
    return found


def _part(batch: Any, number: int, total: int) -> Any:
    """Return micro-batch `number` of `total`, copied."""

    def part(tensor: Tensor) -> Tensor:
        rows = tensor.size(0) // total
        return tensor[number * rows : (number + 1) * rows].clone(memory_format=torch.contiguous_format)

    return mapped(batch, part)


def _checksum(tensor: Tensor) -> int:
    return crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _mixed(*words: int) -> int:
    """Return a seed of 64 bits that differs in all of them for words that differ in one."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
