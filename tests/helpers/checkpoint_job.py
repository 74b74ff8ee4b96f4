"""A job that trains and saves without end, to be killed: every value that it saves is the number of the step.

As ranks of MPI: `mpirun -n 3 python checkpoint_job.py FOLDER`. Rank 0 writes each step that is saved to stdout.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import mpizero as mz
from mpizero.checkpoint.folder import LATEST, find, read_manifest
from mpizero.checkpoint.reader import Reader

WIDTH = 90


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def work(comm, folder, out):
    """Save after every step, every other time in the background, from where the last whole checkpoint stands."""
    model = mz.shard(Net(), comm, stage=3, units={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    step = mz.load(folder, model, optimizer)["step"] if (folder / LATEST).exists() else 0
    while True:
        step += 1
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
                optimizer.state[param]["momentum_buffer"].fill_(step)
        path = folder / ("again" if step % 3 == 0 else f"step-{step}")
        if step % 2:
            mz.save_async(path, model, optimizer, extra={"step": step}, keep_last=2)
        else:
            mz.save(path, model, optimizer, extra={"step": step}, keep_last=2)
            if comm.rank == 0:
                os.write(out, f"{step}\n".encode())


def check(folder):
    """Check every visible checkpoint, and return the step of the latest."""
    for path in folder.iterdir():
        if path.name == LATEST or path.name.startswith("."):
            continue
        manifest = read_manifest(path)
        with Reader(path, manifest) as reader:
            found = [reader.ask(stored, 0, stored.numel) for stored in manifest.tensors.values()]
            reader.fetch()
            for file in range(len(manifest.files)):
                reader.file(file).verify()
        assert len(found) == 12
        assert all(bool((values == manifest.extra["step"]).all()) for values in found), path
    return read_manifest(find(folder)).extra["step"]


if __name__ == "__main__":
    work(mz.world(), Path(sys.argv[1]), 1)
