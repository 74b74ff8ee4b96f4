"""Disks that are really full, or may not be written to, beneath saves, merges and imports. Ranks are threads.

For root alone, who can mount what it takes; tests/torch/test_checkpoint_faults.py has stand-ins for everybody.
"""

import os
import shutil
import subprocess
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import mpizero as mz
from mpizero.checkpoint.exporting import merge
from mpizero.checkpoint.importing import import_checkpoint
from mpizero.checkpoint.manifest import shard_name
from mpizero.comm import run_loopback

RANKS = 2
ROOM = 5 << 20
"""Bytes: for one checkpoint of 3 MiB, and the half of another."""
NET = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
SAYS = {"full": "No space left on device", "read-only": "Read-only file system"}


def mounted(*words):
    """Mount and return whether that is allowed."""
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0  # noqa: S607


@pytest.fixture(params=SAYS)
def place(request, tmp_path):
    """A folder with a good checkpoint, on a disk that takes no other; and what it says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", folder):
        pytest.skip("needs root, to mount a small disk")
    try:
        run_loopback(RANKS, lambda comm: mz.save(folder / "one", *trained(comm), extra={"step": 1}))
        merge(folder, folder / "out.safetensors")
        if request.param == "read-only":
            assert mounted("-o", "remount,ro", folder)
        yield folder, SAYS[request.param]
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # noqa: S607


def trained(comm):
    model = mz.shard(deepcopy(NET), comm, stage=3, units={nn.Linear}, node_shared=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    return model, optimizer


def raised(function, *args, **kwargs):
    with pytest.raises(mz.CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def attempts(comm, folder):
    """Save in each way, blocking and in the background; return the errors, and whether the old one loads."""
    model, optimizer = trained(comm)
    said = [raised(mz.save, folder / name, model, optimizer) for name in ("two", "one")]
    if "Read-only" in said[0]:
        said.append(raised(mz.save_async, folder / "two", model, optimizer))
    else:
        for later in (lambda: mz.save(folder / "three", model), lambda: mz.load(folder, model, optimizer)):
            handle = mz.save_async(folder / "two", model, optimizer)
            said.append(raised(later))
            handle.wait()
    before = mz.full_parameters(model)
    loaded = mz.load(folder, model, optimizer)
    same = all(torch.equal(before[name], value) for name, value in mz.full_parameters(model).items())
    return said, loaded == {"step": 1} and same


def test_saves(place):
    """One error that names the fault, on all ranks; what was there is as it was, and loads; nothing is left."""
    folder, text = place
    before = sorted(path.name for path in folder.iterdir())
    found = run_loopback(RANKS, lambda comm: attempts(comm, folder))
    assert found[0] == found[1]
    said, loads = found[0]
    assert loads
    assert [one for one in said if text not in one or "No such file" in one] == []
    assert sorted(path.name for path in folder.iterdir()) == before


def test_merges_and_imports(place):
    """A file that was there is as it was, half a one is not left."""
    folder, text = place
    out = folder / "out.safetensors"
    before, content = sorted(path.name for path in folder.iterdir()), out.read_bytes()
    assert text in raised(merge, folder, out)
    assert text in raised(merge, folder, folder / "hf", 1 << 19)
    assert text in raised(import_checkpoint, out, folder / "two")
    assert out.read_bytes() == content
    assert [path.name for path in folder.rglob("*") if path.name.startswith(".")] == []
    assert set(before) <= {path.name for path in folder.iterdir()} <= {*before, "hf"}


@pytest.fixture
def nobody():
    """A folder with a checkpoint of root's, and a function that makes this process somebody else."""
    if os.geteuid():
        pytest.skip("needs root, to be somebody else")
    folder = Path(tempfile.mkdtemp(prefix="mpizero-test-"))
    folder.chmod(0o755)
    run_loopback(RANKS, lambda comm: mz.save(folder / "one", *trained(comm), extra={"step": 1}))
    try:
        yield folder, lambda: os.seteuid(65534)
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["folder", "manifest", "shard"])
def test_no_permission(nobody, what):
    """All ranks say what may not be read, or where not be written, whichever rank needs it."""
    folder, become = nobody
    path = {"manifest": folder / "one" / "manifest.json", "shard": folder / "one" / shard_name(1, RANKS)}.get(what)
    if path is not None:
        path.chmod(0)
    become()

    def body(comm):
        model, optimizer = trained(comm)
        return raised(mz.save if path is None else mz.load, folder / "one", model, optimizer)

    said = run_loopback(RANKS, body)
    assert len(set(said)) == 1
    assert "Permission denied" in said[0]
    assert str(path or folder) in said[0]
    assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "one"]
