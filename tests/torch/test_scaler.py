"""The loss scaler: one answer on all ranks, beside torch's own on the joined batch in one process."""

import pickle
from functools import partial

import pytest
import torch
from helpers.small import Net, Unit, batch, close, joined, same_everywhere, seeded
from torch import nn

import mpizero as mz
from mpizero.errors import ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

STEPS = 3
FP16 = mz.Precision(param=torch.float16)
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),  # takes the scaler's word inside its step
}
SCALES = {"init_scale": 1024.0, "growth_interval": 2}


def loss_of(model, x):
    return model(x).float().square().mean()


def step_with(scaler, optimizer, clip=None):
    if clip is not None:
        scaler.unscale_(optimizer)
        clip()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize(("stage", "name"), [(0, "SGD"), (1, "fused"), (2, "SGD"), (3, "fused")])
def test_an_overflow_on_one_rank(world, stage, name):
    """All skip, the scale halves on all, and training goes on as torch's scaler does with the joined batch."""
    plain, scaler = seeded(Net), torch.amp.GradScaler("cpu", **SCALES)
    optimizer, expected = OPTIMIZERS[name](plain.parameters()), []
    for step in range(4):
        scaler.scale(loss_of(plain, joined(world, step))).backward()
        spoil(plain, step == 1)
        expected.append(step_with(scaler, optimizer))
    model, scaler = mz.shard(seeded(Net), world, stage=stage, units={Unit}), mz.GradScaler(**SCALES)
    optimizer, scales = OPTIMIZERS[name](model.parameters()), []
    for step in range(4):
        scaler.scale(loss_of(model, batch(world.rank, step))).backward()
        spoil(model, step == 1 and world.rank == world.size // 3)
        scales.append(step_with(scaler, optimizer))
    assert scales == expected == [1024.0, 512.0, 512.0, 1024.0]
    for key, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(key), 1e-4)


def spoil(model, really):
    """Put an infinity into one gradient that this rank holds."""
    if really:
        next(param for param in model.parameters() if param.numel()).grad.view(-1)[0] = float("inf")


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_with_accumulation_and_clipping(world, stage):
    """Half-precision compute, two micro-batches a step, unscaled before the clipping; beside fp32 without a scaler."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit}, precision=FP16)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    scaler, scales, norms = mz.GradScaler(init_scale=2.0**20, backoff_factor=2.0**-6), [], []
    for step in range(STEPS):
        with mz.no_sync(model):
            scaler.scale(loss_of(model, batch(world.rank, 2 * step)) / 2).backward()
        scaler.scale(loss_of(model, batch(world.rank, 2 * step + 1)) / 2).backward()
        scales.append(step_with(scaler, optimizers[1], lambda: norms.append(mz.clip_grad_norm_(model, 0.5))))
    assert scales == [2.0**14] * STEPS  # the first is too large for fp16
    for step in range(1, STEPS):
        for micro in range(2):
            (loss_of(plain, joined(world, 2 * step + micro)) / 2).backward()
        close(norms[step], nn.utils.clip_grad_norm_(plain.parameters(), 0.5), 1e-2)
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert same_everywhere(world, torch.tensor(scales))
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name), 1e-2)


def test_what_is_said_between_ranks(world):
    """One all-reduce of 16 bytes for each optimizer's step, whether unscaled before or in it."""
    model = mz.shard(seeded(Net), world, stage=2, units={Unit})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), mz.GradScaler()
    calls = []
    original = mz.optim.scaler.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mz.optim.scaler, "all_reduce", lambda x, *args, **kw: (calls.append(x.nbytes), original(x, *args, **kw))[1]
        )
        for clip in (None, lambda: None):
            scaler.scale(loss_of(model, batch(world.rank))).backward()
            step_with(scaler, optimizer, clip)
    assert calls == ([16, 16] if world.size > 1 else [])


def test_state_and_pickle(world):
    model = mz.shard(seeded(Net), world, stage=2, units={Unit})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), mz.GradScaler(**SCALES)
    scaler.scale(loss_of(model, batch(world.rank))).backward()
    step_with(scaler, optimizer)
    for other in (mz.GradScaler(), pickle.loads(pickle.dumps(scaler))):  # noqa: S301
        other.load_state_dict(scaler.state_dict())
        assert other.state_dict() == scaler.state_dict()
        assert other.state_dict()["_growth_tracker"] == 1
    off = mz.GradScaler(enabled=False)
    off.scale(loss_of(model, batch(world.rank))).backward()
    assert step_with(off, optimizer, lambda: None) == 1.0


def test_mistakes(world):
    model = mz.shard(seeded(Net), world, stage=2, units={Unit})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), mz.GradScaler()
    scaler.scale(loss_of(model, batch(world.rank))).backward()
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):  # torch's, on every rank
        scaler.step(optimizer)
    scaler = mz.GradScaler()
    with mz.no_sync(model):
        scaler.scale(loss_of(model, batch(world.rank))).backward()
    with pytest.raises(ShardError, match="unscaling must follow a backward outside no_sync"):
        scaler.unscale_(optimizer)
    if world.size > 1:
        scaler = mz.GradScaler(init_scale=2.0 ** (1 + world.rank))
        scaler.scale(loss_of(model, batch(world.rank))).backward()
        with pytest.raises(ShardError, match=rf"scale must be the same on all ranks .*, 2 to {2**world.size} over all"):
            scaler.step(optimizer)


def test_torchs_own_scaler_is_refused(world):
    """Where ranks hold different parts it would let them part; elsewhere it is right."""
    for stage, name, use in ((0, "SGD", "step"), (2, "SGD", "unscale_"), (2, "SGD", "step"), (2, "fused", "step")):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
        scaler, optimizer = torch.amp.GradScaler("cpu"), OPTIMIZERS[name](model.parameters())
        scaler.scale(loss_of(model, batch(world.rank))).backward()
        if stage == 0 or world.size == 1:
            getattr(scaler, use)(optimizer)
            continue
        with pytest.raises(ShardError, match=r"must be scaled by mpizero.GradScaler\(\) \(got torch.amp.grad_scaler"):
            getattr(scaler, use)(optimizer)
    plain = seeded(Net)
    for scaler, name in ((torch.amp.GradScaler("cpu"), "SGD"), (mz.GradScaler(), "SGD"), (mz.GradScaler(), "fused")):
        optimizer = OPTIMIZERS[name](plain.parameters())
        scaler.scale(loss_of(plain, batch(0))).backward()
        assert step_with(scaler, optimizer) == 2.0**16
