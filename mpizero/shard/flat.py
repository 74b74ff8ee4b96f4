"""The memory of parameters that are gathered together: one flat buffer and its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.collectives import all_gather, barrier, broadcast, empty
from mpizero.plan import Layout, layout_of
from mpizero.shard.access import ShardedParameters, handle_of
from mpizero.shard.agree import naming
from mpizero.shard.exact_gradients import ExactGradients
from mpizero.shard.gradients import Gradients
from mpizero.shard.policy import HALF
from mpizero.shard.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.comm import Work
    from mpizero.shard.home import Home
    from mpizero.shard.member import Member
    from mpizero.shard.meta import MetaModel
    from mpizero.shard.offload import Spill
    from mpizero.shard.policy import Lifetime, Precision, Ranks
    from mpizero.shard.window import Window

__all__ = ["FlatParams", "dtypes_of"]


class FlatParams:
    """Own the buffers of parameters of one dtype that are gathered together.

    [Note: buffers of parameters] All are one-dimensional in the layout's order; n is its length, k a shard's.

    - `full`, n elements in compute precision: what forward and backward see. Where it is released between uses its
      storage keeps one tensor object and is emptied, so that tensors which autograd saved find the values again once it
      is filled; where the node shares it, it lies in the window and always lives (see `window`).
    - `master`, k fp32 elements (n where nothing is cut): what the optimizer updates, through `shards`. Where compute
      precision is the master's and `full` always lives, it is a slice of `full` and takes no memory of its own. It may
      lie on a disk or, of a model on a GPU, on the host; see [Note: offloaded parts] in `source`.
    - `gradients`: see `gradients`; None while nothing is trained.
    """

    def __init__(
        self,
        members: list[Member],
        ranks: Ranks,
        policy: tuple[Lifetime, Precision],
        home: Home,
        *,
        number: int = 0,
        window: Window | None = None,
        meta: MetaModel | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Take over the members' values (rank 0's) and put shards in their place. Collective.

        Args:
            members: the parameters.
            ranks: who averages gradients, and who holds parts of a parameter.
            policy: what the stage means, and the user's choice of precisions.
            home: where the model lies; see [Note: home stream].
            number: which of the model's flat buffers this is; its messages go over channels of their own, so that
                ranks which are about to move different buffers wait for each other instead of swapping them.
            window: where the node's full parameters are to lie, where it shares them.
            meta: makes the values of members that are on the meta device.
            spill: takes what is moved out of memory; None leaves all there.
        """
        lifetime, precision = policy
        self.members, self.ranks, self.lifetime, self.number = members, ranks, lifetime, number
        self.home = home
        self.comm, self.window = ranks.group, window
        """The ranks that the buffer is cut over."""
        self.label = members[0].names[0] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        self.dtype, self.master_dtype = dtypes_of(members, precision)
        exact = lifetime.exact is not None
        self.reduce_dtype = self.master_dtype if exact else precision.reduce or self.dtype
        self.trained = {index for index, member in enumerate(members) if member.original.requires_grad}
        """The parameters that require a gradient."""
        self.layout: Layout = layout_of([(m.names[0], tuple(m.original.shape)) for m in members], self.comm.size)
        begin = self.comm.rank * self.layout.shard_length if lifetime.cut else 0
        self.own = slice(begin, begin + (self.layout.shard_length if lifetime.cut else self.layout.length))
        self.early: Callable[[bool], None] | None = None
        """Told when a reduced gradient has come to the accumulator, and whether every trained parameter has one; for
        who updates shards while backward goes on."""
        self.gathering: Work | None = None
        """The gather that is under way."""
        self.gathered = 0.0
        """When the latest one was over, in seconds of `time.perf_counter`."""
        self._make_buffers(meta, spill)
        self._make_parameters()
        self.gradients: Gradients | None = None
        self.make_gradients()
        self.stale = not self.aliased
        """Whether `full` was made from older values than `shards` hold. Set alike on all ranks."""
        self.seen = self.version()
        self.addresses = [shard.data_ptr() for shard in self.shards]
        if lifetime.shared:
            self.unshard()
        if lifetime.release_parameters:
            self.release()

    @property
    def trainable(self) -> bool:
        """Return whether any parameter requires a gradient."""
        return bool(self.trained)

    def _make_buffers(self, meta: MetaModel | None, spill: Spill | None) -> None:
        layout, lifetime = self.layout, self.lifetime
        self.transfers = None if spill is None else spill.transfers
        self.aliased = self.dtype == self.master_dtype and not lifetime.release_parameters and self.transfers is None
        if self.window is not None and self.aliased and self.ranks.replicas is None:
            self.full = self.window.take(layout.length, self.dtype)
            if self.comm.rank == 0:
                self._fill(self.full, meta)
            barrier(self.comm)
        else:
            values = torch.zeros(layout.length, dtype=self.master_dtype, device=self.home.device)
            if self.ranks.everyone.rank == 0:
                self._fill(values, meta)
            if self.ranks.everyone.size > 1 and layout.length:
                broadcast(values, self.ranks.everyone)
            self._place(values, spill)
        if self.aliased:
            self.source = Source(self.full[self.own])
        self.master = self.source.master
        self.live = True

    def _fill(self, values: Tensor, meta: MetaModel | None) -> None:
        to_make = []
        for slot, member in zip(self.layout.slots, self.members, strict=True):
            target = values[slot.offset : slot.stop].view(slot.shape)
            if member.original.is_meta:
                to_make.append((member, target))
            else:
                target.copy_(member.original.detach())
        if to_make and meta is not None:
            meta.fill(to_make)

    def _place(self, values: Tensor, spill: Spill | None) -> None:
        """Put whole master values where they belong."""
        if self.window is not None:
            self.full = self.window.take(self.layout.length, self.dtype)
            if self.aliased:
                self.full[self.own].copy_(values[self.own])
                barrier(self.comm)
        elif self.dtype == self.master_dtype:  # also where it is released at once: there is no second copy to be had
            self.full = values
        else:
            self.full = torch.empty(self.layout.length, dtype=self.dtype, device=self.home.device)
        if self.aliased:
            return
        if spill is None:
            self.source = Source(values[self.own].clone())
        else:
            lives = None if self.lifetime.release_parameters else self.full[self.own]
            self.source = spill.source(values[self.own].clone(), self.dtype, self.lifetime, lives)

    def _make_parameters(self) -> None:
        """Make the full parameters and the shards, and mark the originals as replaced."""
        self._shown: list[tuple[Any, Any, nn.Parameter, nn.Parameter]] = []
        """Where modules hold parameters: a holder and the key in it, the full parameter and the shard."""
        self.full_params: list[nn.Parameter] = []
        self.shards: list[nn.Parameter] = []
        for index, (slot, member) in enumerate(zip(self.layout.slots, self.members, strict=True)):
            trained = index in self.trained
            full = nn.Parameter(self.full[slot.offset : slot.stop].view(slot.shape), requires_grad=trained)
            shard = nn.Parameter(self.piece_of(self.master, index), requires_grad=trained)
            if self.ranks.everyone.size > 1:
                handle_of(shard, member.names[0], cut=self.lifetime.cut)
            member.let_go()
            self.full_params.append(full)
            self.shards.append(shard)
            for module, name in member.places:
                if not isinstance(module._parameters, ShardedParameters):  # noqa: SLF001
                    module._parameters = ShardedParameters(module._parameters)  # noqa: SLF001
                self._shown.append((module._parameters, name, full, shard))  # noqa: SLF001
            self._shown += [(holder, key, full, shard) for holder, key in member.caches]
        self.show(full=False)

    def make_gradients(self, *, symmetric: bool = True) -> None:
        """Make room for gradients where some parameter is trained and there is none yet.

        Args:
            symmetric: whether to take memory that peers can reach, where nothing is cut; then it is collective.
        """
        if self.gradients is not None or not self.trained:
            return
        exact = self.lifetime.exact is not None
        by_loads = self.comm.board is not None and not self.home.on_device
        if exact or not symmetric or self.lifetime.cut or not by_loads:
            accumulator = torch.zeros_like(self.master)
        else:  # reduced in place, by loads and stores of the peers
            accumulator = empty(self.master.numel(), self.master_dtype, self.comm).zero_()
        self.gradients = (ExactGradients if exact else Gradients)(self, self.reduce_dtype, accumulator)

    def piece_of(self, shard: Tensor, index: int) -> Tensor:
        """Return the part of parameter `index` that lies in a shard-sized buffer, in the shape that users see.

        That is (k, 1, ...) with the parameter's number of dimensions, or its own shape where nothing is cut.
        """
        slot = self.layout.slots[index]
        if not self.lifetime.cut:
            return shard[slot.offset : slot.stop].view(slot.shape)
        piece = self.layout.piece(index, self.comm.rank)
        part = shard[piece.position : piece.position + piece.numel]
        if not slot.shape:
            return part.view(()) if piece.numel else part
        return part.view(piece.numel, *[1] * (len(slot.shape) - 1))

    def version(self) -> int:
        """Return a number that grows with every change in place of a shard: they share it with `master`."""
        return self.master._version  # noqa: SLF001

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

    def toggled(self) -> list[int]:
        """Return the parameters that were frozen or unfrozen since this was last asked by `follow`."""
        return [index for index, shard in enumerate(self.shards) if shard.requires_grad != (index in self.trained)]

    def follow(self) -> list[int]:
        """Train what the user has unfrozen, and no longer what was frozen; return what is new."""
        toggled = self.toggled()
        for index in toggled:
            self.full_params[index].requires_grad_(self.shards[index].requires_grad)
            self.trained ^= {index}
            if index not in self.trained:
                self.shards[index].grad = None
        self.make_gradients(symmetric=False)
        return [index for index in toggled if index in self.trained]

    @property
    def apart(self) -> bool:
        """Return whether a change of this rank's shards has to be brought to full parameters: some lie elsewhere."""
        return not self.aliased or (self.lifetime.cut and not self.lifetime.shared)

    def changed(self) -> bool:
        """Return whether this rank's shards changed in place since `full` was filled; never where they are `full`."""
        return self.apart and self.version() != self.seen

    def unshard(self) -> None:
        """Fill `full` with the current values: cast this rank's part, gather the others'. Collective where cut."""
        self.begin_unshard()
        self.end_unshard()

    def begin_unshard(self) -> None:
        """Begin to fill `full`. Collective where cut.

        Its memory is taken, and the collective called, in the order of the home stream. In a window this rank's part is
        put there, and the next agreement of all ranks tells that all parts are there.
        """
        if self.stale:  # a gather that is under way has the values from before a step
            self.end_unshard()
        if self.live and not self.stale:
            return
        with self.home.order():
            self._begin()
        self.live, self.stale, self.seen = True, False, self.version()

    def _begin(self) -> None:
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.layout.length * self.full.element_size())
        full = self.full.data  # written without the version counter: the values are those that autograd saved
        with self.source.aside():
            if not self.aliased:
                self.source.fill(full[self.own])
            if self.lifetime.cut and not self.lifetime.shared and self.layout.length:
                with self.comm.channel(2 * self.number, f"parameters {self.label}"):
                    self.gathering = all_gather(full[self.own], self.comm, out=full, async_op=True)
        if self.gathering is None:
            self.source.follow()

    def end_unshard(self) -> None:
        """Wait for the gather that is under way, if any; on a GPU, have the home stream and the current one do so."""
        if self.gathering is not None:
            gathering, self.gathering = self.gathering, None
            with self.home.order(), naming(f"parameters {self.label}"):
                gathering.wait()
            self.gathered = gathering.ended

    def release(self) -> None:
        """Let the memory of `full` go: on a GPU at once, to work that is queued behind what has used it."""
        with self.home.order():
            self.end_unshard()
            self.full.untyped_storage().resize_(0)
        self.live = False

    def show(self, *, full: bool) -> None:
        """Put the full parameters, or the shards, into the modules."""
        for holder, key, whole, shard in self._shown:
            holder[key] = whole if full else shard

    def gather_master(self) -> Tensor:
        """Return the whole master buffer on every rank. Collective where cut."""
        if not self.lifetime.cut:
            return self.master.to(self.home.device)
        whole = torch.empty(self.layout.length, dtype=self.master_dtype, device=self.home.device)
        own = self.master.to(self.home.device)
        return all_gather(own, self.comm, out=whole) if self.layout.length else whole


def dtypes_of(members: list[Member], precision: Precision) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the full parameters and of the master values."""
    first = members[0].original
    compute = precision.param if precision.param is not None and first.is_floating_point() else first.dtype
    if members[0].keeps:
        compute = first.dtype
    return compute, torch.float32 if first.dtype in HALF else first.dtype
