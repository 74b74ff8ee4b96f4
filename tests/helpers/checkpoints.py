"""What tests of checkpoints share: jobs of fewer ranks inside a world, small models with optimizers, their values."""

import math
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

import mpizero as mz
from mpizero.shard.ranges import communicator_of, held_by
from mpizero.testing.models import Block, awkward_model, token_loss, tokens

BF16 = mz.Precision(param=torch.bfloat16)
WAYS = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "node_shared": False},
    "3": {"stage": 3, "node_shared": False},
    "3 shared": {"stage": 3},
    "hybrid": {"stage": 3, "node_shared": False},
}
PRECISIONS = {"fp32": mz.Precision(), "bf16": BF16}
_JOBS = {}


@contextmanager
def shared_folder(world):
    """A new folder that all ranks know; removed afterwards."""
    folder = Path(world.mpi.bcast(tempfile.mkdtemp(prefix="mpizero-test-") if world.rank == 0 else None))
    try:
        yield folder
        world.mpi.Barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def job_of(world, ranks):
    """The communicator of the first so many ranks; None on the others. Collective."""
    if (world.size, ranks) not in _JOBS:
        part = world.split(int(world.rank >= ranks))
        groups = part.split(part.rank // 2) if part.size in {4, 6} else None
        _JOBS[world.size, ranks] = part, groups
    return _JOBS[world.size, ranks] if world.rank < ranks else (None, None)


def wait_for_all(world):
    """Be a barrier that leaves the cores to the ranks that are still at work."""
    request = world.mpi.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def make(job, way, precision="fp32", *, seed=0, optimizer=torch.optim.AdamW, model=awkward_model):
    comm, groups = job
    options = dict(WAYS[way])
    if way == "hybrid":
        options["group"] = groups
    model = mz.shard(model(seed), comm, units={Block}, precision=PRECISIONS[precision], **options)
    return model, optimizer(model.parameters(), lr=1e-2)


def train(model, optimizer, comm, steps=2, first=0):
    for step in range(first, first + steps):
        token_loss(model, tokens(3, step, 2 * comm.size)[2 * comm.rank : 2 * comm.rank + 2]).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """All values, whole, by name, on rank 0; nothing on the others. Collective."""
    found = {f"parameter {name}": value for name, value in mz.full_parameters(model).items()}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    parts = {
        (held.names[0], key): (
            held.start,
            held.shape,
            value.shape == held.shard.shape and key != "step",
            torch.as_tensor(value).numpy(),  # pickled in a hundredth of a tensor's time
        )
        for held in held_by(model)
        for key, value in optimizer.state.get(held.shard, {}).items()
    }
    everyones = communicator_of(model).mpi.gather(parts)
    for name, key in parts if everyones else ():
        whole = None
        for start, shape, elements, value in (one[name, key] for one in everyones):
            if not elements:
                whole = torch.as_tensor(value)
                break
            whole = torch.zeros(math.prod(shape), dtype=torch.from_numpy(value).dtype) if whole is None else whole
            whole[start : start + value.size] = torch.from_numpy(value).reshape(-1)
        found[f"{key} of {name}"] = whole
    return found if everyones else {}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def differing(one, other):
    """The names whose values are not the same to the bit."""
    names = [name for name in one | other if name not in one or name not in other]
    return names + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]
