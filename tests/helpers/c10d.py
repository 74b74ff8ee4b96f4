"""A torch.distributed job on the ranks of the test run, the shapes of groups, and values that sum exactly."""

import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

import mpizero.c10d

SHAPES = ("world", "ends", "rows", "columns", "alone")
EXACT = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64]
EXACT += [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128]
MOVED = [*EXACT, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module")
def job(world):
    """Start torch.distributed for a module's tests, and end it; gives the groups by shape, None beside a group."""
    mpizero.c10d.init(timeout=timedelta(seconds=30))
    yield {shape: _group(shape, world.rank, world.size) for shape in SHAPES}
    dist.destroy_process_group()


def _group(shape, rank, size):
    if shape == "world":
        return dist.group.WORLD
    if (shape == "ends" and size < 3) or (shape in {"rows", "columns"} and size in {1, 3}):
        return None  # another shape has the same ranks
    if shape == "ends":
        return _mine([[0, size - 1]], rank)
    if shape == "alone":
        return _mine([[one] for one in range(size)], rank)
    half = size // 2  # a mesh of 2 x half
    if shape == "rows":
        return _mine([list(range(half)), list(range(half, 2 * half))], rank) if half > 1 else None
    return _mine([list(range(start, 2 * half, half)) for start in range(half)], rank)


def _mine(lists, rank):
    found = None
    for ranks in lists:
        if ranks:
            group = dist.new_group(ranks)
            found = group if rank in ranks else found
    return found


@contextmanager
def old_names():
    """Let functions be called whose names newer versions of torch give up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def value(rank, count, dtype, *, most=7):
    """Return small numbers that differ by rank and place; ones and twos with `most` 2, whose product is exact."""
    return ((torch.arange(count) + 3 * rank) % most + (most == 2)).to(dtype)


def same(x, expected):
    """Say whether two tensors have the same dtype, shape and bytes."""
    alike = x.dtype == expected.dtype and x.shape == expected.shape
    return alike and x.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))
