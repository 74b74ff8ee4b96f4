"""The memory of parameters that are gathered and reduced together: one flat buffer, its shards, their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from mpizero.plan import Layout, layout_of
from mpizero.shard.access import ShardedParameters, handle_of
from mpizero.shard.clipping import MARK

if TYPE_CHECKING:
    from mpizero.shard.policy import Lifetime, Precision

__all__ = ["FlatParams", "Member"]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class Member:
    """Hold one parameter of a unit, by all the names that it has."""

    names: list[str]
    """Fully qualified; more than one where modules share the parameter."""
    places: list[tuple[nn.Module, str]] = field(repr=False)
    """The modules, and the attribute of each, that hold it."""
    original: nn.Parameter = field(repr=False)
    """The parameter as it was before; without its memory once its values are taken over."""
    caches: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Lists and dicts of the modules' own that hold it too, with its index or key."""

    def let_go(self) -> None:
        """Mark the original as replaced, for optimizers that hold it, and drop it: it is as large as the model."""
        self.original._mpizero_replaced = self.names[0]  # type: ignore[attr-defined]  # noqa: SLF001
        self.original = nn.Parameter(torch.empty(0), requires_grad=False)


class FlatParams:
    """Own the buffers of parameters of one dtype that are all trainable or all frozen.

    [Note: four buffers] All are one-dimensional in the layout's order; n is its length, k a shard's.

    - `full`, n elements in compute precision: what forward and backward see. Its storage keeps one tensor object and is
      emptied on release, so that tensors which autograd saved find the values again once it is filled.
    - `master`, k fp32 elements (n where nothing is cut): what the optimizer updates, through `shards`. Where compute
      precision is the master's and `full` always lives, it is a slice of `full` and takes no memory of its own.
    - `accumulator`, k fp32 elements: the reduced gradients, which `shards[i].grad` are views of.
    - `incoming`, n elements: this backward's gradients, from the first that arrives to the reduction; `unsynced`, the
      same in fp32, what `no_sync` has kept back.
    """

    def __init__(
        self, members: list[Member], comm: Any, lifetime: Lifetime, precision: Precision, *, number: int = 0
    ) -> None:
        """Take over the members' values (rank 0's) and put shards in their place.

        Args:
            members: the parameters.
            comm: the model's communicator.
            lifetime: what the stage means.
            precision: the user's choice.
            number: which of the model's flat buffers this is; its messages go over channels of their own, so that
                ranks which are about to move different buffers wait for each other instead of swapping them.
        """
        self.members, self.comm, self.lifetime, self.number = members, comm, lifetime, number
        self.label = members[0].names[0] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        first = members[0].original
        self.trainable = first.requires_grad
        self.dtype = precision.param if precision.param is not None and first.is_floating_point() else first.dtype
        self.master_dtype = torch.float32 if first.dtype in _HALF else first.dtype
        self.reduce_dtype = precision.reduce or self.dtype
        self.layout: Layout = layout_of([(m.names[0], tuple(m.original.shape)) for m in members], comm.size)
        begin = comm.rank * self.layout.shard_length if lifetime.cut else 0
        self.own = slice(begin, begin + (self.layout.shard_length if lifetime.cut else self.layout.length))
        self._make_buffers()
        self._make_parameters()
        self.incoming: Tensor | None = None
        self.unsynced: Tensor | None = None
        self.arrived: set[int] = set()
        self.kept: set[int] = set()
        """The parameters that `unsynced` has gradients of."""
        self.stale = not self.aliased
        """Whether `full` was made from older values than `shards` hold. Set alike on all ranks."""
        self.seen = self.version()
        self.addresses = [shard.data_ptr() for shard in self.shards]
        if lifetime.release_parameters:
            self.release()

    def _make_buffers(self) -> None:
        layout = self.layout
        values = torch.zeros(layout.length, dtype=self.master_dtype)
        for slot, member in zip(layout.slots, self.members, strict=True):
            values[slot.offset : slot.stop] = member.original.detach().reshape(-1).to(self.master_dtype)
        if self.comm.size > 1 and layout.length:
            broadcast(values, self.comm)
        self.aliased = self.dtype == self.master_dtype and not self.lifetime.release_parameters
        self.full = values if self.aliased else torch.empty(layout.length, dtype=self.dtype)
        self.master = self.full[self.own] if self.aliased else values[self.own].clone()
        self.accumulator = torch.zeros_like(self.master) if self.trainable else None
        self.live = True

    def _make_parameters(self) -> None:
        """Make the full parameters and the shards, and mark the originals as replaced."""
        self.full_params: list[nn.Parameter] = []
        self.shards: list[nn.Parameter] = []
        self.grads: list[Tensor] = []
        for index, (slot, member) in enumerate(zip(self.layout.slots, self.members, strict=True)):
            full = nn.Parameter(self.full[slot.offset : slot.stop].view(slot.shape), requires_grad=self.trainable)
            shard = nn.Parameter(self.piece_of(self.master, index), requires_grad=self.trainable)
            if self.comm.size > 1:
                handle_of(shard, member.names[0], cut=self.lifetime.cut)
            if self.accumulator is not None:
                self.grads.append(self.piece_of(self.accumulator, index))
                if self.lifetime.cut:
                    setattr(self.grads[-1], MARK, True)
            member.let_go()
            self.full_params.append(full)
            self.shards.append(shard)
            for module, name in member.places:
                if not isinstance(module._parameters, ShardedParameters):  # noqa: SLF001
                    module._parameters = ShardedParameters(module._parameters)  # noqa: SLF001
                module._parameters[name] = shard  # noqa: SLF001
            for holder, key in member.caches:
                holder[key] = shard

    def piece_of(self, shard: Tensor, index: int, rank: int | None = None) -> Tensor:
        """Return the part of parameter `index` that lies in a shard-sized buffer, in the shape that users see.

        That is (k, 1, ...) with the parameter's number of dimensions, or its own shape where nothing is cut.
        """
        slot = self.layout.slots[index]
        if not self.lifetime.cut:
            return shard[slot.offset : slot.stop].view(slot.shape)
        piece = self.layout.piece(index, self.comm.rank if rank is None else rank)
        part = shard[piece.position : piece.position + piece.numel]
        if not slot.shape:
            return part.view(()) if piece.numel else part
        return (
            part.view(-1, *[1] * (len(slot.shape) - 1)) if piece.numel else part.view(0, *[1] * (len(slot.shape) - 1))
        )

    def version(self) -> int:
        """Return a number that grows with every change in place of a shard."""
        return sum(shard._version for shard in self.shards)  # noqa: SLF001

    def full_version(self) -> int:
        """Return a number that grows with every change in place of a full parameter: they share it with `full`."""
        return self.full._version  # noqa: SLF001

    def replaced(self) -> list[str]:
        """Return the names of shards whose memory is no longer the master's, as after `model.to(dtype)`."""
        return [
            member.names[0]
            for member, shard, address in zip(self.members, self.shards, self.addresses, strict=True)
            if shard.dtype != self.master_dtype or shard.data_ptr() != address
        ]

    def toggled(self) -> list[str]:
        """Return the names of parameters that were frozen or unfrozen since they were sharded."""
        pairs = zip(self.members, self.shards, strict=True)
        return [member.names[0] for member, shard in pairs if shard.requires_grad != self.trainable]

    def changed(self) -> bool:
        """Return whether this rank's shards changed in place since `full` was filled; never where they are `full`."""
        return not (self.aliased and not self.lifetime.cut) and self.version() != self.seen

    def unshard(self) -> None:
        """Fill `full` with the current values: cast this rank's part, gather the others'. Collective where cut."""
        if self.live and not self.stale:
            return
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.layout.length * self.full.element_size())
        full = self.full.data  # written without the version counter: the values are those that autograd saved
        if not self.aliased:
            full[self.own].copy_(self.master)
        if self.lifetime.cut and self.layout.length:
            with self.comm.channel(2 * self.number, f"parameters {self.label}"):
                all_gather(full[self.own], self.comm, out=full)
        self.live, self.stale, self.seen = True, False, self.version()

    def release(self) -> None:
        """Let the memory of `full` go."""
        self.full.untyped_storage().resize_(0)
        self.live = False

    def show(self, *, full: bool) -> None:
        """Put the full parameters, or the shards, into the modules."""
        for member, whole, shard in zip(self.members, self.full_params, self.shards, strict=True):
            for module, name in member.places:
                module._parameters[name] = whole if full else shard  # noqa: SLF001
            for holder, key in member.caches:
                holder[key] = whole if full else shard

    def keep(self, index: int, *, sync: bool) -> None:
        """Move the gradient that autograd left on full parameter `index` into the unit's buffer.

        Args:
            index: the parameter.
            sync: whether this backward will be reduced; if not, the gradient joins `unsynced`.
        """
        param = self.full_params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:  # of nn.Embedding(sparse=True)
            grad = grad.to_dense()
        slot = self.layout.slots[index]
        if sync:
            if self.incoming is None:
                self.incoming = self._new_gradients(self.reduce_dtype)
            target = self.incoming[slot.offset : slot.stop].view(slot.shape)
            target.add_(grad) if index in self.arrived else target.copy_(grad)
            self.arrived.add(index)
            return
        if self.unsynced is None:
            self.unsynced = torch.zeros(self.layout.length, dtype=self.master_dtype)
        self.unsynced[slot.offset : slot.stop].view(slot.shape).add_(grad)
        self.kept.add(index)

    def _new_gradients(self, dtype: torch.dtype) -> Tensor:
        fresh = torch.empty(self.layout.length, dtype=dtype)
        for start, stop in self.layout.gaps():
            fresh[start:stop] = 0
        return fresh

    def reduce(self) -> None:
        """Average this backward's gradients over the ranks into the accumulator. Collective; ends `incoming`."""
        total = self._take_incoming()
        if self.accumulator is None:
            return
        has = [self._adopt(index) for index in range(len(self.shards))]
        fresh = not any(has) and total.dtype == self.accumulator.dtype
        part = self._average(total, self.accumulator if fresh else None)
        if part is not self.accumulator:
            self._accumulate(part, has)

    def _average(self, total: Tensor, into: Tensor | None) -> Tensor:
        """Return this rank's part of the gradients' mean over ranks, in `into` if given, else of `total`'s dtype."""
        if self.comm.size == 1 or not self.layout.length:
            return total
        with self.comm.channel(2 * self.number + 1, f"gradients of {self.label}"):
            if not self.lifetime.cut:
                return all_reduce(total, self.comm, op="mean", out=into, order="canonical")
            if into is None:
                into = torch.empty(self.layout.shard_length, dtype=total.dtype)
            return reduce_scatter(total, self.comm, op="mean", out=into, order="canonical")

    def _take_incoming(self) -> Tensor:
        """Return the local gradients, zero where none arrived, with what `no_sync` kept back."""
        total, self.incoming = self.incoming, None
        if total is None:
            total = torch.zeros(self.layout.length, dtype=self.reduce_dtype)
        else:
            for index in set(range(len(self.members))) - self.arrived:
                slot = self.layout.slots[index]
                total[slot.offset : slot.stop] = 0
        self.arrived.clear()
        if self.unsynced is not None:
            total, self.unsynced = self.unsynced.add_(total), None
            self.kept.clear()
        return total

    def hold_place(self) -> None:
        """Give shards whose gradients wait in `unsynced` a gradient of zero, which `zero_grad` will then take away."""
        for index in self.kept:
            if self.shards[index].grad is None:
                self.grads[index].zero_()
                self.shards[index].grad = self.grads[index]

    def drop_zeroed(self) -> list[int]:
        """Forget the `unsynced` gradients of shards whose `.grad` the user has set to None; return which."""
        dropped = [index for index in self.kept if self.shards[index].grad is None]
        for index in dropped:
            slot = self.layout.slots[index]
            if self.unsynced is not None:
                self.unsynced[slot.offset : slot.stop] = 0
            self.kept.discard(index)
        if not self.kept:
            self.unsynced = None
        return dropped

    def _accumulate(self, part: Tensor, has: list[bool]) -> None:
        """Add reduced gradients to those that shards already have (`has`); start anew where `.grad` is None."""
        if self.accumulator is None:
            return
        if not any(has):
            self.accumulator.copy_(part)
        elif all(has):
            self.accumulator.add_(part)
        else:
            for index, kept in enumerate(has):
                source, target = self.piece_of(part, index), self.grads[index]
                target.add_(source) if kept else target.copy_(source)

    def _adopt(self, index: int) -> bool:
        """Return whether a shard has a gradient; one that the user put there moves into the accumulator."""
        grad = self.shards[index].grad
        if grad is None:
            return False
        if grad is not self.grads[index]:
            self.grads[index].copy_(grad)
            self.shards[index].grad = self.grads[index]
        return True

    def attach(self, used: list[bool]) -> None:
        """Give the shards of used parameters their gradients, on top of any that autograd has put there meanwhile."""
        for index, is_used in enumerate(used):
            if not is_used:
                continue
            shard, grad = self.shards[index], self.grads[index]
            if shard.grad is not None and shard.grad is not grad:  # a penalty on shards that a loss holds
                grad.add_(shard.grad)
            shard.grad = grad

    def gather_master(self) -> Tensor:
        """Return the whole master buffer on every rank. Collective where cut."""
        if not self.lifetime.cut:
            return self.master
        whole = torch.empty(self.layout.length, dtype=self.master_dtype)
        return all_gather(self.master, self.comm, out=whole) if self.layout.length else whole
