"""Save a model: the verbs `save` and `save_async`."""

from __future__ import annotations

import json
import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.checkpoint.background import SaveHandle, finish
from mpizero.checkpoint.failure import raise_together
from mpizero.checkpoint.files import Range
from mpizero.checkpoint.folder import Saving, hidden_path
from mpizero.checkpoint.generators import dump_generators
from mpizero.checkpoint.job import Job
from mpizero.checkpoint.state import State
from mpizero.checkpoint.tensors import bytes_of
from mpizero.collectives import all_gather
from mpizero.errors import ArgumentError, MpiZeroError, must_be
from mpizero.shard.ranges import communicator_of, is_exact, meet

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["save", "save_async"]

TOKEN = 8
COMPARED = ("path", "names, shapes and dtypes", "optimizer", "extra", "keep_last")
"""What has to be the same on all ranks."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    generators: bool = True,
) -> None:
    """Save a sharded model and its optimizer as a checkpoint, which any number of ranks can load at any stage.

    Saved are master values, persistent buffers, the optimizer's states and options, all under the parameters' names,
    and `extra`. Every rank writes one safetensors file with the ranges that it answers for, and rank 0 a manifest; see
    docs/checkpoints.md for the format. Gradients are not saved: save after `optimizer.step()`.

    Args:
        path: the folder to make; a checkpoint that is there is replaced at once, when the new one is whole. It must be
            on a file system that all hosts share. A file `latest` beside it then names it.
        model: a sharded model. Of what is whole on every rank (buffers, `ignored_params`) rank 0's values are saved.
        optimizer: an element-wise one of its parameters.
        extra: what else is to be known on loading, the same on all ranks: None, numbers, strings, bytes, tensors and
            numpy arrays in lists, tuples, sets and dicts, such as `scheduler.state_dict()` and a count of batches.
        keep_last: how many whole checkpoints to leave in the folder that holds `path`, this one included, 1 or more;
            None leaves all.
        generators: whether to save where each rank's random generators stand (torch, CUDA, Python, numpy). With
            `exact=True` they are not: every micro-batch is seeded anew; save the seed in `extra`.

    Raises:
        ArgumentTypeError: for what `extra` cannot hold.
        CheckpointError: with the same text on all ranks, if ranks save different things, something else is at `path`,
            or a rank cannot write there; what was there is as before.
        ShardError: for a model that is not sharded, inside `unsharded`, or if some ranks do something else.

    Collective: six all-gathers of a few dozen bytes per rank. Each rank writes its part and waits until it is on the
    disk; parts differ by 64 elements per buffer, and no memory is needed beyond what is on a GPU.
    """
    comm = communicator_of(model)
    finish(comm)
    job = _begin(path, model, optimizer, (extra, keep_last, generators))
    try:
        text = job.write()
        raise_together(comm, text)
        mine = np.array([job.file, comm.rank, *job.written], np.int64)
        table = all_gather(mine, comm, algorithm="direct").reshape(comm.size, -1) if comm.size > 1 else mine[None]
        raise_together(comm, job.commit(table.tolist()))
    finally:
        job.end()


def save_async(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    generators: bool = True,
) -> SaveHandle:
    """Copy what `save` would write and return; a thread of each rank writes it while training goes on.

    The checkpoint becomes visible, whole, as soon as the last rank has written its part; the threads meet in the file
    system and touch no communicator. A save that is under way is waited for first, by the next `save`, `save_async` and
    `load` of any model of these ranks, where its errors are raised too.

    Args:
        path: see `save`, as the others.
        model: a sharded model; it may be trained on when this returns.
        optimizer: see `save`.
        extra: see `save`.
        keep_last: see `save`.
        generators: see `save`.

    Returns:
        A handle: call its `wait()`, on all ranks, before the job ends.

    Errors are those of `save`; those of writing come later. Collective: three all-gathers. Costs memory for what this
    rank writes, kept for the next time.
    """
    comm = communicator_of(model)
    finish(comm)
    job = _begin(path, model, optimizer, (extra, keep_last, generators))
    try:
        return SaveHandle(comm, job)
    except BaseException:
        job.end()
        raise


def _begin(path: Any, model: nn.Module, optimizer: Any, options: tuple[Any, int | None, bool]) -> Job:
    """Work out what this rank writes, agree that all ranks save the same, and make the folder."""
    comm = communicator_of(model)
    extra, keep_last, generators = options
    error: MpiZeroError | None = None
    job: Job | None = None
    token, digests = os.urandom(TOKEN), bytes(8 * len(COMPARED))
    saving: Saving | None = None
    try:
        target = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100  (links stay what they are)
        _check_keep_last(keep_last)
        state = State(model, optimizer)
        job = _make_job(state, extra, comm, generators=generators and not is_exact(model))
        job.keep_last = keep_last
        digests = b"".join(_digest(part) for part in (str(target), job.plan, job.optimizer, job.extra_seen, keep_last))
        if comm.rank == 0:
            saving = Saving(target, token.hex())
    except MpiZeroError as caught:
        error = caught
    try:
        rows = meet(model, "save", np.frombuffer(token + digests, np.uint8))
        raise_together(comm, error if error is not None else "" if comm.size == 1 else _difference(rows))
        assert job is not None  # noqa: S101  (or there was an error)
        job.saving, job.hidden = saving, hidden_path(target, rows[0, :TOKEN].tobytes().hex())
    except BaseException:
        if saving is not None:
            saving.end()
        raise
    return job


def _check_keep_last(keep_last: Any) -> None:
    if keep_last is not None and (not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1):
        raise ArgumentError(must_be("keep_last", "a whole number, 1 or more, or None", keep_last))


def _make_job(state: State, extra: Any, comm: Any, *, generators: bool) -> Job:
    encoded = state.add_extra(extra)
    ranges = [Range(key=key, dtype=dtype, data=bytes_of(data)) for key, dtype, data in state.own(comm.rank)]
    if generators:
        data = dump_generators()
        ranges.append(Range(key=f"generators[0:{data.nbytes}]", dtype="U8", data=data))
    tensors = [bytes_of(one.data).tobytes() for one in state.entries if one.stored.key.startswith("extra/")]
    return Job(
        file=state.file,
        ranges=ranges,
        spaces=state.spaces,
        tensors=[one.stored for one in state.entries],
        ties=state.ties,
        optimizer=None if state.optimized is None else state.optimized.to_json(),
        extra=encoded,
        extra_seen=[json.dumps(encoded), *(_digest(one).hex() for one in tensors)],
        saved=time.time(),
    )


def _digest(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value, default=repr).encode()
    return blake2b(data, digest_size=8).digest()


def _difference(rows: np.ndarray[Any, Any]) -> str:
    """Return what ranks are about to save differently, in one text that all have; "" for nothing."""
    found = []
    for number, what in enumerate(COMPARED):
        low = TOKEN + 8 * number
        part = rows[:, low : low + 8]
        ranks = np.flatnonzero((part != part[0]).any(axis=1)).tolist()
        if ranks:
            found.append(f"{what} (ranks {', '.join(map(str, ranks[:12]))} differ from rank 0)")
    return f"what is saved must be the same on all ranks (got other {'; other '.join(found)})" if found else ""
