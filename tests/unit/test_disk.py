"""Scratch files: two ways to the same bytes, room that is taken at once, nothing left behind."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.arrays import disk
from mpizero.arrays.disk import BLOCK, Scratch, page_aligned
from mpizero.bench.disk import measure_disk
from mpizero.cli import main
from mpizero.cli.disk import disk_text
from mpizero.errors import DiskError
from mpizero.optim.streaming import Array, Stream, groups_of
from mpizero.plan import layout_of
from mpizero.plan.groups import CUT


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def filled(nbytes, value):
    memory = page_aligned(nbytes)
    memory[:] = bytes([value]) * len(memory)
    return memory


def test_two_ways_to_the_same_bytes(tmp_path):
    """Unbuffered, buffered, and mapped, in every order."""
    region = Scratch(tmp_path).grow(3 * BLOCK + 100)
    array = region.array()
    assert not array.any()
    region.write(filled(BLOCK, 7), BLOCK)
    assert array[BLOCK : 2 * BLOCK].tolist() == [7] * BLOCK
    array[5] = 9
    got = page_aligned(BLOCK)
    region.read(got)
    assert (got[5], got[6]) == (9, 0)
    region.write(memoryview(b"abc"), 3 * BLOCK + 97)
    assert array[-3:].tobytes() == b"abc"
    region.settle()
    odd = memoryview(bytearray(10))
    region.read(odd, BLOCK - 5)
    assert bytes(odd) == bytes([0] * 5 + [7] * 5)
    assert list(tmp_path.iterdir()) == []


def test_what_is_moved_is_counted(tmp_path):
    file = Scratch(tmp_path)
    region = file.grow(2 * BLOCK)
    region.write(filled(2 * BLOCK, 1))
    region.read(page_aligned(BLOCK))
    assert (file.bytes_written, file.bytes_read, file.nbytes) == (2 * BLOCK, BLOCK, 2 * BLOCK)
    assert file.holds(region.array().ctypes.data)
    assert not file.holds(np.zeros(9).ctypes.data)


def test_its_descriptors_are_closed_with_it(tmp_path):
    before = descriptors()
    file = Scratch(tmp_path)
    assert descriptors() > before
    del file
    assert descriptors() == before


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    real = os.open

    def refuses(path, flags, *more):
        if flags & os.O_TMPFILE == os.O_TMPFILE or flags & os.O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *more)

    monkeypatch.setattr(disk.os, "open", refuses)
    file = Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not file.unbuffered
    region = file.grow(BLOCK)
    region.write(filled(BLOCK, 3))
    assert region.array().tolist() == [3] * BLOCK


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(DiskError, match="offload path must be a folder that can be written to"):
            Scratch(tmp_path / name)


def test_groups_hold_every_element_once(tmp_path):
    torch = pytest.importorskip("torch")
    scratch = Scratch(tmp_path)
    flats = []
    for shapes in ([(3000, 7), (), (64,)], [(5,)], [(0,), (9000,)]):
        layout = layout_of([(str(number), shape) for number, shape in enumerate(shapes)], 2)
        flat = SimpleNamespace(layout=layout, lifetime=SimpleNamespace(cut=True), comm=SimpleNamespace(rank=1))
        flat.master = torch.zeros(layout.shard_length)
        flat.region = scratch.grow(4 * layout.shard_length)
        flats.append(flat)
    groups = groups_of(flats, 2 * CUT)
    parts = [part for group in groups for part in group]
    for flat in flats:
        mine = [part for part in parts if part.flat is flat]
        assert [part.start for part in mine] == [0, *(part.stop for part in mine[:-1])]
        assert mine[-1].stop == flat.master.numel()
        assert not any(part.start % CUT for part in mine)
        for index in range(len(flat.layout.slots)):
            piece = flat.layout.piece(index, 1)
            runs = [bit for part in mine for bit in part.bits if bit.index == index]
            assert sum(bit.stop - bit.start for bit in runs) == piece.numel
            assert runs
            if piece.numel:
                assert [bit.skip for bit in runs] == [bit.start - piece.position for bit in runs]
    assert max(sum(part.stop - part.start for part in group) for group in groups) <= 2 * CUT

    def update(group):
        for part in group:
            part.slots["x"] += torch.arange(part.start, part.stop)

    stream = Stream(lambda flat: {"x": Array(region=flat.region, dtype=torch.float32)})
    for _ in range(2):
        stream.run(groups, update)
    for flat in flats:
        found = torch.from_numpy(flat.region.array()).view(torch.float32)
        assert torch.equal(found, 2.0 * torch.arange(flat.master.numel()))


def test_doctor_says_what_is_no_folder(tmp_path, capsys):
    assert main(["doctor", "--disk", str(tmp_path / "missing")]) == 1
    assert "rank 0 on" in (said := capsys.readouterr().out)
    assert "must be a folder that can be written to" in said


def test_a_speed_is_measured_and_shown(tmp_path):
    speed = measure_disk(tmp_path, piece=16 * BLOCK, pieces=3)
    assert min(speed.read, speed.write, speed.both) > 0
    text = disk_text("/scratch", [("a", speed), ("a", speed), ("b", "no room")])
    assert "0-1" in text
    assert "rank 2 on b: no room" in text
    assert list(tmp_path.iterdir()) == []
