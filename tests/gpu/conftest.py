"""Tests on real GPUs, run in ranks by `bin/gpucheck`; without a GPU they are collected and skipped, with the reason."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import mpizero
from mpizero.comm.gpus import find_gpus

HERE = Path(__file__).parent


def why_not():
    """Return why no GPU can be tested here, "" where one can."""
    gpus, why = find_gpus()
    if not gpus:
        return why
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds none"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    reason = why_not() if mine else ""
    for item in mine if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"), append=False)


@pytest.fixture(scope="session")
def gpu(world):
    """This rank's GPU, current for torch and CuPy."""
    import torch

    number = mpizero.choose_gpu()
    torch.empty(1, device=f"cuda:{number}")  # makes the context
    return number
