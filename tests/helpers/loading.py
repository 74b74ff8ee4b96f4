"""A data set that a DataLoader's worker processes can import."""

import os
import sys

import torch
from torch.utils.data import Dataset


class Counted(Dataset):
    """Items [i, whether a worker process made it, whether MPI is loaded there], for i from 0 to n - 1."""

    def __init__(self, n):
        self.n, self.made_by = n, os.getpid()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        import mpizero as mz  # in the worker, where a user's data set may import it

        assert callable(mz.all_reduce)
        assert callable(mz.shard)
        return torch.tensor([index, os.getpid() != self.made_by, "mpi4py.MPI" in sys.modules])


class Noise(Dataset):
    """n samples of 7 numbers, the same in every process."""

    def __init__(self, n):
        self.values = torch.randn(n, 7, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]
