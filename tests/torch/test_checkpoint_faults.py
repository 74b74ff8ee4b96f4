"""Bad input to save and load: one clear error on all ranks, and everything as it was; saves beside the training."""

import json
import os
import re
import resource
import threading

import pytest
import torch
from helpers.checkpoints import WAYS, differing, everything, job_of, make, names_in, shared_folder, train
from torch import nn

import mpizero as mz
from mpizero.checkpoint import background, files
from mpizero.checkpoint.folder import PREFIX, read_manifest
from mpizero.checkpoint.manifest import shard_name
from mpizero.testing.models import awkward_model

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]


def raised(world, function, kind=mz.CheckpointError):
    """The text of the error that all ranks raise, which must be the same one."""
    with pytest.raises(kind) as caught:
        function()
    texts = world.mpi.allgather(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


@pytest.fixture
def saved(world):
    """A model, its optimizer and the folder with a checkpoint of them."""
    with shared_folder(world) as folder:
        model, optimizer = make((world, None), "3")
        train(model, optimizer, world, 1)
        mz.save(folder / "one", model, optimizer)
        yield model, optimizer, folder


def on_rank_0(world, function):
    if world.rank == 0:
        function()
    world.mpi.Barrier()


def edited(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def file_of(folder, size):
    return folder / "one" / shard_name(size - 1, size)


FAULTS = {
    "no checkpoint": (lambda folder, _: (folder / "one" / "manifest.json").unlink(), "a folder without manifest.json"),
    "newer": (lambda folder, _: edited(folder / "one" / "manifest.json", schema_version=7), r"at most 1 \(got 7\)"),
    "missing": (lambda folder, size: file_of(folder, size).unlink(), "shard-.*safetensors must be there to be read"),
    "flipped": (
        lambda folder, size: flip(file_of(folder, size), -30000),
        r"optimizer/exp_avg.*/.*\.(weight|bias).* in .*shard-.*checksum",
    ),
    "cut off": (lambda folder, size: os.truncate(file_of(folder, size), 900), r"must have \d+ bytes \(got 900\)"),
    "header": (lambda folder, size: flip(file_of(folder, size), 70), "shard-.* must "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged(world, saved, fault):
    """What a rank finds all ranks raise; model, optimizer and generators are as before."""
    model, optimizer, folder = saved
    train(model, optimizer, world, 1)
    before = everything(model, optimizer)
    make_it, text = FAULTS[fault]
    on_rank_0(world, lambda: make_it(folder, world.size))
    found = raised(world, lambda: mz.load(folder / "one", model, optimizer))
    assert re.search(text, found), found
    assert differing(before, everything(model, optimizer)) == []


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 23)
        self.more = nn.ParameterList(torch.zeros(3) for _ in range(14))


def test_another_model(world, saved):
    """Names and shapes are listed, a dozen of each, with their number."""
    *_, folder = saved
    other = mz.shard(Other(), world)
    text = raised(world, lambda: mz.load(folder, other))
    assert "14 missing in the checkpoint: more.0, more.1" in text
    assert "more.11, and 2 more" in text
    assert "unexpected in the checkpoint: position, shift" in text
    assert "embedding.weight of shape (61, 23), saved as (61, 24)" in text


def test_another_optimizer(world, saved):
    model, optimizer, folder = saved
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    text = raised(world, lambda: mz.load(folder, model, sgd))
    assert "of the class that was saved, AdamW (got SGD)" in text
    some = torch.optim.AdamW([param for name, param in model.named_parameters() if "blocks" in name])
    assert "without position, shift" in raised(world, lambda: mz.load(folder, model, some))
    mz.save(folder / "two", model)
    assert "saved without" in raised(world, lambda: mz.load(folder / "two", model, optimizer))
    alien = torch.optim.AdamW([torch.zeros(3)])
    text = raised(world, lambda: mz.save(folder / "three", model, alien), mz.ArgumentError)
    assert "this model's parameters alone (got '1 others')" in text
    assert not (folder / "three").exists()


def test_ranks_of_different_minds(world, saved):
    """Found before anything is written."""
    model, optimizer, folder = saved
    if world.size == 1:
        return
    last = world.rank == world.size - 1
    text = raised(world, lambda: mz.save(folder / f"two{last}", model))
    assert f"other path (ranks {world.size - 1} differ from rank 0)" in text
    text = raised(world, lambda: mz.save(folder / "two", model, extra={"step": torch.tensor(world.rank)}))
    assert f"other extra (ranks {', '.join(map(str, range(1, world.size)))} differ" in text
    text = raised(world, lambda: mz.save(folder / "two", model, optimizer if last else None))
    assert "other names, shapes and dtypes" in text
    text = raised(world, lambda: mz.save(folder / "two", model, extra=len if last else None))
    assert f"rank {world.size - 1}: extra must be JSON values and tensors" in text
    with pytest.raises(mz.ShardError, match=r"rank 0: save; rank 1: unsharded"):
        mz.save(folder / "two", model) if world.rank == 0 else mz.unsharded(model).__enter__()
    world.mpi.Barrier()
    assert names_in(folder) == ["latest", "one"]


def test_mistakes(world, saved):
    model, _, folder = saved
    with mz.unsharded(model), pytest.raises(mz.ShardError, match=r"outside mpizero.unsharded"):
        mz.save(folder / "two", model)
    with pytest.raises(mz.ShardError, match=r"that mpizero.shard was called on"):
        mz.save(folder / "two", awkward_model(0))
    for keep_last in (0, True, "1"):
        raised(world, lambda keep=keep_last: mz.save(folder / "two", model, keep_last=keep), mz.ArgumentError)
    raised(world, lambda: mz.save(folder / "two", model, extra=len), mz.ArgumentTypeError)
    assert "must be a folder to write in (got: " in raised(world, lambda: mz.save("/sys/mpizero/x", model))
    assert names_in(folder) == ["latest", "one"]


@pytest.fixture
def little_room(world):
    """Let the last rank write no more than 4 KiB to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room(world, saved, little_room):
    """On one rank: an error on all, the old checkpoint is as it was, no leftovers."""
    model, optimizer, folder = saved
    before = everything(model, optimizer)
    text = raised(world, lambda: mz.save(folder / "one", model, optimizer))
    assert "must take shard-" in text
    assert "File too large" in text
    assert names_in(folder) == ["latest", "one"]
    mz.load(folder, model, optimizer)
    assert differing(before, everything(model, optimizer)) == []


def test_no_room_in_the_background(world, saved, little_room):
    """The error comes with the next call."""
    model, optimizer, folder = saved
    mz.save_async(folder / "two", model, optimizer)
    assert "File too large" in raised(world, lambda: mz.save(folder / "three", model))
    names = names_in(folder)
    world.mpi.Barrier()  # before rank 0 makes the next folder
    assert names == ["latest", "one"]
    handle = mz.save_async(folder / "two", model, optimizer)
    assert "File too large" in raised(world, handle.wait)
    handle.wait()


def test_no_room_for_rank_0_alone(world, saved, monkeypatch):
    """Ranks that still write in the background find their folder, and have nothing to say."""
    model, _, folder = saved
    write, go_on = files.write_file, threading.Event()

    def late(path, ranges):
        if world.rank == 0:
            raise OSError(28, "No space left on device")
        go_on.wait(20)
        return write(path, ranges)

    monkeypatch.setattr("mpizero.checkpoint.job.write_file", late)
    found = mz.save_async(folder / "two", model)
    found._thread.join(0 if world.rank else None)
    world.mpi.Barrier()
    go_on.set()
    text = raised(world, found.wait)
    assert "No space left on device" in text
    assert "; rank" not in text
    assert names_in(folder) == ["latest", "one"]


def test_no_room_for_the_manifest(world, saved, monkeypatch):
    model, optimizer, folder = saved

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mpizero.checkpoint.folder._write", full)
        for verb in (mz.save, lambda *args: mz.save_async(*args).wait()):
            text = raised(world, lambda verb=verb: verb(folder / "two", model, optimizer))
            assert "No space left on device" in text
    assert names_in(folder) == ["latest", "one"]


def test_in_the_background(world, saved, monkeypatch):
    """Training goes on meanwhile, and what is saved are the values from before; one save waits for another."""
    model, optimizer, folder = saved
    go_on = threading.Event()
    write = files.write_file
    monkeypatch.setattr("mpizero.checkpoint.job.write_file", lambda *args: go_on.wait(20) and write(*args))
    before = everything(model, optimizer)
    handle = mz.save_async(folder / "two", model, optimizer, extra=[1], keep_last=1)
    train(model, optimizer, world, 2)
    assert not handle.done()
    assert [name for name in names_in(folder) if not name.startswith(PREFIX)] == ["latest", "one"]
    go_on.set()
    after = everything(model, optimizer)
    mz.save_async(folder / "three", model, optimizer, keep_last=2)
    assert handle.done()
    other, second = make((world, None), "2", seed=7)
    assert mz.load(folder / "two", other, second) == [1]
    assert differing(before, everything(other, second)) == []
    assert mz.load(folder, other, second) is None
    assert differing(after, everything(other, second)) == []
    assert names_in(folder) == ["latest", "three", "two"]


def test_visible_without_a_further_call(world, saved):
    """Rank 0's thread sees to it, whatever step the ranks are at."""
    model, optimizer, folder = saved
    handle = mz.save_async(folder / "two", model, optimizer)
    for _ in range(2000):
        if handle.done():
            break
        handle._thread.join(0.01)
    world.mpi.Barrier()
    assert read_manifest(folder / "two").files
    handle.wait()
    assert background.NOTE not in handle._comm.notes


class Wide(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def bytes_read(monkeypatch, function):
    counted, read = [], os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *args: counted.append(args[1]) or read(*args))
        function()
    return sum(counted)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("way", ["0", "2", "3", "hybrid"])
def test_bytes_read(world, monkeypatch, way):
    """Case C2: at most 1.1 times what a rank holds."""
    if world.size != 4:
        return
    with shared_folder(world) as folder:
        for saving in (1, 3, 4):
            comm, _ = job_of(world, saving)
            if comm is not None:
                model = mz.shard(Wide(0), comm, units={nn.Linear})
                optimizer = torch.optim.AdamW(model.parameters())
                model(torch.ones(2, 640)).sum().backward()
                optimizer.step()
                mz.save(folder / "one", model, optimizer, generators=False)
            world.mpi.Barrier()
            comm, groups = job_of(world, 4)
            options = {**WAYS[way], **({"group": groups} if way == "hybrid" else {})}
            model = mz.shard(Wide(1), comm, units={nn.Linear}, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            share = 3 * 4 * sum(param.numel() for param in model.parameters())
            counted = bytes_read(monkeypatch, lambda model=model, optim=optimizer: mz.load(folder, model, optim))
            assert share <= counted <= 1.1 * share, counted / share
