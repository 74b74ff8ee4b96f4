"""State and parameters on a disk: the bits of a run in memory, each byte moved once, errors on all ranks."""

import dataclasses
import os
import resource
from pathlib import Path

import pytest
import torch
from helpers.offloading import OPTIMIZERS, SMALL, assert_equal, built, sharded, train
from helpers.small import BF16

import mpizero as mz
from mpizero.arrays.disk import BLOCK
from mpizero.bench.progress import Progress, mib
from mpizero.errors import ArgumentError, ArgumentTypeError, DiskError, ShardError
from mpizero.shard.optimizers import ELEMENTWISE
from mpizero.testing.covering import covering

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

AXES = {
    "stage": (3, 2, 1),
    "kind": ("optimizer", "both", "params"),
    "precision": (None, BF16),
    "optimizer": tuple(OPTIMIZERS),
    "clip": (False, True),
    "shared": (None, False),
}


def offload_of(kind, folder):
    places = {"optimizer": folder if kind != "params" else "cpu", "params": None if kind == "optimizer" else folder}
    return mz.Offload(**places, group_bytes=SMALL)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", covering(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_the_bits_of_a_run_in_memory(world, tmp_path, case):
    kind = case["kind"] if case["stage"] == 3 else "optimizer"
    shared = False if kind != "optimizer" else case["shared"]
    options = {"stage": case["stage"], "precision": case["precision"], "node_shared": shared}
    plain = sharded(world, **options)
    ours = sharded(world, offload_of(kind, tmp_path), **options)
    optimizers = [built(plain, case["optimizer"], offloaded=False), built(ours, case["optimizer"], offloaded=True)]
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        train(model, optimizer, world, 3, clip=case["clip"])
    assert_equal(plain, optimizers[0], ours, optimizers[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("clip", AXES["clip"])
@pytest.mark.parametrize("precision", AXES["precision"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [(1, "optimizer"), (2, "optimizer"), *((3, kind) for kind in AXES["kind"])])
def test_the_bits_after_twenty_steps(world, tmp_path, case, precision, clip):
    stage, kind = case
    plain = sharded(world, stage=stage, precision=precision)
    ours = sharded(world, offload_of(kind, tmp_path), stage=stage, precision=precision)
    optimizers = [built(plain, "AdamW fused", offloaded=False), built(ours, "AdamW fused", offloaded=True)]
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        train(model, optimizer, world, 20, clip=clip)
    assert_equal(plain, optimizers[0], ours, optimizers[1])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_of_torch(world, tmp_path, name):
    cls = getattr(torch.optim, name)
    plain = sharded(world, stage=2, precision=BF16)
    ours = sharded(world, offload_of("optimizer", tmp_path), stage=2, precision=BF16)
    optimizers = cls(plain.parameters(), lr=1e-2), mz.offloaded(cls, ours, lr=1e-2)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        train(model, optimizer, world, 3)
    assert_equal(plain, optimizers[0], ours, optimizers[1])


@pytest.mark.sizes(1, 2)
def test_a_step_moves_each_byte_once(world, tmp_path):
    model = sharded(world, mz.Offload(optimizer=tmp_path, params=tmp_path, group_bytes=SMALL), stage=3, precision=BF16)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    train(model, optimizer, world, 1)  # makes the state
    (file,) = mz.shard.runtime_of(model).spill.files
    flats = mz.shard.runtime_of(model).flats
    model(torch.ones(3, 5)).float().sum().backward()
    report = mz.memory_report(model, optimizer)
    assert report.on_disk == file.nbytes
    assert report.measured.parameters == 0 or world.size == 1
    assert report.measured.optimizer <= 4 * len(optimizer.state)  # the numbers of steps
    before = file.bytes_read, file.bytes_written
    optimizer.step()
    numel = sum(flat.master.numel() for flat in flats)
    slack = 4 * BLOCK * len(optimizer._groups_of(flats)) * len(flats)  # the last blocks of runs
    assert 12 * numel <= file.bytes_read - before[0] <= 12 * numel + slack
    assert 14 * numel <= file.bytes_written - before[1] <= 14 * numel + slack
    assert len(optimizer._groups_of(flats)) > 1 or numel < SMALL // 14
    assert optimizer.memory <= 3 * (SMALL + slack)
    before = file.bytes_read
    with torch.no_grad():  # else the last unit is read again, for backward
        model(torch.ones(3, 5))
    assert file.bytes_read - before == 2 * numel


REPORTED = [(3, "both", BF16), (3, "both", None), (3, "params", BF16), (2, "optimizer", BF16)]


@pytest.mark.sizes(1, 2)
def test_the_memory_report_has_a_formula(world, tmp_path):
    """In memory and on the disk, within 2% of what is there: padding, whole blocks and counters of steps are not in it.

    One of the two layers is frozen.
    """
    for stage, kind, precision in REPORTED:
        layers = [torch.nn.Linear(512, 512) for _ in range(2)]
        layers[1].requires_grad_(requires_grad=False)
        offload = dataclasses.replace(offload_of(kind, tmp_path), group_bytes=1 << 19)
        options = {"stage": stage, "precision": precision, "offload": offload}
        model = mz.shard(torch.nn.Sequential(*layers), world, units={torch.nn.Linear}, **options)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = mz.offloaded(torch.optim.AdamW, model, params, lr=1e-2)
        model(torch.ones(1, 512)).float().sum().backward()
        optimizer.step()
        report = mz.memory_report(model, optimizer)
        assert report.measured.total == pytest.approx(report.formula.total, rel=0.02), (stage, kind)
        assert report.on_disk == pytest.approx(report.formula_outside.total, rel=0.02), (stage, kind)
        assert report.groups == getattr(optimizer, "memory", 0)
        assert bool(report.groups) == (kind != "params")
        assert report.on_host == 0


def test_what_a_gpus_model_has_in_host_memory_is_told_apart(world, monkeypatch):
    model = sharded(world, stage=2, precision=BF16, node_shared=False)
    before = mz.memory_report(model)
    monkeypatch.setattr(mz.shard.runtime_of(model).home, "device", torch.device("cuda", 0))
    after = mz.memory_report(model)
    assert (after.measured.total, after.on_host) == (0, before.measured.total)


@pytest.mark.parametrize("kind", ["optimizer", "both"])
def test_checkpoints_go_from_and_to_a_disk(world, tmp_path, tmp_path_factory, kind):
    folder = world.mpi.bcast(str(tmp_path_factory.mktemp("checkpoint")))
    away = sharded(world, offload_of(kind, tmp_path), stage=3, precision=BF16, node_shared=False)
    optimizer = mz.offloaded(torch.optim.AdamW, away, lr=1e-2)
    train(away, optimizer, world, 2)
    mz.save(f"{folder}/a", away, optimizer)
    near = sharded(world, stage=1, precision=BF16)
    theirs = torch.optim.AdamW(near.parameters(), lr=1e-2)
    mz.load(f"{folder}/a", near, theirs)
    train(near, theirs, world, 1, seed=1)
    train(away, optimizer, world, 1, seed=1)
    assert_equal_whole(near, away)
    mz.save(f"{folder}/b", near, theirs)
    back = sharded(world, offload_of(kind, tmp_path), stage=3, precision=BF16, node_shared=False)
    again = mz.offloaded(torch.optim.AdamW, back, lr=1e-2)
    mz.load(f"{folder}/b", back, again)
    on_disk = [value for entry in again.state.values() for value in entry.values() if value.numel() > 1]
    assert on_disk
    assert all(is_mapped_file(value) for value in on_disk)
    for model, its in ((back, again), (near, theirs)):
        train(model, its, world, 2, seed=2)
    assert_equal_whole(near, back)


def is_mapped_file(value):
    """Return whether a tensor's memory is that of a file without a name."""
    address = value.data_ptr()
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            start, stop = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < stop:
                return line.rstrip().endswith("(deleted)")
    return False


def assert_equal_whole(model, other):
    found, expected = mz.full_parameters(other), mz.full_parameters(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_change_by_hand_is_seen(world, tmp_path):
    model = sharded(world, mz.Offload(optimizer=tmp_path, params=tmp_path), stage=3, precision=BF16)
    x = torch.ones(3, 5)
    with torch.no_grad():
        before = model(x)
        for param in model.parameters():
            param.mul_(2)
        assert not torch.equal(model(x), before)
    assert torch.equal(mz.full_parameters(model)["scale"], torch.tensor(3.0))


def test_frozen_parameters_and_those_without_gradients_stay(world, tmp_path):
    model = sharded(world, mz.Offload(optimizer=tmp_path), stage=2, precision=BF16)
    next(iter(model[1].parameters())).requires_grad = False
    before = mz.full_parameters(model)
    optimizer = mz.offloaded(torch.optim.AdamW, model, model[0].parameters(), lr=1e-2)
    train(model, optimizer, world, 2)
    after = mz.full_parameters(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"0.weight", "0.bias"}


@pytest.mark.parametrize("kind", ["optimizer", "both"])
def test_a_change_by_hand_ahead_of_a_step_is_seen_after_it(world, tmp_path, kind):
    """Also of parameters that the step does not touch."""
    model = sharded(world, offload_of(kind, tmp_path), stage=3, precision=BF16, node_shared=False)
    optimizer = mz.offloaded(torch.optim.SGD, model, model[0].parameters(), lr=0.0)
    x = torch.ones(3, 5)
    before = model(x)
    before.sum().backward()
    with torch.no_grad():
        for param in model[2].parameters():
            param.zero_()
        optimizer.step()
        assert not torch.equal(model(x), before)


@pytest.mark.sizes(1)
def test_what_a_job_shows(world, tmp_path, capsys):
    model = sharded(world, offload_of("both", tmp_path), stage=3)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    with Progress(model, optimizer, steps=2) as progress:
        for _ in range(2):
            loss = model(torch.ones(3, 5)).sum()
            loss.backward()
            optimizer.step()
            progress.step(loss, tokens=3)
    progress.summary(2.0, 1.0)
    said = capsys.readouterr().out
    spill = mz.shard.runtime_of(model).spill
    assert f"  disk {mib(spill.moved / 2)}/step\n" in said
    assert f"{mib(spill.nbytes)} more are on disk; {mib(spill.moved / 2)} of them were read or written per step" in said


def test_a_closure(world, tmp_path):
    model = sharded(world, mz.Offload(optimizer=tmp_path), stage=2)
    optimizer = mz.offloaded(torch.optim.SGD, model, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 5)).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def wrong(world, folder, rank):
    """Return an `Offload` of a folder that is missing on one rank alone."""
    return mz.Offload(optimizer=folder / "missing" if world.rank == rank % world.size else folder)


def test_a_folder_that_one_rank_lacks(world, tmp_path):
    with pytest.raises(DiskError, match=f"rank {1 % world.size}: offload path must be a folder that can be written to"):
        sharded(world, wrong(world, tmp_path, 1), stage=2)


@pytest.fixture
def limit():
    """Set how many bytes a file of this process may have: as a disk that is full, for everybody to try."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up(world, tmp_path, limit):
    """Where the model is moved, and in the middle of the step that makes the state; on one rank alone."""
    last = world.size - 1
    said = f"rank {last}: .*could not be taken|rank {last}: .*free bytes must be at least"
    if world.rank == last:
        limit(BLOCK)
    with pytest.raises(DiskError, match=said):
        sharded(world, mz.Offload(optimizer=tmp_path), stage=2, precision=BF16)
    limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    model = sharded(world, mz.Offload(optimizer=tmp_path), stage=2, precision=BF16)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    model(torch.ones(3, 5)).float().sum().backward()
    if world.rank == last:
        limit(mz.shard.runtime_of(model).spill.nbytes + BLOCK)
    with pytest.raises(DiskError, match=said):
        optimizer.step()


def test_a_file_that_is_truncated(world, tmp_path):
    model = sharded(world, mz.Offload(optimizer=tmp_path), stage=2)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    train(model, optimizer, world, 1)
    model(torch.ones(3, 5)).sum().backward()
    if world.rank == 0:
        (file,) = mz.shard.runtime_of(model).spill.files
        os.truncate(f"/proc/self/fd/{file._file}", BLOCK)
    with pytest.raises(DiskError, match=r"rank 0: .*: a scratch file must be [\d,]+ bytes long"):
        optimizer.step()


def test_a_step_that_only_some_ranks_take(world, tmp_path):
    comm = mz.Communicator(world.mpi)
    model = sharded(comm, mz.Offload(optimizer=tmp_path), stage=2)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    model(torch.ones(3, 5)).sum().backward()
    with pytest.raises(
        ShardError, match=r"all ranks must make the same call .*rank 0: clip_grad_norm_.*offloaded step"
    ):
        optimizer.step() if comm.rank else mz.grad_norm(model)
    comm.close()


def test_wrong_choices(world, tmp_path):
    with pytest.raises(
        ArgumentError, match=r'Offload.optimizer must be "cpu" for host memory, or the path of a folder'
    ):
        mz.Offload(optimizer="disk")
    with pytest.raises(ArgumentTypeError, match=r"cls must be a class .*\(got 'one of SGD'\): the class itself"):
        mz.offloaded(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), sharded(world, mz.Offload(), stage=2))
    with pytest.raises(ArgumentTypeError, match=r"offload must be an mpizero.Offload or None"):
        sharded(world, "disk")
    with pytest.raises(ArgumentError, match="offload must be None at stage 0"):
        sharded(world, mz.Offload(), stage=0)
    with pytest.raises(ArgumentError, match=r"Offload.params must be None below stage 3"):
        sharded(world, mz.Offload(params=tmp_path), stage=2)
    with pytest.raises(ArgumentError, match="node_shared must be None or False"):
        sharded(world, mz.Offload(params=tmp_path), node_shared=True)
    with pytest.raises(ArgumentTypeError, match=r"Offload.optimizer must be None"):
        mz.Offload(optimizer=3)
    with pytest.raises(ArgumentError, match=r"Offload.group_bytes must be"):
        mz.Offload(group_bytes=10)
    model = sharded(world, stage=2)
    with pytest.raises(ArgumentError, match="model must be sharded with offload"):
        mz.offloaded(torch.optim.AdamW, model, lr=1e-2)
    model = sharded(world, mz.Offload(optimizer=tmp_path), stage=2)
    with pytest.raises(ArgumentError, match="cls must be element-wise"):
        mz.offloaded(torch.optim.LBFGS, model)
    with pytest.raises(ArgumentTypeError, match="cls must be a class of optimizers"):
        mz.offloaded("AdamW", model)
    with pytest.raises(ArgumentError, match="params must be this model's"):
        mz.offloaded(torch.optim.SGD, model, [torch.nn.Parameter(torch.ones(3))], lr=0.1)
