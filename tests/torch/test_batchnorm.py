"""SyncBatchNorm beside torch's BatchNorm in one process on the joined batch."""

import copy

import pytest
import torch
from helpers.small import BF16, STAGES, batch, close, joined, same_everywhere, seeded, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 3), nn.BatchNorm3d: (2, 1, 3)}
OPTIONS = [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"bias": False}]
CASES = [*((kind, {}) for kind in SHAPES), *zip([*SHAPES, nn.BatchNorm1d], OPTIONS, strict=True)]
CHANNELS = 5


def parts(world, tail, step=0, dtype=torch.float64):
    """Every rank's batch, of uneven sizes; rank 1's is empty."""
    made = torch.Generator().manual_seed(step)
    sizes = [0 if rank == 1 else 2 + rank for rank in range(world.size)]
    return [torch.randn(size, CHANNELS, *tail, generator=made, dtype=dtype) * 3 + 1 for size in sizes]


def run(module, x, upstream):
    """Return output and input gradient."""
    x = x.clone().requires_grad_()
    y = module(x)
    if y.requires_grad:
        y.backward(upstream)
    return y.detach(), x.grad


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_equals_the_joined_batch(world, kind, options):
    """Output, all gradients and running statistics, in training and then in eval mode; in fp64."""
    plain = kind(CHANNELS, dtype=torch.float64, **options)
    if plain.affine:
        nn.init.uniform_(plain.weight, generator=torch.Generator().manual_seed(0))
    sync = mz.convert_sync_batchnorm(copy.deepcopy(plain), world)
    for step in range(3):
        sync.train(step < 2)
        plain.train(step < 2)
        xs, upstreams = parts(world, SHAPES[kind], step), parts(world, SHAPES[kind], step + 10)
        y, x_grad = run(plain, torch.cat(xs), torch.cat(upstreams))
        start = sum(len(x) for x in xs[: world.rank])
        own = slice(start, start + len(xs[world.rank]))
        got, got_grad = run(sync, xs[world.rank], upstreams[world.rank])
        assert torch.allclose(got, y[own])
        assert torch.allclose(got_grad, x_grad[own])
    for name, buffer in plain.named_buffers():
        assert torch.allclose(sync.get_buffer(name), buffer)
        assert same_everywhere(world, sync.get_buffer(name))
    for name, param in plain.named_parameters():
        assert torch.allclose(mz.all_reduce(sync.get_parameter(name).grad.clone(), world), param.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(world, dtype):
    xs = [x.to(dtype) for x in parts(world, (4, 3))]
    plain = seeded(lambda: nn.BatchNorm2d(CHANNELS))
    sync = mz.convert_sync_batchnorm(copy.deepcopy(plain), world)
    own, joined_batch = xs[world.rank].clone(memory_format=torch.channels_last).requires_grad_(), torch.cat(xs).float()
    joined_batch.requires_grad_()
    y = sync(own)
    assert y.dtype == dtype
    y.transpose(2, 3).exp().sum().backward()
    expected = plain(joined_batch)
    expected.exp().sum().backward()
    start = sum(len(x) for x in xs[: world.rank])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    if len(own):
        close(y, expected[start : start + len(own)], limit)
        close(own.grad, joined_batch.grad[start : start + len(own)], limit)
    close(mz.all_reduce(sync.bias.grad.clone(), world), plain.bias.grad, limit)
    close(mz.all_reduce(sync.weight.grad.clone(), world), plain.weight.grad, limit)
    close(sync.running_mean, plain.running_mean)
    close(sync.running_var, plain.running_var)


def test_a_gradient_of_ones_that_share_memory(world):
    sync = mz.SyncBatchNorm(CHANNELS, comm=world)
    x = parts(world, (2,), dtype=torch.float32)[world.rank].requires_grad_()
    sync(x).sum().backward()
    count = sum(len(x) for x in parts(world, (2,))) * 2
    assert float(mz.all_reduce(sync.bias.grad.clone(), world)[0]) == count
    assert torch.allclose(x.grad, torch.zeros_like(x), atol=1e-5)


def test_a_mean_far_from_zero(world):
    """A variance by sums of squares would be lost: 1e4 squared is 1e8, fp32 ends at 2e7."""
    made = torch.Generator().manual_seed(world.rank)
    x = 1e4 + 10 * world.rank + torch.randn(64, CHANNELS, generator=made)
    sync = mz.SyncBatchNorm(CHANNELS, momentum=1.0, comm=world)
    sync(x)
    whole = mz.all_gather(x, world).double()
    assert torch.allclose(sync.running_var.double(), whole.var(0), rtol=2e-3, atol=0)  # 1e4 itself is known to 5e-4
    assert torch.allclose(sync.running_mean.double(), whole.mean(0), rtol=1e-6, atol=0)


def test_empty_and_tiny_batches(world):
    sync = mz.SyncBatchNorm(CHANNELS, comm=world)
    x = torch.empty(0, CHANNELS, 2, requires_grad=True)
    y = sync(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)
    assert torch.equal(sync.weight.grad, torch.zeros(CHANNELS))
    assert (int(sync.num_batches_tracked), float(sync.running_var.min())) == (0, 1.0)
    with pytest.raises(ArgumentError, match="more than 1 element per channel"):
        sync(torch.ones(int(world.rank == 0), CHANNELS))
    for shape in ((3,), (3, CHANNELS + 1)):
        with pytest.raises(ArgumentError, match=r"input must be \(n, 5, \.\.\.\)"):
            sync(torch.ones(shape))


class Block(nn.Module):
    checkpointed = False

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 7), nn.BatchNorm1d(7)

    def compute(self, x):
        return torch.tanh(self.norm(self.linear(x)))

    def forward(self, x):
        return x + (checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x))


class Normed(nn.Module):
    """BatchNorm in units, in the root, and one module under two names."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head, self.norm = nn.Linear(7, 5), nn.BatchNorm1d(7, affine=False)
        self.again = self.norm

    def forward(self, x):
        return self.head(self.again(self.blocks(self.norm(x))))


class Checkpointed(Normed):
    def __init__(self):
        super().__init__()
        self.blocks[0].checkpointed = self.blocks[1].checkpointed = True


@pytest.mark.parametrize(
    ("stage", "make"), [*((stage, Normed) for stage in STAGES), (1, Checkpointed), (3, Checkpointed)]
)
def test_sharded_training(world, stage, make):
    plain, model = seeded(make), mz.convert_sync_batchnorm(seeded(make), world)
    mz.shard(model, world, stage=stage, units={Block})
    train(plain, lambda step: joined(world, step), steps=3)
    train(model, lambda step: batch(world.rank, step), steps=3)
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name), 1e-4)
    for name, buffer in plain.named_buffers():
        close(model.get_buffer(name), buffer)
        assert same_everywhere(world, model.get_buffer(name))
    model.eval()
    plain.eval()
    with mz.unsharded(model), torch.no_grad():
        if world.rank == 0:  # running statistics: nothing is sent
            close(model(batch(0)), plain(batch(0)), 1e-4)


def test_sharded_training_in_bf16(world):
    """All stages give the same bits, and numbers."""
    first = None
    for stage in STAGES:
        model = mz.convert_sync_batchnorm(seeded(Normed), world)
        model = train(
            mz.shard(model, world, stage=stage, units={Block}, precision=BF16), lambda step: batch(world.rank, step)
        )
        model.eval()
        with torch.no_grad():
            assert model(batch(0)).isfinite().all()
        values = torch.cat([value.reshape(-1) for value in mz.full_parameters(model).values()])
        first = values if first is None else first
        assert values.isfinite().all()
        assert torch.equal(values, first)


def test_conversion_keeps_everything(world):
    model = seeded(Normed)
    model.blocks[1].norm.eval()
    seen = []
    model.norm.register_forward_hook(lambda module, *_: seen.append(type(module)))
    params, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    made = mz.convert_sync_batchnorm(model, world)
    assert made is model
    assert model.norm is model.again
    assert {name: param is params[name] for name, param in model.named_parameters()} == dict.fromkeys(params, True)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    norms = [module for module in model.modules() if isinstance(module, mz.SyncBatchNorm)]
    assert [norm.training for norm in norms] == [True, False, True]
    model(batch(world.rank))
    assert seen == [mz.SyncBatchNorm] * 2
    twin = copy.deepcopy(mz.convert_sync_batchnorm(model, world))
    assert twin.norm.comm is world
    assert twin.norm.running_mean is not model.norm.running_mean
    assert twin.norm is twin.again
    assert isinstance(mz.convert_sync_batchnorm(nn.SyncBatchNorm(3)), mz.SyncBatchNorm)


def test_what_cannot_be_converted(world):
    class Special(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(ArgumentTypeError, match=r"one of torch's own .*Special at 1.*replace it"):
        mz.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), Special(3)))
    with pytest.raises(ArgumentError, match=r"initialised .*LazyBatchNorm1d at 0.*forward first"):
        mz.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ArgumentError, match=r"not sharded yet .* before mpizero\.shard"):
        mz.convert_sync_batchnorm(mz.shard(seeded(Normed), world, units={Block}))


def test_second_derivatives_are_refused(world):
    x = batch(world.rank).requires_grad_()
    (slope,) = torch.autograd.grad(mz.SyncBatchNorm(7, comm=world)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
