"""Norms of gradients and clipping, against plain torch on the joined batch, on real ranks."""

import math

import pytest
import torch
from helpers.small import STAGES, Net, Unit, batch, close, joined, same_everywhere, seeded
from torch import nn

import mpizero as mz
from mpizero.comm import Communicator
from mpizero.errors import ArgumentError, ArgumentTypeError, ShardError
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

each_stage = pytest.mark.parametrize("stage", STAGES)
NORM_TYPES = (1, 2, 3, 0.5, math.inf, "inf")


def with_gradients(world, stage, make=Net, units=(Unit,)):
    """Return a sharded model, and a plain one, with gradients of the same batch."""
    plain, model = seeded(make), mz.shard(seeded(make), world, stage=stage, units=set(units) or None)
    plain(joined(world)).square().mean().backward()
    model(batch(world.rank)).square().mean().backward()
    return plain, model


def moved(model):
    """Return the parameters after a step of length 1 against the gradients, which shows them whole."""
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return mz.full_parameters(model) if hasattr(model, "_mpizero_runtime") else dict(model.named_parameters())


def bits(tensors):
    return [tensor.detach().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]


def test_every_norm_is_plain_torchs(world):
    """S1: all stages give the same bits, before and after the clipping."""
    first = None
    for stage in STAGES:
        plain, model = with_gradients(world, stage)
        before = [param.grad.clone() for param in model.parameters()]
        assert mz.clip_grad_norm_(model, math.inf) == mz.clip_grad_norm_(model, 1e6) == mz.grad_norm(model)
        for param, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.grad, grad)
        norms = []
        for norm_type in NORM_TYPES:  # each clips what the one before has left
            grads = [param.grad for param in plain.parameters()]
            limit = 0.7 * float(nn.utils.get_total_norm(grads, float(norm_type)))
            expected = nn.utils.clip_grad_norm_(plain.parameters(), limit, float(norm_type))
            norms += [mz.grad_norm(model, norm_type), mz.clip_grad_norm_(model, limit, norm_type)]
            close(norms[-1], expected)
            assert torch.equal(norms[-2], norms[-1])
            assert norms[-1].dtype == torch.float32
            assert norms[-1].shape == ()
        assert same_everywhere(world, torch.stack(norms))
        after = moved(model)
        for name, value in moved(plain).items():
            close(after[name], value)
        first = first or bits([*norms, *after.values()])
        assert bits([*norms, *after.values()]) == first


@each_stage
def test_gradients_changed_by_hand(world, stage):
    """What counts is `param.grad` now: one doubled, one removed, one replaced; clipped by norm, then by value."""
    plain, model = with_gradients(world, stage)
    for m in (plain, model):
        one, two, three = list(m.parameters())[:3]
        with torch.no_grad():
            one.grad.mul_(2)
            two.grad = None
            three.grad = torch.full_like(three, 0.25)
    close(mz.grad_norm(model), nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    mz.clip_grad_norm_(model, 0.1)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    limit = 0.5 * max(float(param.grad.abs().max()) for param in plain.parameters() if param.grad is not None)
    mz.clip_grad_value_(model, limit)
    nn.utils.clip_grad_value_(plain.parameters(), limit)
    assert mz.grad_norm(model, math.inf) == torch.tensor(limit)
    assert list(model.parameters())[1].grad is None
    after = moved(model)
    for name, value in moved(plain).items():
        close(after[name], value)
    for param in model.parameters():
        param.grad = None
    assert mz.clip_grad_norm_(model, 0.1) == mz.grad_norm(model, math.inf) == 0


def spoil(model, value):
    """Put `value` into one element of the whole gradients: the last rank that has a part of them."""
    runtime = runtime_of(model)
    owned = [p for p in model.parameters() if p.numel()]
    last = max(runtime.comm.mpi.allgather(runtime.comm.rank if owned else -1))
    if runtime.comm.rank == last or not runtime.lifetime.cut:
        owned[-1].grad.view(-1)[-1] = value


@each_stage
def test_what_is_not_finite_is_seen_by_all(world, stage):
    """An infinity or NaN that one rank holds: every rank's norm, whichever it is; refused on demand, unchanged."""
    _, model = with_gradients(world, stage)
    first = next(iter(model.parameters())).grad
    for value in (-math.inf, math.inf, math.nan):
        spoil(model, value)
        before = first.clone()
        for norm_type in (1, 2, 3, math.inf):
            norm = mz.grad_norm(model, norm_type)
            assert math.isnan(norm) if math.isnan(value) else norm == math.inf
            with pytest.raises(ShardError, match=r"norm of order .* must be finite \(got (inf|nan)\)"):
                mz.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        assert torch.equal(first, before)
    mz.clip_grad_norm_(model, 1.0)
    assert all(param.grad.isnan().all() for param in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_float64_keeps_its_precision(world, stage):
    plain, model = seeded(Net).double(), mz.shard(seeded(Net).double(), world, stage=stage, units={Unit})
    plain(joined(world).double()).square().mean().backward()
    model(batch(world.rank).double()).square().mean().backward()
    grads = torch.cat([param.grad.flatten() for param in plain.parameters()])
    norm = mz.grad_norm(model)
    assert norm.dtype == torch.float64
    assert abs(float(norm) - float(torch.linalg.vector_norm(grads))) < 1e-12


@pytest.mark.parametrize("stage", [0, 2])
def test_ignored_parameters_count_once(world, stage):
    """A dense and a sparse gradient that every rank holds whole; clipped by the same factor."""
    plain, model = with_gradients(world, stage)
    extra, table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
    extra.grad = torch.full((3,), 0.5)
    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), rows, (4, 2), check_invariants=True)
    runtime_of(model).ignored = [("extra", extra), ("table", table)]
    whole = [torch.full((3,), 0.5), torch.tensor([[2.0, 2.0], [2.0, 2.0]])]
    grads = [*(param.grad for param in plain.parameters()), *whole]
    expected = nn.utils.get_total_norm(grads)
    close(mz.clip_grad_norm_(model, 0.1), expected)
    close(extra.grad, whole[0] * 0.1 / expected)
    close(table.grad.to_dense()[[1, 3]], whole[1] * 0.1 / expected)
    close(mz.grad_norm(model), torch.tensor(0.1))
    mz.clip_grad_value_(model, 0.01)
    assert torch.equal(extra.grad, torch.full((3,), 0.01))


@pytest.mark.parametrize("stage", [2])
def test_replicas_count_once(world, stage):
    """Two groups that hold the same shards: the norm is one group's, and has the same bits in both."""
    if world.size != 4:
        return
    group = Communicator(world.mpi.Split(world.rank // 2, world.rank))
    across = Communicator(world.mpi.Split(world.rank % 2, world.rank))
    model = mz.shard(seeded(Net), group, stage=stage, units={Unit})
    model(batch(group.rank)).square().mean().backward()
    expected = mz.grad_norm(model)
    runtime = runtime_of(model)
    runtime.comm, runtime.replicas = world, across
    if across.rank == 1:  # what the second group holds does not matter
        for param in model.parameters():
            param.grad.mul_(3)
    assert torch.equal(mz.grad_norm(model), expected)
    assert same_everywhere(world, mz.grad_norm(model, 1))
    across.close()


def test_numbers_that_cannot_be(world):
    """Alike on all ranks, also where only one rank's is wrong."""
    _, model = with_gradients(world, 2)
    for norm_type in (0, -1, math.nan, -math.inf):
        with pytest.raises(ArgumentError, match="norm_type must be positive"):
            mz.grad_norm(model, norm_type)
    for limit in (0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match="max_norm must be positive"):
            mz.clip_grad_norm_(model, limit)
        with pytest.raises(ArgumentError, match="clip_value must be positive"):
            mz.clip_grad_value_(model, limit)
    with pytest.raises(ArgumentTypeError, match=r"norm_type must be a number \(got 'fro'\)"):
        mz.grad_norm(model, "fro")
    if world.size > 1:
        with pytest.raises(ArgumentError, match="max_norm must be the same on all ranks"):
            mz.clip_grad_norm_(model, float(world.rank))
        with pytest.raises(ArgumentError, match="norm_type must be the same on all ranks"):
            mz.grad_norm(model, 2 if world.rank else math.inf)
    with mz.no_sync(model):
        model(batch(world.rank)).sum().backward()
    for use in (mz.grad_norm, lambda m: mz.clip_grad_value_(m, 1.0)):
        with pytest.raises(ShardError, match="must follow a backward outside no_sync"):
            use(model)
