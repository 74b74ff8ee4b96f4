"""Processes that a rank starts, and thread levels below MPI_THREAD_MULTIPLE; started as a user starts it."""

import pytest
from helpers.jobs import run_script

LIMIT = 100


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script's text in two ranks; return its output, once it has ended well."""
    monkeypatch.setenv("MPIZERO_TIMEOUT", "20")

    def start(body, limit=LIMIT):
        code, text = run_script(tmp_path, body, 2, limit)
        assert code == 0, text
        return text

    return start


FORKS = """
import os, sys, threading
import numpy as np, torch
import mpizero as mz
from torch.utils.data import DataLoader, Dataset

world = mz.world()
mz.all_reduce(np.ones(4, np.float32), algorithm="ring", async_op=True).wait()  # the progress thread runs
model = mz.shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

class Data(Dataset):
    def __len__(self): return 4
    def __getitem__(self, at): return torch.full((4,), float(at))

class Reducing(Data):
    def __getitem__(self, at): return mz.all_reduce(torch.ones(4))

CALLS = (
    lambda: mz.all_reduce(np.ones(4, np.float32)), lambda: mz.empty(10), lambda: mz.barrier(async_op=True),
    mz.Communicator, lambda: world.split(0), lambda: world.mpi.Barrier(), lambda: model(torch.ones(1, 4)),
    lambda: world.abort(3),
)

def child(how):
    if how == "leaves":
        sys.exit(3)
    if how == "raises":
        raise ArithmeticError("in the child")
    if how == "has a thread that raises":
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(), thread.join()
        sys.exit(5)
    for call in CALLS:
        try:
            call()
            sys.exit("went on")
        except mz.CollectiveError as error:
            assert "the caller must be the process that is the rank (got process" in str(error)
    world.close()
    print("refused", flush=True)

for how, code in (("leaves", 3), ("raises", 1), ("has a thread that raises", 5), ("calls collectives", 0)):
    pid = os.fork()
    if pid == 0:
        child(how)
        break  # to the end of the script
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert found == code, (how, found)
else:
    for epoch in range(2):
        for x in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    try:
        list(DataLoader(Reducing(), num_workers=1, multiprocessing_context="fork"))
    except mz.CollectiveError as error:
        assert "a DataLoader's worker for one" in str(error)
        print("worker refused", flush=True)
    mz.all_reduce(np.ones(100_000, np.float32), algorithm="ring")
    assert mz.all_reduce(np.ones(4))[0] == 2
    print("all well", flush=True)
"""


def test_forked_children_are_no_ranks(run):
    """They may compute and end as they like, without MPI and without harm to the job; collectives are refused."""
    text = run(FORKS)
    for said in ("refused\n", "worker refused", "all well"):
        assert text.count(said) >= 2, text
    assert "ending the job" not in text
    assert "was dropped" not in text


STARTED = """
import sys
import torch
import mpizero as mz
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 4
    def __getitem__(self, at): return torch.full((4,), float(at))

class Reducing(Data):
    def __getitem__(self, at): return mz.all_reduce(torch.ones(4))

if __name__ == "__main__":
    world = mz.world()
    model = mz.shard(torch.nn.Linear(4, 4))
    for how in ("spawn", "forkserver"):
        for x in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=how):
            model(x).square().mean().backward()
        try:
            list(DataLoader(Reducing(), num_workers=1, multiprocessing_context=how))
        except mz.LaunchError as error:
            assert "under `if __name__ == '__main__':`" in str(error)
            print("worker refused", flush=True)
    assert mz.all_reduce(torch.ones(4))[0] == 2
    print("all well", flush=True)
"""


@pytest.mark.slow  # twelve processes import torch
def test_children_that_are_started_anew_are_no_ranks(run):
    text = run(STARTED, 400)
    assert text.count("worker refused") == 4
    assert text.count("all well") == 2


LEVEL = """
import threading
import mpi4py
mpi4py.rc.thread_level = "funneled"
import torch
import torch.distributed as dist
import mpizero as mz
import mpizero.c10d
from mpizero.comm.raw import mpi

world = mz.world()
assert mpi().Query_thread() < mpi().THREAD_MULTIPLE
ramp = torch.arange(30_000.)

def reduced():
    names = "auto", "ring", "native"
    return [mz.all_reduce(ramp * (world.rank + 1), async_op=True, algorithm=name) for name in names]

for work in reduced():
    assert work.done()
    assert torch.equal(work.wait(), 3 * ramp)

class Block(torch.nn.Linear):
    def forward(self, x): return x + torch.tanh(super().forward(x))

def trained(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block(40, 40) for _ in range(3)])
    if stage is not None:
        mz.shard(model, stage=stage, units={Block}, node_shared=False, bucket_bytes=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        model(x if stage is None else x[2 * world.rank : 2 * world.rank + 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()) if stage is None else list(mz.full_parameters(model).values())

plain, *sharded = [trained(stage) for stage in (None, 0, 1, 2, 3)]
for found in sharded:
    assert all(map(torch.equal, found, sharded[0]))
    assert all(map(torch.allclose, found, plain))

mpizero.c10d.init()
x = ramp * (world.rank + 1)
dist.all_reduce(x, async_op=True).wait()
assert torch.equal(x, 3 * ramp)
got = torch.empty(30_000)
for request in (dist.irecv(got, 1 - world.rank), dist.isend(ramp, 1 - world.rank)):
    request.wait()
assert torch.equal(got, ramp)
assert dist.all_reduce(torch.ones(9), async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()[0] == 4
dist.destroy_process_group()
assert threading.enumerate() == [threading.main_thread()]
print("all well", flush=True)
"""


def test_a_thread_level_below_multiple(run):
    """No progress thread; asynchronous calls are over when they return, and give the same numbers."""
    assert run(LEVEL).count("all well") == 2
