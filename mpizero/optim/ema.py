"""Average the parameters of a sharded model over its steps."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.collectives import barrier
from mpizero.errors import ArgumentError, ShardError, must_be
from mpizero.shard import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EMA"]


class EMA:
    """Keep an exponential moving average of the parameters of a sharded model that are trainable now.

        ema = mpizero.EMA(model)                    # after mpizero.shard
        ...; optimizer.step(); ema.update()
        with ema.swapped(): evaluate(model)

    Each rank averages its own shards, in master precision, so averages take as much memory as the shards do: 4 bytes
    per fp32 parameter at stage 0, 4/ranks at stages 1 to 3. All stages give the same bits. Buffers, such as BatchNorm's
    running statistics, are not averaged. Source: Polyak and Juditsky, 1992, with the exponential weights of Adam.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """Begin with the parameters as they are.

        Args:
            model: a sharded model, outside `unsharded`.
            decay: what an average keeps of itself at an update, 0 to 1; an average spans about 1 / (1 - decay) steps.

        Raises:
            ArgumentError: for another decay, or a model in which nothing is trainable.
            ShardError: if `model` is not sharded, or is inside `unsharded`.
        """
        if not 0 <= decay <= 1:
            raise ArgumentError(must_be("decay", "from 0 to 1", decay))
        self.model, self.decay = model, decay
        self.num_updates = 0
        self._runtime: Any = runtime_of(model)
        self._check_not_pinned("EMA")
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        if not named:
            raise ArgumentError(must_be("model", "one with trainable parameters", type(model).__name__))
        self._names = list(named)
        self._shards = [param.detach() for param in named.values()]
        """Views of the shards that count changes in place with them."""
        self._averages = [shard.clone() for shard in self._shards]
        self._inside = False

    def update(self) -> None:
        """Move the averages towards the parameters by 1 - decay of the distance; after every optimizer step.

        Raises:
            ShardError: inside `swapped`.

        Sends nothing.
        """
        self._check_outside("update")
        torch._foreach_lerp_(self._averages, self._shards, 1 - self.decay)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Let the model compute with the averages for the length of a `with` block, for evaluation.

        Parameters and averages change places, in place, and change back at the end, exactly. Inside, the model may be
        called, gathered by `unsharded` and read by `full_parameters`, but not trained. Needs memory for one more shard
        of the largest parameter.

        Yields:
            The model.

        Raises:
            ShardError: inside `unsharded` or another `swapped`; at the end, if parameters were changed inside, after
                they were put back.

        Collective at entry and at exit: a barrier before each exchange, since ranks of one host may read each other's
        shards where they lie. If the block raises, parameters are put back at once, with no barrier: the other ranks
        may never come.
        """
        self._check_outside("swapped")
        self._check_not_pinned("swapped")
        self._meet()
        self._exchange()
        self._inside = True
        before = self._version()
        changed = False
        try:
            yield self.model
            changed = self._version() != before
            self._check_not_pinned("the end of swapped")
            self._meet()
        finally:
            self._exchange()
            self._inside = False
        if changed:
            raise ShardError(
                "parameters must be left alone inside EMA.swapped (got a change in place, or an optimizer step): the "
                "change went into the averages; train outside the block"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's averages by parameter name, not copied, with the decay and the number of updates.

        Raises:
            ShardError: inside `swapped`.
        """
        self._check_outside("state_dict")
        averages = dict(zip(self._names, self._averages, strict=True))
        return {"decay": self.decay, "num_updates": self.num_updates, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank of as many ranks, at a stage that cuts alike.

        Args:
            state: the state; its values are copied.

        Raises:
            ArgumentError: for averages of other parameters or shapes; nothing is changed then.
            ShardError: inside `swapped`.
        """
        self._check_outside("load_state_dict")
        averages: dict[str, Tensor] = state["averages"]
        if list(averages) != self._names:
            other = sorted(set(averages) ^ set(self._names)) or "another order"
            raise ArgumentError(must_be("state of EMA", "of the same parameters, in their order", other))
        for name, average in zip(self._names, self._averages, strict=True):
            if averages[name].shape != average.shape:
                remedy = "load on the same rank of as many ranks, at stage 0 or at stages 1 to 3 as it was saved"
                got = tuple(averages[name].shape)
                raise ArgumentError(must_be(f"average of {name!r}", f"of shape {tuple(average.shape)}", got, remedy))
        for name, average in zip(self._names, self._averages, strict=True):
            average.copy_(averages[name])
        self.decay, self.num_updates = state["decay"], state["num_updates"]

    def _meet(self) -> None:
        """Wait until no rank reads parameters any more."""
        if self._runtime.comm.size > 1:
            barrier(self._runtime.comm)

    @torch.no_grad()
    def _exchange(self) -> None:
        for shard, average in zip(self._shards, self._averages, strict=True):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)

    def _version(self) -> int:
        return sum(shard._version for shard in self._shards)  # noqa: SLF001

    def _check_outside(self, what: str) -> None:
        if self._inside:
            raise ShardError(f"{what} of EMA must come outside its swapped block (got a call inside): leave it first")

    def _check_not_pinned(self, what: str) -> None:
        if self._runtime.pinned:
            raise ShardError(f"{what} must come outside mpizero.unsharded (got a call inside): leave the block first")
