"""Optimizers whose state is offloaded: on a disk, or updated while backward goes on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mpizero.arrays.trim import give_back
from mpizero.errors import ArgumentError, ArgumentTypeError, DiskError, MpiZeroError, ShardError, must_be
from mpizero.optim.early import Early
from mpizero.optim.streaming import Array, Bit, Group, Part, Stream, groups_of
from mpizero.plan.groups import elements_of
from mpizero.shard.agree import raise_together
from mpizero.shard.optimizers import ELEMENTWISE, is_elementwise
from mpizero.shard.runtime import runtime_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpizero.arrays.disk import Region

__all__ = ["NUMBERS", "Offloaded", "offloaded"]

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state that are one number per parameter, also where that has the shape of a number; see
[Note: numbers or elements] in `checkpoint.optimizers`."""
MASTER, WORKING = "master", "working"
DISK, OTHER = 1, 2
"""What failed in a step, as ranks tell each other."""


def offloaded(
    cls: Any,
    model: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    during_backward: bool = False,
    **options: Any,
) -> torch.optim.Optimizer:
    """Build an optimizer whose state is where the model's `Offload` says.

        model = mz.shard(model, offload=mz.Offload(optimizer="/local/disk"))
        optimizer = mz.offloaded(torch.optim.AdamW, model, lr=3e-4, fused=True)

    Args:
        cls: an element-wise optimizer of torch's, or one that was declared by `elementwise`.
        model: a model that was sharded with `offload`.
        params: its parameters, or groups of them as torch takes them; None for all but `ignored_params`, which need an
            optimizer of their own.
        during_backward: whether each unit is updated as soon as its gradients are reduced, beside the rest of backward,
            and `step` does what is left. Then there is one backward per step outside `no_sync`, gradients cannot be
            clipped, unscaled or watched for NaN, groups' options have to be set ahead of backward, and ranks of a node
            share no parameters (`node_shared=False`). What backward has updated is not taken back, by `zero_grad`
            neither: after one that raised go back to a checkpoint.
        options: as of `cls`.

    Returns:
        An optimizer as any, with the bits of one in memory by the same implementation (`foreach`, `fused`): schedulers,
        `clip_grad_norm_`, `save` and `load` take it. With state in memory and updates after backward it is one of
        `cls`. On a disk, a step reads and writes every byte of state of parameters that have a gradient once, in groups
        of `Offload.group_bytes`, three of which are in memory; state is made in the first step.

    Raises:
        ArgumentError: for a model without `offload`, a class that is not element-wise, or a model whose gradients or
            parameters are needed after they are reduced, with `during_backward`.
    """
    runtime = runtime_of(model)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        remedy = "the class itself, with its options behind the model"
        got = f"one of {type(cls).__name__}" if isinstance(cls, torch.optim.Optimizer) else cls
        raise ArgumentTypeError(must_be("cls", "a class of optimizers, as torch.optim.AdamW", got, remedy))
    if runtime.spill is None:
        remedy = "or build the optimizer as ever"
        raise ArgumentError(must_be("model", "sharded with offload=mpizero.Offload(...)", "one without", remedy))
    if not is_elementwise(cls):
        known = ", ".join(ELEMENTWISE)
        remedy = f"use one of {known}, or declare your own class with mpizero.elementwise"
        raise ArgumentError(must_be("cls", "element-wise", cls.__name__, remedy))
    ignored = {id(param) for _, param in runtime.ignored}
    chosen = [param for param in model.parameters() if id(param) not in ignored] if params is None else list(params)
    inner = cls(chosen, **options)
    if runtime.updates is not None:
        runtime.updates.end()
    if runtime.spill.transfers is not None:  # fused ones would read the scale before it has come from the device
        inner._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    if runtime.spill.optimizer is None and not during_backward:
        return inner
    return Offloaded(inner, runtime, during_backward=during_backward)


class Offloaded(torch.optim.Optimizer):
    """Step with another optimizer over state in pieces, on a disk or as gradients come; see `offloaded`."""

    _mpizero_elementwise = _mpizero_offloaded = True  # for `shard.optimizers`

    def __init__(self, inner: torch.optim.Optimizer, runtime: Any, *, during_backward: bool = False) -> None:
        """Take over an optimizer that has not stepped.

        Args:
            inner: knows the arithmetic and the options.
            runtime: of the model whose shards it holds.
            during_backward: see `offloaded`.

        Raises:
            ArgumentError: if it holds parameters that are not this model's; and see `Early`.
        """
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.of = type(inner)
        """The class that a checkpoint names."""
        self._inner, self._runtime, self._spill = inner, runtime, runtime.spill
        self._place = {id(shard): (flat, index) for flat in runtime.flats for index, shard in enumerate(flat.shards)}
        self._check(self.param_groups)
        self._regions: dict[int, dict[str, tuple[Region | None, Tensor]]] = {id(flat): {} for flat in runtime.flats}
        """By buffer and key, where the elements of states are on a disk, and that as one tensor, then mapped."""
        self._stream = Stream(self._arrays)
        self._cut: dict[tuple[int, ...], tuple[list[tuple[int, str]], list[Group]]] = {}
        """By buffers, the groups that they are cut into, and for which states."""
        self._early: Early | None = None
        if during_backward:
            self._early = Early(runtime, lambda flat: self._pass_over([flat]), self._options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; raise ArgumentError for others."""
        super().add_param_group(param_group)
        if hasattr(self, "_place"):  # not from the constructor
            try:
                self._check(self.param_groups[-1:])
            except ArgumentError:
                del self.param_groups[-1]
                raise

    def _check(self, groups: list[dict[str, Any]]) -> None:
        others = sum(id(param) not in self._place for group in groups for param in group["params"])
        if others:
            remedy = "give shards, from model.parameters(), or leave params out for all"
            raise ArgumentError(must_be("params", "this model's", f"{others} others", remedy))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Collective: ranks tell each other of disks that fail.

        Args:
            closure: evaluates the model and returns the loss.

        Raises:
            DiskError: on all ranks, if the disk of some rank is full or fails; the model is half updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        failure: MpiZeroError | str = ""
        if self._spill.files:
            give_back()  # what forward and backward have used, ahead of the groups
        try:
            if self._early is not None:
                self._early.settle()
            self._pass_over([flat for flat in self._flats() if self._early is None or not self._early.is_done(flat)])
        except MpiZeroError as error:
            failure = error
        # An ordinary meeting of the ranks first, by which one that calls something else is named.
        kind = 0 if not failure else DISK if isinstance(failure, DiskError) else OTHER
        kinds = self._runtime.check_together("offloaded step", np.array([kind], np.uint8))
        found = {kind} if kinds is None else set(kinds[:, 1].tolist())
        if found != {0}:
            raise_together(self._runtime.comm, failure, ShardError if OTHER in found else DiskError)
        for flat in self._flats():
            flat.source.streamed()
        if self._early is not None:
            self._early.forget(given_up=False)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's signature)
        """Take gradients away, and forget a step that was given up."""
        if self._early is not None:
            self._early.forget()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states and options, which go to where they belong in the next step."""
        if self._early is not None:
            self._early.forget()
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def _pass_over(self, flats: list[Any]) -> None:
        """Update flat buffers, of parameters that have a gradient."""
        self._adopt(flats)
        groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        fresh: dict[int, dict[str, Any]] = {}
        busy = [group for group in self._groups_of(flats) if any(self._bits(part, groups) for part in group)]
        with ExitStack() as stepping:
            for flat in flats:
                stepping.enter_context(flat.source.stepping())
            self._stream.run(busy, lambda group: self._update(group, groups, fresh))
        for number, entry in fresh.items():
            flat, index = self._place[number]
            self.state[flat.shards[index]].update(entry)

    def _options(self) -> list[str]:
        return [repr({key: group[key] for key in group if key != "params"}) for group in self.param_groups]

    def _flats(self) -> list[Any]:
        return [flat for flat in self._runtime.flats if flat.trainable]

    def _groups_of(self, flats: list[Any]) -> list[Group]:
        """Return the groups of some flat buffers; with more arrays fewer elements are in a group."""
        which, keys = tuple(map(id, flats)), [(id(flat), key) for flat in flats for key in self._regions[id(flat)]]
        if which not in self._cut or self._cut[which][0] != keys:
            self._cut[which] = keys, groups_of(flats, self._most(flats))
        return self._cut[which][1]

    def _most(self, flats: list[Any]) -> int:
        """Return the elements of a group."""
        arrays = [self._arrays(flat).values() for flat in flats]
        width = max((sum(array.dtype.itemsize for array in some) for some in arrays), default=0)
        return elements_of(self._spill.offload.group_bytes, width)

    def _arrays(self, flat: Any) -> dict[str, Array]:
        """Return what a step reads and writes of a flat buffer."""
        found = {}
        source = flat.source
        if source.region is not None:
            found[MASTER] = Array(region=source.region, dtype=flat.master_dtype)
            if source.on_disk is not None and source.on_disk is not source.region:
                found[WORKING] = Array(region=source.on_disk, dtype=flat.dtype, written_only=True)
        for key, (region, tensor) in self._regions[id(flat)].items():
            if region is not None:
                found[key] = Array(region=region, dtype=tensor.dtype)
        return found

    def _bits(self, part: Part, groups: dict[int, int]) -> list[Bit]:
        """Return the runs that this step changes: those of parameters that are ours and have a gradient."""
        shards = part.flat.shards
        return [b for b in part.bits if id(shards[b.index]) in groups and shards[b.index].grad is not None]

    def _update(self, group: Group, groups: dict[int, int], fresh: dict[int, dict[str, Any]]) -> None:
        """Have the inner optimizer step over a group."""
        places: list[tuple[Part, Bit, nn.Parameter]] = []
        chosen: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for part in group:
            for bit in self._bits(part, groups):
                shard = part.flat.shards[bit.index]
                param = self._stand_in(part, bit, shard)
                places.append((part, bit, param))
                chosen[groups[id(shard)]].append(param)
        inner = self._inner
        inner.param_groups = [
            {**group, "params": params} for group, params in zip(self.param_groups, chosen, strict=True)
        ]
        inner.step()
        for part, bit, param in places:
            entry = inner.state.pop(param, {})
            self._keep(part, bit, param, entry, fresh)
        for its in inner.param_groups:
            its["params"] = []  # else the last group's memory lives on
        for part in group:
            self._hand_on(part)

    def _stand_in(self, part: Part, bit: Bit, shard: nn.Parameter) -> nn.Parameter:
        """Return a parameter that is a run of a shard's elements, its state and gradient those of the run."""
        master = part.slots.get(MASTER)
        inside = slice(bit.start - part.start, bit.stop - part.start)
        values = part.flat.master.detach()[bit.start : bit.stop] if master is None else master[inside]
        param = nn.Parameter(values)
        assert shard.grad is not None  # noqa: S101  (see `_bits`)
        values = shard.grad.data.reshape(-1)  # what the optimizer does to it is no change of the user's
        param.grad = values[bit.skip : bit.skip + bit.stop - bit.start]
        state = self.state.get(shard)
        if state:
            run = slice(bit.start, bit.stop)
            rooms = self._regions[id(part.flat)]
            self._inner.state[param] = {
                key: (part.slots[key][inside] if key in part.slots else rooms[key][1][run])
                if key in rooms and _is_elements(shard, key, value)
                else _copy(value)
                for key, value in state.items()
            }
        return param

    def _keep(
        self, part: Part, bit: Bit, param: nn.Parameter, entry: dict[str, Any], fresh: dict[int, dict[str, Any]]
    ) -> None:
        """Keep the state of a run: numbers for after the step, elements that are new on the disk."""
        shard = part.flat.shards[bit.index]
        numbers = fresh.setdefault(id(shard), {})
        for key, value in entry.items():
            if not (isinstance(value, Tensor) and value.shape == param.shape):
                numbers[key] = value
                continue
            room = self._room(part.flat, key, value.dtype)
            if key not in self.state.get(shard, {}):
                numbers[key] = part.flat.piece_of(room, bit.index)
            target = room[bit.start : bit.stop]
            if key in part.slots:
                target = part.slots[key][bit.start - part.start : bit.stop - part.start]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
            region = self._regions[id(part.flat)][key][0]
            if key not in part.slots and region is not None:
                region.settle()

    def _room(self, flat: Any, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a state, mapped where they are on a disk, made of zeros if they are not there."""
        found = self._regions[id(flat)]
        if key not in found:
            numel = flat.master.numel()
            if self._spill.optimizer is None:
                found[key] = None, torch.zeros(numel, dtype=dtype)
            else:
                region = self._spill.optimizer.grow(numel * dtype.itemsize)
                found[key] = region, torch.from_numpy(region.array()).view(dtype)
        return found[key][1]

    def _hand_on(self, part: Part) -> None:
        """Bring new master values to what gathers read."""
        flat, master = part.flat, part.slots.get(MASTER)
        if master is None:
            master = flat.master.detach()[part.start : part.stop]
        if WORKING in part.slots:
            part.slots[WORKING].copy_(master)
        else:
            with flat.home.order(), flat.source.aside():
                flat.source.put(part.start, master)

    def _adopt(self, flats: list[Any]) -> None:
        """Move states that were loaded into memory to where they belong."""
        for flat in flats:
            for index, shard in enumerate(flat.shards):
                for key, value in list(self.state.get(shard, {}).items()):
                    if not _is_elements(shard, key, value):
                        continue
                    room = flat.piece_of(self._room(flat, key, value.dtype), index)
                    if room.data_ptr() != value.data_ptr() and value.numel():
                        room.copy_(value)
                    self.state[shard][key] = room
            for region, _ in self._regions[id(flat)].values():
                if region is not None:
                    region.settle()

    @property
    def memory(self) -> int:
        """Return the bytes of memory that its steps hold."""
        return self._stream.nbytes


def _is_elements(param: Tensor, key: str, value: Any) -> bool:
    """Return whether a state has an element for each of its parameter's."""
    return isinstance(value, Tensor) and value.shape == param.shape and (param.dim() > 0 or key not in NUMBERS)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
