"""Sharded models on real GPUs, one per rank or shared: what a stand-in on the host cannot show.

That is torch's own streams and allocator, autograd's thread for a device, the bits of CUDA's kernels, and what waits
for the device.
"""

import os
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from helpers.small import FailingGradient
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpizero as mz
from mpizero.arrays import parse_device
from mpizero.errors import ArgumentError
from mpizero.shard import runtime_of
from mpizero.testing.models import Block, awkward_model, token_loss, tokens
from mpizero.testing.parity import differing

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore:stage 3 with one unit"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

STAGES = (0, 1, 2, 3)
PRECISIONS = {"fp32": mz.Precision(), "bf16": mz.Precision(param=torch.bfloat16)}
OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}
NORMS, LOSSES = "(norms)", "(losses)"


@pytest.fixture(autouse=True)
def device(world, monkeypatch):
    """This rank's GPU, computing the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    torch.cuda.set_device(world.node.rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(mode=True)
    with sdpa_kernel(SDPBackend.MATH):  # others warn that they are not deterministic
        yield torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(mode=False)


def part(world, number, device):
    """This rank's sequences of micro-batch `number`."""
    return tokens(1, number, 2 * world.size).view(world.size, 2, -1)[world.rank].to(device)


def trained(world, device, *, steps=3, optimizer="fused", around=nullcontext, **options):
    """Train; return parameters, norms and losses. Every other step keeps its first micro-batch back."""
    model = mz.shard(awkward_model(world.rank).to(device), world, units={Block}, **options)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    norms, losses = [], []
    for number in range(steps):
        for last in (False, True):
            with around(), nullcontext() if last or number % 2 else mz.no_sync(model):
                loss = token_loss(model, part(world, 2 * number + last, device))
                loss.backward()
            losses.append(loss.detach())
        norms.append(mz.clip_grad_norm_(model, 1.0))
        stepper.step()
        stepper.zero_grad()
    found = {**mz.full_parameters(model), NORMS: torch.stack(norms), LOSSES: torch.stack(losses)}
    assert all(value.device == device for value in found.values())
    return {name: value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_stages_have_the_same_bits(world, device, precision, optimizer):
    options = {"precision": PRECISIONS[precision], "optimizer": optimizer}
    expected = trained(world, device, stage=0, **options)
    for stage in STAGES[1:]:
        assert not differing(trained(world, device, stage=stage, **options), expected)


def test_options_change_no_bits(world, device):
    expected = trained(world, device, stage=0)
    for options in ({"prefetch": 0}, {"prefetch": 3}, {"bucket_bytes": 1}, {"reshard_after_forward": True}):
        assert not differing(trained(world, device, stage=3, **options), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_those_of_the_host(world, device, precision):
    options = {"stage": 3, "precision": PRECISIONS[precision], "optimizer": "sgd"}
    found, expected = trained(world, device, **options), trained(world, torch.device("cpu"), **options)
    limit = 1e-4 if precision == "fp32" else 3e-2
    for name in (LOSSES, NORMS):
        assert torch.allclose(found[name], expected[name], rtol=limit, atol=limit)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_on_the_host(world, device, precision):
    """The same bits at every stage, wherever parameters are, whoever's stream it is, and with updates beside backward.

    Those of a run whose optimizer is on the GPU are near: its kernels are others.
    """
    options = {"precision": PRECISIONS[precision], "optimizer": "fused"}
    near = trained(world, device, stage=2, **options)
    first = trained(world, device, stage=1, offload=mz.Offload(), **options)
    others = [
        trained(world, device, stage=2, offload=mz.Offload(pin=False), **options),
        trained(world, device, stage=3, offload=mz.Offload(params="cpu"), **options),
        trained(world, device, stage=3, offload=mz.Offload(), around=on_another_stream, **options),
    ]
    assert not any(differing(other, first) for other in others)
    limit = 1e-4 if precision == "fp32" else 3e-2
    assert torch.allclose(first[LOSSES], near[LOSSES], rtol=limit, atol=limit)


def test_memory_of_a_model_whose_state_is_on_the_host(world, device):
    """On the device: working parameters, gathered units, gradients on their way; no state, no accumulators."""
    taken = []
    for offload in (None, mz.Offload(params="cpu")):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        model, _ = tower(world, device, stage=3, offload=offload, precision=PRECISIONS["bf16"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tower_step(model, optimizer, torch.ones(4, 512, device=device))
        torch.cuda.synchronize(device)
        parse_device(device).let_go()
        taken.append(torch.cuda.memory_allocated(device) - before)
        elements = sum(param.numel() for param in model.parameters())
        del model, optimizer
    assert taken[1] <= taken[0] - 16 * elements


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_beside_backward(world, device, stage):
    results = []
    for early in (False, True):
        torch.manual_seed(0)
        model, _ = tower(world, device, stage=stage, offload=mz.Offload())
        optimizer = mz.offloaded(torch.optim.AdamW, model, lr=1e-3, during_backward=early)
        for number in range(4):
            tower_step(model, optimizer, torch.full((4, 512), 1.0 + number, device=device))
        results.append(mz.full_parameters(model))
    assert not differing(*({name: value.cpu() for name, value in found.items()} for found in results))


class Tower(nn.Module):
    """Units of a megabyte and more."""

    def __init__(self, units=6, width=512):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(units))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def tower(world, device, height=6, **options):
    options = {"units": {nn.Sequential}, "bucket_bytes": 1, **options}
    model = mz.shard(Tower(height).to(device), world, **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def tower_step(model, optimizer, x):
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_allocated_bytes_are_flat_over_50_steps(world, device, stage, precision):
    """At the end of a step and, to within a unit, at its peak: no more in the last steps than in the first ones."""
    model, optimizer = tower(world, device, stage=stage, precision=PRECISIONS[precision])
    x, at_rest, peaks = torch.ones(4, 512, device=device), [], []
    for _ in range(50):
        torch.cuda.reset_peak_memory_stats(device)
        tower_step(model, optimizer, x)
        torch.cuda.synchronize(device)
        parse_device(device).let_go()
        at_rest.append(torch.cuda.memory_allocated(device))
        peaks.append(torch.cuda.max_memory_allocated(device))
    assert max(at_rest[25:]) <= max(at_rest[5:25])
    assert max(peaks[25:]) <= max(peaks[5:25]) + mz.memory_report(model).unit_buffers


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_peak_does_not_follow_the_host(world, device, prefetch):
    """A device that is far behind its host: no more units are allocated than where both go together."""
    model, optimizer = tower(world, device, 14, prefetch=prefetch)
    x, unit = torch.ones(4, 512, device=device), mz.memory_report(model).unit_buffers
    peaks = []
    for behind in (False, False, True):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if behind:
            torch.cuda._sleep(200_000_000)
        tower_step(model, optimizer, x)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    assert peaks[2] <= peaks[1] + 2.5 * unit
    if world.size > 1:
        # Parameters of the root, of a unit at work and of those ahead. Gradients of the root, of two reductions and the
        # parts that they give, of a unit that collects and as autograd has them, and what a collective still keeps.
        assert peaks[2] <= (2 + prefetch + 7.5) * unit


@contextmanager
def on_another_stream():
    """Compute on a stream of one's own, as torch asks: it waits for the current one, which waits for it after."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("stage", STAGES)
def test_the_callers_stream(world, device, stage):
    """Forward and backward on a new stream each time, beside memory that is freed and taken on others."""
    expected = trained(world, device, stage=0)
    assert not differing(trained(world, device, stage=stage, around=on_another_stream), expected)


def test_backward_from_another_stream_than_forward(world, device):
    results = []
    for apart in (False, True):
        torch.manual_seed(0)
        model, optimizer = tower(world, device)
        x = torch.ones(4, 512, device=device)
        for _ in range(3):
            loss = model(x).square().mean()
            with on_another_stream() if apart else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(mz.full_parameters(model))
    assert not differing(*({name: value.cpu() for name, value in found.items()} for found in results))


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_in_a_step_reads_the_device(world, device, stage):
    """No call of torch's waits for the device in forward, backward and step; a norm does so once."""
    model, optimizer = tower(world, device, stage=stage, precision=PRECISIONS["bf16"])
    x = torch.ones(4, 512, device=device)
    tower_step(model, optimizer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower_step(model, optimizer, x)
        model(x).float().square().mean().backward()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            mz.clip_grad_norm_(model, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in found) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raised(world, device, stage):
    """Training goes on with the bits that it would have had; autograd lets go of the backward in its own thread."""
    results = []
    for fails in (False, True):
        torch.manual_seed(world.rank)
        model, optimizer = tower(world, device, stage=stage)
        x = torch.ones(4, 512, device=device)
        if fails:
            inner = model.layers[0].forward
            model.layers[0].forward = lambda x, inner=inner: FailingGradient.apply(inner(x))
            with pytest.raises(ArithmeticError):
                model(x).sum().backward()
            model.layers[0].forward = inner
        for _ in range(2):
            tower_step(model, optimizer, x)
        results.append({name: value.cpu() for name, value in mz.full_parameters(model).items()})
    assert not differing(*results)


def test_meta_models_go_to_the_default_device(world, device):
    """With the values of a real build there from rank 0's seed; its generator goes on as after it."""
    with device:
        torch.manual_seed(0)
        real = mz.shard(Tower(2, 64), world, units={nn.Sequential}, stage=0)
        after = torch.rand(3)
        torch.manual_seed(world.rank)
        with torch.device("meta"):
            model = Tower(2, 64)
        model = mz.shard(model, world, units={nn.Sequential})
        if world.rank == 0:
            assert torch.equal(torch.rand(3), after)
    assert {param.device for param in model.parameters()} == {device}
    expected = mz.full_parameters(real)
    assert all(torch.equal(value, expected[name]) for name, value in mz.full_parameters(model).items())


def test_parameters_on_the_host_and_on_a_gpu(world, device):
    model = awkward_model(0)
    model.head.to(device)  # the embedding's matrix with it, which is tied to the head's
    rule = r"all on one device \(got 'position on cpu, embedding.weight on cuda:\d'\).*model.to\('cuda"
    with pytest.raises(ArgumentError, match=rule):
        mz.shard(model, world, units={Block})


def test_autocast(world, device):
    """Casts of full parameters that autocast keeps until its region ends, stage 3 against stage 0."""
    around = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
    expected = trained(world, device, stage=0, around=around)
    assert not differing(trained(world, device, stage=3, around=around), expected)


def test_random_numbers_of_the_device_are_put_back(world, device):
    """exact=True: dropout on the device has each micro-batch's own numbers, and the generator is left alone."""
    if world.size & (world.size - 1):
        return
    model = mz.shard(nn.Sequential(nn.Linear(8, 8), nn.Dropout()).to(device), world, exact=True)
    rows, results = torch.ones(4 * world.size, 8, device=device), []
    for _ in range(2):
        before = torch.cuda.get_rng_state(device)
        for micro in mz.micro_batches(model, rows, 4 * world.size, step=3):
            model(micro).square().mean().backward()
        assert torch.equal(torch.cuda.get_rng_state(device), before)
        torch.rand(7, device=device)
        results.append([mz.clip_grad_norm_(model, 1e9), *(mz.full_gradient(param) for param in model.parameters())])
        for param in model.parameters():
            param.grad = None
    assert all(map(torch.equal, *results))


def test_losses_are_scaled_in_fp16(world, device):
    """An overflow on one rank, which all ranks skip, and steps after it."""
    model, optimizer = tower(world, device, precision=mz.Precision(param=torch.float16))
    scaler = mz.GradScaler("cuda", init_scale=2.0**4)
    x = torch.ones(4, 512, device=device)
    before = mz.full_parameters(model)
    loss = model(x).float().square().mean()
    scaler.scale(loss * (float("inf") if world.rank == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in mz.full_parameters(model).items())
    assert scaler.get_scale() == 2.0**3
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.step(optimizer)
    assert not torch.equal(mz.full_parameters(model)["last.bias"], before["last.bias"])


def test_batch_norm_over_all_ranks(world, device):
    torch.manual_seed(0)
    rows = torch.randn(4 * world.size, 6, device=device)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(device)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(device)
    model.load_state_dict(plain.state_dict())
    model = mz.shard(mz.convert_sync_batchnorm(model, world), world)
    plain(rows).square().sum().backward()
    model(rows.view(world.size, 4, 6)[world.rank]).square().sum().mul(world.size).backward()
    assert torch.allclose(model[1].running_var, plain[1].running_var, rtol=1e-5)
    found = [mz.full_gradient(param) for param in model.parameters()]
    for value, param in zip(found, plain.parameters(), strict=True):
        assert torch.allclose(value, param.grad, rtol=1e-4, atol=1e-4)


def test_what_memory_report_says(world, device):
    model, optimizer = tower(world, device, precision=PRECISIONS["bf16"])
    tower_step(model, optimizer, torch.ones(4, 512, device=device))
    report = mz.memory_report(model, optimizer)
    assert (report.device, report.node_shared, report.room) == (str(device), False, 0)
    assert report.measured.total == pytest.approx(report.formula.total, rel=0.02)
    assert runtime_of(model).home.on_device
