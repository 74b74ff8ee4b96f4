"""Files with checksums, folders that are there whole or not at all, and values as JSON."""

import fcntl
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mpizero.checkpoint import files, folder
from mpizero.checkpoint.failure import CheckpointError, listed
from mpizero.checkpoint.files import Range, ShardFile, Want, write_file
from mpizero.checkpoint.folder import Saving, clean, find, thin_out
from mpizero.checkpoint.manifest import BLOCK, FileFacts, Manifest, shard_name
from mpizero.checkpoint.values import decode, encode
from mpizero.errors import ArgumentTypeError
from mpizero.shard.agree import said_by

SIZES = {"wide": ("F64", 8 * 3000), "odd": ("U8", 77), "half": ("BF16", 2 * 50001), "one": ("F32", 4)}


def some(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def written(tmp_path):
    data = {key: some(nbytes, n) for n, (key, (_, nbytes)) in enumerate(SIZES.items())}
    path = tmp_path / "a.safetensors"
    facts = write_file(path, [Range(key=key, dtype=SIZES[key][0], data=one) for key, one in data.items()])
    assert facts[0] == path.stat().st_size
    return path, facts, data


def test_safetensors_reads_it(written):
    path, _, data = written
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {*data, "checksums"}
        for key, one in data.items():
            assert file.get_tensor(key).view(torch.uint8).numpy().tobytes() == one.tobytes()


@pytest.mark.parametrize(("begin", "stop"), [(0, 100002), (5, 6), (BLOCK - 1, BLOCK + 1), (40000, 90000)])
def test_any_part(written, begin, stop, monkeypatch):
    path, facts, data = written
    monkeypatch.setattr(files, "CHUNK", 2 * BLOCK)
    with ShardFile(path, *facts) as file:
        read, counted = os.pread, []
        monkeypatch.setattr(os, "pread", lambda *args: counted.append(args[1]) or read(*args))
        target, other = np.zeros(stop - begin, np.uint8), np.zeros(77, np.uint8)
        file.read([Want(key="half", begin=begin, target=target), Want(key="odd", begin=0, target=other)])
        assert target.tobytes() == data["half"][begin:stop].tobytes()
        assert other.tobytes() == data["odd"].tobytes()
        assert sum(counted) <= (stop - begin) + 77 + 4 * BLOCK + 100


def read_all(path, facts, data):
    with ShardFile(path, *facts) as file:
        for key, one in data.items():
            file.read([Want(key=key, begin=0, target=np.empty(one.nbytes, np.uint8))])


def test_every_flipped_byte_is_found(written):
    """Wherever it is: the error names the file, and the tensor where it is in one's data."""
    path, facts, data = written
    content = bytearray(path.read_bytes())
    first = len(content) - sum(one.nbytes for one in data.values())
    for place in [0, 3, 8, 50, first - 9, *range(first, len(content), 7919), len(content) - 1]:
        content[place] ^= 16
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.safetensors") as caught:
            read_all(path, facts, data)
        if place >= first:
            assert "checksum" in str(caught.value)
            with ShardFile(path, *facts) as file:
                low, high = next(
                    ends for ends in file.places.values() if ends[0] <= place - first + file._first < ends[1]
                )
                key = next(key for key, ends in file.places.items() if ends == (low, high))
                assert key in str(caught.value)
                with pytest.raises(CheckpointError, match="checksum"):
                    file.verify()
        content[place] ^= 16


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_file_that_was_cut_off(written, cut):
    path, facts, _ = written
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"a.safetensors must have \d+ bytes"):
        ShardFile(path, *facts)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a.safetensors must be there"):
        ShardFile(path, *facts)


def checkpoint(path, saved=1.0, token="t"):  # noqa: S107
    saving = Saving(path, token)
    nbytes, header = write_file(saving.hidden / shard_name(0, 1), [Range(key="x", dtype="F32", data=some(64, 1))])
    facts = (FileFacts(rank=0, nbytes=nbytes, header=header),)
    saving.commit(Manifest(spaces=(), tensors={}, files=facts, saved=saved))
    return path


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_checkpoint_appears_and_is_replaced(tmp_path):
    checkpoint(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    assert find(tmp_path) == tmp_path / "a"
    checkpoint(tmp_path / "b")
    assert find(tmp_path) == tmp_path / "b"
    checkpoint(tmp_path / "a", saved=5.0)
    assert find(tmp_path) == tmp_path / "a"
    assert folder.read_manifest(tmp_path / "a").saved == 5.0
    assert names(tmp_path) == ["a", "b", "latest"]


def test_replaced_where_folders_cannot_be_swapped(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "a", saved=5.0)
    assert names(tmp_path) == ["a", "latest"]
    assert folder.read_manifest(tmp_path / "a").saved == 5.0


class Killed(BaseException):
    pass


STEPS = ["_write", "sync_folder", "rename", "unlink", "_exchange", "_remove", "rmtree"]


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_kill_before_any_step(tmp_path, monkeypatch, replaces, swaps):
    """Case C9: whatever was the last thing done, what `latest` names is whole, and the next save cleans up."""
    for last in range(40):
        place = tmp_path / f"{last}"
        checkpoint(place / "a", saved=1.0)
        count = 0

        def stopping(function, last=last):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count > last:
                    raise Killed
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in STEPS:
                owner = Path if name in {"rename", "unlink"} else folder.shutil if name == "rmtree" else folder
                inner = getattr(owner, name)
                inner = (lambda *_: False) if name == "_exchange" and not swaps else inner
                patch.setattr(owner, name, stopping(inner))
            patch.setattr(folder.Saving, "end", stopping(folder.Saving.end))
            try:
                checkpoint(place / ("a" if replaces else "b"), saved=2.0, token="u")  # noqa: S106
                over = True
            except Killed:
                over = False
        found = folder.read_manifest(find(place))
        assert found.saved in {1.0, 2.0}
        files = [find(place) / shard_name(0, 1)]
        assert [file.stat().st_size for file in files] == [one.nbytes for one in found.files]
        for lock in [link for link in Path("/proc/self/fd").iterdir() if _is_owner(link)]:
            os.close(int(lock.name))  # as the end of the process would
        checkpoint(place / "c", saved=3.0)
        assert set(names(place)) <= {"a", "b", "c", "latest"}
        assert (place / "a").is_dir()
        if over:
            return
    pytest.fail("the save never came to its end")


def _is_owner(link):
    try:
        return str(link.readlink()).split(" ")[0].endswith("/owner")
    except OSError:
        return False


def test_leftovers_of_the_dead_alone_are_removed(tmp_path):
    alive, dead = Saving(tmp_path / "a", "1"), Saving(tmp_path / "b", "2")
    os.close(dead._lock)
    dead._lock = -1
    (tmp_path / ".mpizero-removed-x-1").mkdir()
    (tmp_path / ".other").mkdir()
    clean(tmp_path)
    assert names(tmp_path) == [alive.hidden.name, ".other"]
    alive.end()
    assert names(tmp_path) == [".other"]


def test_no_locks_here(tmp_path, monkeypatch):
    """Without locks a young folder is left alone."""

    def refuse(*_):
        raise OSError(38, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    saving = Saving(tmp_path / "a", "1")
    clean(tmp_path)
    assert saving.hidden.is_dir()
    os.utime(saving.hidden, (1.0, 1.0))
    clean(tmp_path)
    assert names(tmp_path) == []
    saving.end()


def test_keep_last_counts_whole_ones(tmp_path):
    for number in range(5):
        checkpoint(tmp_path / f"{number}", saved=number)
    (tmp_path / "4" / shard_name(0, 1)).write_bytes(b"short")
    (tmp_path / "mine").mkdir()
    checkpoint(tmp_path / "new", saved=-1.0)
    thin_out(tmp_path / "new", 2)
    assert names(tmp_path) == ["3", "4", "latest", "mine", "new"]
    thin_out(tmp_path / "new", 1)
    assert names(tmp_path) == ["4", "latest", "mine", "new"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: (path / "x").mkdir(parents=True), "must be free, or a checkpoint to be replaced"),
        (lambda path: path.write_text("x"), "must be free, or a checkpoint to be replaced"),
        (lambda path: path.symlink_to("nowhere"), "must be free, or a checkpoint to be replaced"),
    ],
)
def test_other_things_are_left_alone(tmp_path, make, text):
    make(tmp_path / "a")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        Saving(tmp_path / "a", "1")
    with pytest.raises(CheckpointError, match="that name is taken"):
        Saving(tmp_path / "latest", "1")
    assert names(tmp_path) == before


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, text in (("empty", "without manifest.json"), ("file", "a file"), ("none", "no such folder")):
        with pytest.raises(CheckpointError, match=rf"{name} must be a checkpoint.*\(got .*{text}"):
            find(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema_version": 2, "mpizero": "9.1"}, r"at most 1 \(got 2\).*mpizero 9.1"),
        ({"format": "other"}, "must be an mpizero checkpoint"),
        ({"files": None}, "cannot be read"),
        ({"tensors": {"x": 3}}, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_bad_manifests(tmp_path, change, text):
    path = checkpoint(tmp_path / "a") / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=text):
        folder.read_manifest(tmp_path / "a")


VALUES = [None, True, 3, 0.1, "x", b"\0\1", [1, [2]], (1, (2.5,)), {1, 2}, {frozenset({1})},
          {"a": {"b": ()}}, {1: 2, (3, 4): 5}, {"$tuple": [1]}, {"$x": 1}, {}, Counter({3: 2}),
          float("inf"), -float("inf")]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value):
    found = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)


def test_an_array_keeps_its_shape():
    assert decode(encode(np.array(3))).shape == ()


def test_sets_have_one_order_whatever_the_process():
    """Ranks compare what they save, and each has an order of strings of its own."""
    words = [str(number) for number in range(50)]
    found = encode(set(words))
    assert found == {"$set": sorted(words, key=json.dumps)}
    assert decode(found) == set(words)


def test_tensors_are_taken_away():
    kept = {}
    value = {"a": [torch.arange(3)], "b": np.ones(2), "c": np.float32(0.5)}
    found = encode(value, lambda tensor: kept.setdefault(str(len(kept)), tensor) is None or str(len(kept) - 1))
    found = decode(json.loads(json.dumps(found)), kept.__getitem__)
    assert torch.equal(found["a"][0], torch.arange(3))
    assert isinstance(found["b"], np.ndarray)
    assert found["c"] == 0.5


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), len, {"a": [lambda: 0]}])
def test_code_is_refused(value):
    with pytest.raises(ArgumentTypeError, match=r"extra.* must be JSON values and tensors"):
        encode(value)
    with pytest.raises(ArgumentTypeError, match="a tensor of one element"):
        encode(torch.ones(2))


def test_words():
    assert listed(range(14)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 2 more"
    assert said_by(["a", "a"]) == "a"
    assert said_by(["", "a", "b", "a"]) == "ranks 1, 3: a; rank 2: b"
