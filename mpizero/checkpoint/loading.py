"""Load a model: the verb `load`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.checkpoint.background import finish
from mpizero.checkpoint.failure import CheckpointError, listed, raise_together
from mpizero.checkpoint.folder import find, read_manifest
from mpizero.checkpoint.generators import derive, set_generators
from mpizero.checkpoint.match import Names, fitting
from mpizero.checkpoint.optimizers import check_states, group_options
from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.state import State
from mpizero.checkpoint.values import decode
from mpizero.errors import MpiZeroError
from mpizero.shard.ranges import communicator_of, loan_of, meet, set_held

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mpizero.checkpoint.match import Fitting
    from mpizero.checkpoint.spaces import Stored
    from mpizero.shard.offload import OnLoan

__all__ = ["load"]


@dataclass(kw_only=True)
class _Loaded:
    """Hold what was read, until all ranks have read theirs."""

    held: list[Tensor] = field(default_factory=list)
    whole: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    extra: Any = None
    generators: np.ndarray[Any, Any] | None = None
    same_ranks: bool = False


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    generators: bool = True,
) -> Any:
    """Load a checkpoint into a sharded model and its optimizer, by the names of parameters.

    The number of ranks, the stage, groups, units, the precision of forward and the order of parameters may all be
    others than when it was saved. Each rank reads what it holds, and blocks of 8 KiB around it, and checks it.
    Nothing is changed before all ranks have read everything. Nothing that is read can run code.

    Args:
        path: a checkpoint's folder, or one with several, of which `latest` names one.
        model: a sharded model with the same parameters and persistent buffers; ties may differ, where the
            names of a parameter were saved with the same values. Floating values are cast to the master's dtype.
        optimizer: one of the class that was saved, whose groups hold what was grouped then; None leaves what was saved
            of one aside.
        generators: whether to put this rank's random generators where they stood. On another number of ranks they are
            seeded from what rank 0 has saved and the rank.

    Returns:
        What `save` was given as `extra`; numpy arrays and tensors are copies.

    Raises:
        CheckpointError: with the same text on all ranks, for what is no checkpoint, a newer schema, missing and damaged
            files, wrong shapes, and missing and unexpected names; model and optimizer are as before.
        ArgumentError, ArgumentTypeError, ShardError: as of `save`.

    Collective: four all-gathers of a few dozen bytes per rank. Needs memory for what this rank reads, beside the model;
    for a model with state on a disk, room there instead, until the first step.
    """
    comm = communicator_of(model)
    finish(comm)
    error: MpiZeroError | str = ""
    digest = bytes(8)
    try:
        state = State(model, optimizer)
        folder = find(Path(os.path.abspath(os.fspath(path))))  # noqa: PTH100  (links stay what they are)
        digest = blake2b(os.fsencode(folder), digest_size=8).digest()
    except MpiZeroError as caught:
        error = caught
    except OSError as caught:
        error = f"{path} must be readable (got: {caught.strerror})"
    rows = meet(model, "load", np.frombuffer(digest, np.uint8))
    if not error and (rows != rows[0]).any():
        error = f"the checkpoint to load must be the same on all ranks (got {folder})"
    raise_together(comm, error)
    loaded = _Loaded()
    try:
        loaded = _read(folder, state, comm, generators=generators, memory=loan_of(model))
    except (MpiZeroError, OSError) as caught:
        error = caught if isinstance(caught, MpiZeroError) else str(caught)
    raise_together(comm, error)
    try:
        _put(loaded, model, state, comm)
    except MpiZeroError as caught:
        error = caught
    raise_together(comm, error)  # also keeps ranks from reading shared parameters before all are written
    return loaded.extra


def _read(folder: Path, state: State, comm: Any, *, generators: bool, memory: OnLoan | None) -> _Loaded:
    """Check that a checkpoint fits and read what this rank holds. Raises CheckpointError."""
    manifest = read_manifest(folder)
    names = Names(manifest)
    fit = fitting(state, names)
    loaded = _Loaded()
    spans = [(one.start, one.start + one.shard.numel()) for one in state.held]
    spans += [(0, tensor.numel()) for _, tensor in state.whole]
    with Reader(folder, manifest, memory) as reader:
        found = [reader.ask(stored, *span) for stored, span in zip(fit.stored, spans, strict=True)]
        loaded.held, loaded.whole = found[: len(state.held)], found[len(state.held) :]
        twins = [(place, stored, reader.ask(stored, *spans[place])) for place, stored in fit.twins]
        if state.optimized is not None:
            _ask_for_states(loaded, state, names, reader)
        loaded.extra = decode(manifest.extra, reader.ask_for_extra)
        by_rank = {one.rank: file for file, one in enumerate(manifest.files)}
        loaded.same_ranks = len(manifest.files) == comm.size
        reader.fetch()
        _check_twins(fit, found, twins)
        if generators:
            loaded.generators = reader.generators(by_rank.get(comm.rank if loaded.same_ranks else 0, 0))
    return loaded


def _check_twins(fit: Fitting, found: list[Tensor], twins: list[tuple[int, Stored, Tensor]]) -> None:
    """Raise CheckpointError if what modules share here was saved under several names, and is not the same."""
    for place, stored, value in twins:
        if not torch.equal(value, found[place]):
            both = listed(one.key.removeprefix("model/") for one in (fit.stored[place], stored))
            raise CheckpointError(f"{both} must have been saved alike, since they are one in this model (they differ)")


def _ask_for_states(loaded: _Loaded, state: State, names: Names, reader: Reader) -> None:
    """Ask for the elements of the optimizer's states, and take over its numbers and options."""
    optimized, saved = state.optimized, names.manifest.optimizer
    assert optimized is not None  # noqa: S101  (asked before)
    if saved is None:
        raise CheckpointError(
            "optimizer must be None (got one): the checkpoint was saved without; load the model alone"
        )
    loaded.groups = group_options(optimized, saved, names.resolve)
    check_states(optimized, saved, list(names.states), names.resolve)
    held = {id(one.shard): one for one in state.held}
    for param in optimized.params:
        name = names.resolve(optimized.names[id(param)])
        entry = {key: decode(value) for key, value in saved["state"].get(name, {}).items()}
        for key, stored in names.states.get(name, {}).items():
            one = held.get(id(param))
            start, stop = (0, stored.numel) if one is None else (one.start, one.start + param.numel())
            entry[key] = reader.ask(stored, start, stop, tuple(param.shape))
        loaded.states.append(entry)


def _put(loaded: _Loaded, model: nn.Module, state: State, comm: Any) -> None:
    """Put what was read into the model, the optimizer and the generators."""
    set_held(model, loaded.held)
    with torch.no_grad():
        for (_, tensor), value in zip(state.whole, loaded.whole, strict=True):
            tensor.copy_(value.view(tensor.shape))
    if state.optimized is not None:
        state.optimized.load(loaded.groups, loaded.states)
    if loaded.generators is not None:
        if loaded.same_ranks:
            set_generators(loaded.generators)
        else:
            derive(loaded.generators, comm.rank, comm.size)
