"""Updates while backward goes on: the bits of updates after it, and what may not come between."""

from contextlib import nullcontext

import pytest
import torch
from helpers.offloading import SMALL, assert_equal, built, sharded
from helpers.small import BF16

import mpizero as mz
from mpizero.errors import ArgumentError, ShardError
from mpizero.testing.covering import covering

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

AXES = {
    "stage": (3, 2, 1),
    "kind": ("memory", "disk"),
    "precision": (None, BF16),
    "optimizer": ("AdamW fused", "SGD", "Adam amsgrad"),
    "no_sync": (False, True),
}


def offload_of(kind, folder):
    return mz.Offload(optimizer="cpu" if kind == "memory" else folder, group_bytes=SMALL)


@pytest.mark.parametrize("case", covering(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_the_bits_of_updates_after_backward(world, tmp_path, case):
    options = {"stage": case["stage"], "precision": case["precision"], "node_shared": False}
    plain, ours = sharded(world, **options), sharded(world, offload_of(case["kind"], tmp_path), **options)
    optimizers = [
        built(plain, case["optimizer"], offloaded=False),
        built(ours, case["optimizer"], offloaded=True, during_backward=True),
    ]
    begun = []
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        for number in range(4):
            for last in (False, True) if case["no_sync"] else (True,):
                with nullcontext() if last else mz.no_sync(model):
                    x = torch.full((3, 5), number + 1.0 + world.rank + last)
                    model(x, layers=2 if number == 2 else None).float().square().mean().backward()
            begun.append(len(optimizer._early._begun) if model is ours else 0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    assert_equal(plain, optimizers[0], ours, optimizers[1])
    assert begun[:4] == [0] * 4
    assert begun[4] > 1
    assert begun[6] < begun[4]


@pytest.fixture
def early(world, tmp_path):
    model = sharded(world, offload_of("disk", tmp_path), stage=3, node_shared=False)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-2, during_backward=True)
    loss = model(torch.ones(3, 5)).sum()
    loss.backward(retain_graph=True)
    return model, optimizer, loss


def test_a_second_backward(early):
    model, optimizer, loss = early
    with pytest.raises(ShardError, match="forward must come after the optimizer's step"):
        model(torch.ones(3, 5))
    optimizer._early.wait()
    with pytest.raises(ShardError, match="must be left alone between forward and backward"):
        loss.backward()
    with pytest.raises(ShardError, match=r"gradients of .* must come from one backward per step with during_backward"):
        mz.shard.runtime_of(model).flats[-1].early(True)  # noqa: FBT003
    optimizer.zero_grad()
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()


def test_changes_of_gradients(early):
    model, optimizer, _ = early
    for change in (mz.clip_grad_norm_, mz.clip_grad_value_):
        with pytest.raises(ShardError, match="clipping must come before the update"):
            change(model, 1.0)
    scaler = mz.GradScaler(init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ShardError, match="unscaling must come before the update"):
        scaler.unscale_(optimizer)
    assert mz.grad_norm(model) > 0
    model[0].bias.grad.zero_()
    with pytest.raises(ShardError, match="gradients must be left alone between backward and step"):
        optimizer.step()


def test_a_step_that_is_given_up(world):
    """Its update is not taken back, and all ranks compute with what it has made."""
    model = sharded(world, mz.Offload(), stage=2, precision=BF16, node_shared=False)
    optimizer = mz.offloaded(torch.optim.AdamW, model, lr=0.5, fused=True, during_backward=True)
    x = torch.ones(3, 5)
    before = model(x)
    before.sum().backward()
    for call in (mz.full_parameters, lambda model: mz.save("nowhere", model), mz.check_replicas):
        with pytest.raises(ShardError, match="must come after the optimizer's step"):
            call(model)
    optimizer.zero_grad()
    after = model(x).detach()
    assert not torch.equal(after, before)
    assert len(set(world.mpi.allgather(after.float().numpy().tobytes()))) == 1


def test_two_optimizers_and_a_check_of_replicas(world, tmp_path):
    plain = sharded(world, stage=2)
    ours = sharded(world, offload_of("disk", tmp_path), stage=2, node_shared=False)
    mz.watch_replicas(ours, every=1)
    found = []
    for model, early in ((plain, False), (ours, True)):
        params = list(model.parameters())
        how = {"during_backward": True} if early else {}
        halves = (params[::2], params[1::2])
        optimizers = [
            mz.offloaded(torch.optim.AdamW, model, half, lr=1e-2, **how) if early else torch.optim.AdamW(half, lr=1e-2)
            for half in halves
        ]
        for number in range(3):
            model(torch.full((3, 5), number + 1.0)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        found.append(mz.full_parameters(model))
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_an_optimizer_in_place_of_another(early):
    model, optimizer, _ = early
    optimizer.step()
    optimizer.zero_grad()
    instead = mz.offloaded(torch.optim.AdamW, model, lr=0.0, weight_decay=0.0)
    before = mz.full_parameters(model)
    for _ in range(2):
        model(torch.ones(3, 5)).sum().backward()
        instead.step()
    assert all(torch.equal(value, before[name]) for name, value in mz.full_parameters(model).items())


def test_options_that_change_too_late(early):
    _, optimizer, _ = early
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ShardError, match=r"options of parameter groups, as lr, must be left alone between backward"):
        optimizer.step()


def test_a_watch_of_gradients(early, world, tmp_path):
    model, _, _ = early
    with pytest.raises(ShardError, match="watch_nonfinite must come before the update"):
        mz.watch_nonfinite(model)
    watched = sharded(world, offload_of("disk", tmp_path), stage=3, node_shared=False)
    mz.watch_nonfinite(watched)
    with pytest.raises(ArgumentError, match="during_backward must be False with watch_nonfinite"):
        mz.offloaded(torch.optim.SGD, watched, lr=0.1, during_backward=True)


def test_where_parameters_or_gradients_are_still_needed(world, tmp_path):
    if world.size > 1:
        shared = sharded(world, mz.Offload(), stage=2)
        with pytest.raises(ArgumentError, match="during_backward must be False where ranks of a node share"):
            mz.offloaded(torch.optim.SGD, shared, lr=0.1, during_backward=True)
    exact = sharded(world, mz.Offload(), stage=2, node_shared=False, exact=True)
    with pytest.raises(ArgumentError, match="during_backward must be False for a model with exact=True"):
        mz.offloaded(torch.optim.SGD, exact, lr=0.1, during_backward=True)


def test_a_disk_that_fails_beside_backward(early):
    model, optimizer, _ = early
    optimizer.step()
    optimizer.zero_grad()
    runtime = mz.shard.runtime_of(model)
    if runtime.comm.rank == 0:
        (file,) = runtime.spill.files
        file.transfer = refuse
    model(torch.ones(3, 5)).sum().backward()
    with pytest.raises(mz.errors.DiskError, match=r"rank 0: it is gone|^it is gone"):
        optimizer.step()


def refuse(*_, **__):
    raise mz.errors.DiskError("it is gone")
