"""What training with `exact=True` asks for, and where the sum over one step's micro-batches stands.

[Note: one tree] A step's gradient is the sum over M micro-batches, divided by M once. Added up in the order in which p
ranks happen to finish, it has other bits for every p. Here it is always the tree of the canonical order over the M
micro-batches, ((0+1)+(2+3))+..., whose lower levels and upper ones are taken by the reduction over ranks and by the
accumulation on each rank, or the other way round. With T = M/p micro-batches on each rank:

- interleaved: micro-batch t of rank r has number t*p + r. Every backward reduces over ranks, and the sums of p
  micro-batches are added up over t. For any T.
- blocked: it has number r*T + t. Every rank adds up its own T, and the last backward reduces over ranks. T must be a
  power of two, or the rank would add up what belongs to no subtree.

A tree over T things that come one by one needs the sums of at most log2(T) + 1 finished subtrees at a time (as a binary
counter has digits): see `exact_gradients`. Nothing else may depend on p either: each micro-batch has random numbers of
its own, gradients travel in the precision of the master values, since a sum that is rounded to 16 bits on the wire is
rounded in other places for other p, and the norm for clipping is an exact sum (see `mpizero.optim.exact_sum`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mpizero.collectives import all_gather
from mpizero.errors import ArgumentError, ShardError, must_be
from mpizero.shard.batchnorm import SyncBatchNorm
from mpizero.shard.policy import HALF

if TYPE_CHECKING:
    from mpizero.shard.policy import Precision, Ranks

__all__ = ["BLOCKED", "INTERLEAVED", "Course", "check_exact", "check_exact_ranks", "is_power_of_two"]

INTERLEAVED, BLOCKED = "interleaved", "blocked"


class Course:
    """Say where the accumulation over the micro-batches of one step stands, for one model."""

    def __init__(self, model: nn.Module, threads: int) -> None:
        """Stand outside any step.

        Args:
            model: the root.
            threads: of torch, on every rank and for the whole training: gradients of LayerNorm change with them.
        """
        self.threads = threads
        self.steps = 0
        """The number of the next step, counted from 0, where the user does not say it."""
        self.step = 0
        """The number of this step."""
        self.serial = 0
        """Counts the loops over micro-batches: a loop that another has superseded finds another number here."""
        self.total = self.each = 0
        """Micro-batches of the step, of all ranks and of each."""
        self.blocked = False
        self._norms = _running_norms(model)
        self._at: int | None = None
        """Which micro-batch this rank is at; None outside the loop over them."""
        self._begun = self._done = False
        """Whether its backward has begun, and has ended."""

    @property
    def last(self) -> bool:
        """Return whether this rank is at its last micro-batch of the step."""
        return self._at == self.each - 1

    @property
    def sync(self) -> bool:
        """Return whether the backward of this micro-batch reduces over ranks."""
        return not self.blocked or self.last

    @property
    def lines(self) -> list[str]:
        """Return what has to be the same on all ranks, for their modules that keep running statistics."""
        return [f"{name} is in {'train' if module.training else 'eval'} mode" for name, module in self._norms]

    def start(self, step: int, total: int, each: int, *, blocked: bool) -> int:
        """Begin a step, in the place of any that was not finished; return its serial number."""
        check_norms(self._norms)
        self.step, self.total, self.each, self.blocked = step, total, each, blocked
        self.serial += 1
        self.stop()
        return self.serial

    def enter(self, at: int) -> None:
        """Come to this rank's micro-batch number `at`."""
        self._at, self._begun, self._done = at, False, False

    def leave(self) -> None:
        """Be through with a micro-batch; raise ShardError if it had no backward."""
        if not self._done:
            raise ShardError(
                "each micro-batch of mpizero.micro_batches must have one backward, and a whole one (got none that "
                f"ended for micro-batch {self._at} of this rank): give up the step with `break`, on all ranks"
            )

    def stop(self) -> None:
        """Stand outside any step."""
        self._at, self._begun, self._done = None, False, False

    def begin_backward(self, *, sync: bool) -> None:
        """Begin a backward; raise ShardError unless it is the one that is due."""
        if self._at is None or self._begun:
            got = "one outside the loop" if self._at is None else "a second one"
            raise ShardError(
                "a backward with exact=True must be the only one of its micro-batch, inside `for micro in "
                f"mpizero.micro_batches(model, batch, M):` (got {got}): add losses up, and call backward once"
            )
        if sync != self.sync:
            raise ShardError(
                "no_sync must be left to mpizero.micro_batches with exact=True (got another choice): choose "
                'numbering="blocked" to reduce once per step'
            )
        if torch.get_num_threads() != self.threads:
            raise ShardError(
                f"the number of torch's threads must stay {self.threads} with exact=True (got "
                f"{torch.get_num_threads()}): some gradients change with it; set it before mpizero.shard"
            )
        self._begun = True

    def end_backward(self) -> None:
        """Note that the backward has ended as it should; after the last one the step counts."""
        self._done = True
        if self.last:
            self.steps = self.step + 1

    def check_closed(self, what: str) -> None:
        """Raise ShardError if the sum over micro-batches has begun and has not come to its end."""
        if self._at is not None and (self._at > 0 or self._begun) and not (self.last and self._done):
            raise ShardError(
                f"{what} must follow the backward of a step's last micro-batch (got micro-batch {self._at + 1} of "
                f"{self.each}): move it out of the loop over mpizero.micro_batches"
            )


def is_power_of_two(value: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ..."""
    return value > 0 and value & (value - 1) == 0


def check_exact(model: nn.Module, precision: Precision, ignored: list[tuple[str, nn.Parameter]]) -> None:
    """Raise ArgumentError for what cannot have the same bits on any number of ranks, naming it.

    Args:
        model: the root.
        precision: the user's choice.
        ignored: the ignored parameters with their names.
    """
    check_norms(_running_norms(model))
    if precision.reduce in HALF:
        rule = "None with exact=True, which sends gradients in the master values' precision"
        raise ArgumentError(must_be("Precision.reduce", rule, precision.reduce))
    trained = [name for name, param in ignored if param.requires_grad]
    if trained:
        remedy = "nobody adds their gradients up in a fixed order"
        raise ArgumentError(must_be("ignored_params", "frozen with exact=True", ", ".join(trained), remedy))


def check_exact_ranks(ranks: Ranks) -> None:
    """Raise ArgumentError, on all ranks, for numbers and groups of ranks whose sums are no subtrees. Collective."""
    everyone, group = ranks.everyone, ranks.group
    if not is_power_of_two(everyone.size):
        raise ArgumentError(must_be("number of ranks", "a power of two with exact=True", everyone.size))
    if ranks.replicas is None:
        return
    fits = is_power_of_two(group.size) and everyone.rank % group.size == group.rank
    if not all_gather(np.array([fits], np.uint8), everyone, algorithm="direct").all():
        rule = "2, 4, 8, ... neighbouring ranks each, in their order, with exact=True"
        raise ArgumentError(must_be("groups", rule, f"groups of {group.size} ranks, others among them"))


def check_norms(norms: list[tuple[str, _NormBase]]) -> None:
    """Raise ArgumentError for modules that keep running statistics of the micro-batches that this rank sees."""
    wrong = [f"{name} ({type(module).__name__})" for name, module in norms if module.training or _is_joined(module)]
    if wrong:
        rule = "without running statistics of batches with exact=True"
        remedy = "use GroupNorm or LayerNorm, or keep these modules in eval mode: module.eval()"
        raise ArgumentError(must_be("model", rule, ", ".join(wrong), remedy))


def _running_norms(model: nn.Module) -> list[tuple[str, _NormBase]]:
    """Return the modules that keep running statistics, or that join batches over ranks, by name."""
    found: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, _NormBase)]
    return [(name or "the root", module) for name, module in found if module.track_running_stats or _is_joined(module)]


def _is_joined(module: Any) -> bool:
    return isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
