"""Where a sharded model lies, on which stream its memory is taken, and backwards in threads of autograd's own."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.chains import check_at_rest
from helpers.small import BF16, STAGES, FailingGradient, Net, Unit, batch, seeded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError
from mpizero.shard import flat, reductions, runtime_of
from mpizero.shard.backward import Backward
from mpizero.shard.home import Home

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_no_tensor_is_made_on_the_default_device(world, stage):
    """All that is made lies with the model, or on the host by name: torch's default device may be another."""
    inputs = [batch(world.rank, number) for number in range(4)]
    model = seeded(Net)
    with torch.device("meta"):
        mz.shard(model, world, stage=stage, units={Unit}, precision=BF16)
        optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.1), mz.EMA(model)
        for number, x in enumerate(inputs):
            with nullcontext() if number % 2 else mz.no_sync(model):
                model(x).float().square().mean().backward()
            if number % 2:
                assert float(mz.clip_grad_norm_(model, 1.0)) > 0
                optimizer.step()
                optimizer.zero_grad()
                ema.update()
        found = mz.full_parameters(model)
    assert all(value.isfinite().all() for value in found.values())


def on_devices(**where):
    """A model whose parameters are said to lie on these devices."""
    model = nn.Module()
    with FakeTensorMode():
        for name, device in where.items():
            model.register_parameter(name, nn.Parameter(torch.empty(3, device=device)))
    model.forward = lambda x: x
    return model


def test_parameters_on_several_devices(world):
    with pytest.raises(ArgumentError, match=r"on one device \(got 'a on cuda:0, b on cpu'.*model.to\('cuda:0'\)"):
        mz.shard(on_devices(a="cuda:0", b="cpu", c="meta"), world)
    with pytest.raises(ArgumentError, match="a on cuda:0, c on cuda:1"):
        mz.shard(on_devices(a="cuda:0", b="meta", c="cuda:1"), world)
    with pytest.raises(ArgumentTypeError, match=r"on one CUDA device, or on the meta device \(got 'b on xpu:0'"):
        mz.shard(on_devices(a="cpu", b="xpu:0"), world)


@contextmanager
def passes(depth):
    depth.append(1)
    try:
        yield
    finally:
        depth.pop()


@pytest.mark.parametrize("stage", STAGES)
def test_all_is_done_in_the_order_of_the_home_stream(world, stage, monkeypatch):
    """Collectives are called and waited for, storages emptied and refilled, inside `Home.order`."""
    depth, counts = [], dict.fromkeys(("call", "wait", "resize"), 0)
    monkeypatch.setattr(Home, "order", lambda _: passes(depth))

    def counted(kind, function):
        def inside(*args, **kwargs):
            assert depth, f"{kind} outside the order of the home stream"
            counts[kind] += 1
            result = function(*args, **kwargs)
            if isinstance(result, mz.Work):
                result.wait = counted("wait", result.wait)
            return result

        return inside

    model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False, precision=BF16, prefetch=1)
    monkeypatch.setattr(flat, "all_gather", counted("call", flat.all_gather))
    for name in ("all_reduce", "reduce_scatter"):
        monkeypatch.setattr(reductions, name, counted("call", getattr(reductions, name)))
    monkeypatch.setattr(torch.UntypedStorage, "resize_", counted("resize", torch.UntypedStorage.resize_))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        model(batch(world.rank, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counts["call"] == counts["wait"] > 0
    assert bool(counts["resize"]) == (stage == 3)


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


def test_the_home_stream_and_the_callers(world, monkeypatch):
    """Each waits for the other, also where what is inside raises; on the home stream itself there is nothing to do."""
    events, home = [], Home(torch.device("cpu"))
    own, other = Stream("home", events), Stream("caller", events)
    current = [own]
    monkeypatch.setattr(home, "_stream", own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    with home.order():
        assert not events
    current.append(other)
    with home.order(), home.order():
        assert events == ["home waits for caller"]
        assert current[-1] is own
    assert events == ["home waits for caller", "caller waits for home"]
    with pytest.raises(ZeroDivisionError), home.order():
        _ = 1 / 0
    assert events[2:] == ["home waits for caller", "caller waits for home"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_in_a_thread_of_its_own(world, stage):
    """As autograd runs a GPU's."""
    results = []
    for apart in (False, True):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            loss = model(batch(world.rank, number)).square().mean()
            if apart:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(mz.full_parameters(model))
    same(*results)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raised_and_was_not_dropped_yet(world, stage, monkeypatch):
    """A GPU's autograd may drop it in its own thread, later than the caller goes on."""
    monkeypatch.setattr(Backward, "_given_up", lambda *_: None)
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False)
    inner = model.first.forward
    model.first.forward = lambda x: FailingGradient.apply(inner(x))
    with pytest.raises(ArithmeticError):
        model(batch(world.rank)).sum().backward()
    assert runtime_of(model).backward.running
    model.first.forward = inner
    model(batch(world.rank)).sum().backward()
    check_at_rest(model)
    clean = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False)
    clean(batch(world.rank)).sum().backward()
    for param, other in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
