"""Check that what every rank should hold alike is still alike, to the bit.

A rank whose memory or network has gone wrong, or whose program did something on that rank alone, trains on with other
values in silence: nothing compares them. Here each rank hashes what it holds, and ranks compare hashes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpizero.collectives import all_gather
from mpizero.errors import ArgumentError, ShardError, must_be
from mpizero.shard.batchnorm import SyncBatchNorm
from mpizero.shard.runtime import runtime_of
from mpizero.tables import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mpizero.shard.flat import FlatParams
    from mpizero.shard.runtime import Runtime

__all__ = ["ReplicaWatch", "check_replicas", "watch_replicas"]

EVERYONE, REPLICAS = 0, 1
"""Which ranks hold the same: all, or those that hold the same shards in hybrid sharding."""
NBYTES = 8
"""Of a hash: two different tensors have the same one once in 10^19 times."""
SHOWN = 3

Item = tuple[str, int, Any]
"""What it is, which ranks hold it alike, and its tensor or text."""


def check_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, skip: Iterable[str] = ()
) -> None:
    """Raise on all ranks unless they hold the same bits wherever they should.

    Compared are, over all ranks: buffers; at stage 0 the parameters and the optimizer's state; at stages 1 and 2 with
    private memory the full parameters, where no step has made them old (so call it between backward and step); the
    optimizer's step counts and the options of its groups, such as the learning rate; `ignored_params`. And in hybrid
    sharding, over the ranks that hold the same shards: these, and their state. At stage 3 no two ranks of a group hold
    the same parameters; a node's shared copy is one. The running statistics of BatchNorm belong to each rank (those of
    `mpizero.SyncBatchNorm` do not), and are left out.

    Args:
        model: a sharded model, outside forward and backward.
        optimizer: its optimizer; None leaves its state out.
        skip: names of buffers and parameters to leave out: what is meant to differ.

    Raises:
        ShardError: on all ranks, where some differ; names the first in the model's order and the ranks that differ from
            the majority. Also where ranks make different calls.

    Collective: 20 bytes per rank to agree, 24 of hashes, and 8 per item where something differs. Each rank reads, and
    hashes, all that is compared, some 1 GB/s on a core; what is on a GPU is copied to the host for that, a tensor at a
    time. Hashes are BLAKE2b: Aumasson et al., 2013.
    """
    runtime = runtime_of(model)
    runtime.check_together("check_replicas")
    if runtime.comm.size > 1:
        _check(runtime, optimizer, frozenset(skip))


def watch_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, every: int, skip: Iterable[str] = ()
) -> ReplicaWatch:
    """Call `check_replicas` before every so many optimizer steps, from now on, on all ranks.

    Args:
        model: a sharded model.
        optimizer: see `check_replicas`.
        every: 1 or more; of a hundred steps one hash costs little.
        skip: see `check_replicas`.

    Returns:
        What ends it by `remove()`, on all ranks.

    Raises:
        ArgumentError: for another `every`. The optimizer's `step()` raises what `check_replicas` does.
    """
    if every < 1:
        raise ArgumentError(must_be("every", "a whole number of steps, 1 or more", every))
    return ReplicaWatch(runtime_of(model), optimizer, every, frozenset(skip))


class ReplicaWatch:
    """Be one model's periodic check; made by `watch_replicas`."""

    def __init__(
        self, runtime: Runtime, optimizer: torch.optim.Optimizer | None, every: int, skip: frozenset[str]
    ) -> None:
        """Check from the `every`-th step on."""
        self._runtime, self._optimizer, self._every, self._skip = runtime, optimizer, every, skip
        self._steps = 0
        runtime.before_steps.append(self._before_step)
        runtime.after_steps.append(self._after_step)

    def remove(self) -> None:
        """End the checks; to be called on all ranks, or twice."""
        if self._before_step in self._runtime.before_steps:
            self._runtime.before_steps.remove(self._before_step)
            self._runtime.after_steps.remove(self._after_step)

    def _before_step(self) -> None:
        self._steps += 1
        if self._runtime.updates is None:
            self._check()

    def _after_step(self) -> None:
        updates = self._runtime.updates
        if updates is not None and not updates.open:  # else ranks are in the middle of it, as they are before the step
            self._check()

    def _check(self) -> None:
        if self._steps % self._every == 0:
            check_replicas(self._runtime.model, self._optimizer, skip=self._skip)


def _check(runtime: Runtime, optimizer: torch.optim.Optimizer | None, skip: frozenset[str]) -> None:
    items = [*_parameters(runtime, skip), *_others(runtime, skip)]
    if optimizer is not None:
        items += _optimizer_items(runtime, optimizer, skip)
    hashes = np.array([_hash(value) for _, _, value in items], np.int64)
    kinds = np.array([kind for _, kind, _ in items])
    both = [_hash(hashes[kinds == kind].tobytes()) for kind in (EVERYONE, REPLICAS)]
    mine = np.array([*both, runtime.ranks.group.rank], np.int64)
    table = all_gather(mine, runtime.comm).reshape(-1, mine.size)
    holders = [[list(range(len(table)))], _alike(table[:, -1])]
    if all(len(set(table[ranks, kind].tolist())) == 1 for kind in (EVERYONE, REPLICAS) for ranks in holders[kind]):
        return
    table = all_gather(hashes, runtime.comm).reshape(-1, hashes.size)
    found = []
    for at, (name, kind, _) in enumerate(items):
        found += [f"{name} {text}" for ranks in holders[kind] if (text := _difference(table[:, at], ranks))]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise ShardError(
        f"what ranks hold alike must have the same bits (got {', '.join(found[:SHOWN])}{more}): the program changed it "
        "on some ranks only, or memory or network are at fault; go on from a checkpoint"
    )


def _alike(words: np.ndarray[Any, Any]) -> list[list[int]]:
    """Return the ranks with equal words, by words."""
    groups: dict[int, list[int]] = {}
    for rank, word in enumerate(words.tolist()):
        groups.setdefault(word, []).append(rank)
    return list(groups.values())


def _difference(words: np.ndarray[Any, Any], ranks: list[int]) -> str:
    """Say which of these ranks differ from the majority; "" if none does."""
    groups = sorted(([ranks[at] for at in group] for group in _alike(words[ranks])), key=len, reverse=True)
    if len(groups) == 1:
        return ""
    most, *others = groups
    if len(others[0]) == len(most):
        return "differs between " + " and ".join(ranks_in_words(group) for group in groups)
    return (
        f"on {ranks_in_words(sorted(rank for group in others for rank in group))} differs from {ranks_in_words(most)}"
    )


def _parameters(runtime: Runtime, skip: frozenset[str]) -> Iterator[Item]:
    order = {name: at for at, (name, _) in enumerate(runtime.model.named_parameters(remove_duplicate=False))}
    places = [(flat, index) for flat in runtime.flats for index in range(len(flat.members))]
    for flat, index in sorted(places, key=lambda place: order.get(_name(*place), -1)):
        name = _name(flat, index)
        if name in skip:
            continue
        if not flat.lifetime.cut:
            yield f"parameter {name!r}", EVERYONE, flat.shards[index]
            continue
        if runtime.replicas is not None:
            yield f"the shard of parameter {name!r}", REPLICAS, flat.shards[index]
        one_copy = flat.lifetime.shared and runtime.replicas is None
        if not (flat.lifetime.release_parameters or one_copy or flat.stale or flat.gathering is not None):
            yield f"the full parameter {name!r}", EVERYONE, flat.full_params[index]


def _others(runtime: Runtime, skip: frozenset[str]) -> Iterator[Item]:
    own = {
        id(buffer)
        for module in runtime.model.modules()
        if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    for name, buffer in runtime.model.named_buffers():
        if name not in skip and id(buffer) not in own:
            yield f"buffer {name!r}", EVERYONE, buffer
    for name, param in runtime.ignored:
        if name not in skip:
            yield f"ignored parameter {name!r}", EVERYONE, param


def _optimizer_items(runtime: Runtime, optimizer: torch.optim.Optimizer, skip: frozenset[str]) -> Iterator[Item]:
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(key for key in group if key != "params"):
            value = group[key]
            text = value if isinstance(value, Tensor) else repr(value).encode()
            yield f"option {key!r} of parameter group {number}", EVERYONE, text
    for flat in runtime.flats:
        for index, shard in enumerate(flat.shards):
            name = _name(flat, index)
            if name in skip:
                continue
            state: dict[str, Any] = optimizer.state.get(shard, {})
            cut = {key for key, value in state.items() if flat.lifetime.cut and _is_cut(flat, index, key, value)}
            whole = [state[key] for key in sorted(state) if key not in cut]
            yield f"the optimizer's state of {name!r}", EVERYONE, whole
            if runtime.replicas is not None:
                yield f"the optimizer's state of the shard of {name!r}", REPLICAS, [state[key] for key in sorted(cut)]


def _is_cut(flat: FlatParams, index: int, key: str, value: Any) -> bool:
    """Return whether a state has an element for each of the shard's; of a single number only "step" surely has not."""
    if key == "step" or not isinstance(value, Tensor):
        return False
    return value.shape == flat.shards[index].shape or not flat.layout.slots[index].shape


def _name(flat: FlatParams, index: int) -> str:
    return flat.members[index].names[0]


def _hash(value: Any) -> int:
    """Return the hash of a tensor, of bytes, or of a list of them and of what `repr` tells apart."""
    state = blake2b(digest_size=NBYTES)
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, Tensor):
            plain = part.detach().to_dense() if part.layout is not torch.strided else part.detach()
            state.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            state.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            state.update(part if isinstance(part, bytes) else repr(part).encode())
    return int.from_bytes(state.digest(), "little", signed=True)
