"""Guards of a training: where a NaN came from, and whether replicas are still equal, on real ranks."""

import re
import warnings

import pytest
import torch
from helpers.small import BF16, STAGES, Net, Skipping, Unit, batch, seeded, train
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, NonFiniteError, ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]
NAN, INF = float("nan"), float("inf")

each_stage = pytest.mark.parametrize("stage", STAGES)


class Poisoned(torch.autograd.Function):
    """Has a NaN in its gradient where it is told to."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[0] += ctx.value
        return grad, None


class Sick(Net):
    poison = 0.0

    def forward(self, x):
        x = self.first(x) * self.scale.to(x.dtype)
        x = Poisoned.apply(self.units[0](x), self.poison)
        return self.last(self.units[1](x))


def make(world, stage, **options):
    return mz.shard(seeded(Sick), world, stage=stage, units={Unit}, **options)


def backward(model, world, micro=0):
    model(batch(world.rank, micro)).float().square().mean().backward()


def same_text(world, text):
    return len(set(world.mpi.allgather(text))) == 1


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize(("stage", "value"), [(0, NAN), (1, INF), (2, INF), (3, NAN)])
def test_a_nan_is_traced_to_its_rank_parameter_and_micro_batch(world, stage, value):
    """In the second micro-batch of the second step, kept by no_sync, of the last rank; then training goes on."""
    model, last = make(world, stage, precision=BF16 if value == INF else None), world.size - 1
    watch, optimizer = mz.watch_nonfinite(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(3):
            model.poison = value if (step, micro, world.rank) == (1, 1, last) else 0.0
            if micro < 2:
                with mz.no_sync(model):
                    backward(model, world, micro)
            elif step == 0:
                backward(model, world, micro)
            else:
                with pytest.raises(NonFiniteError) as caught:
                    backward(model, world, micro)
        if step == 0:
            optimizer.step()
        optimizer.zero_grad()
    text = str(caught.value)
    assert re.search(r"in 'first.weight', the first of 6 parameters, in step 1: rank", text), text
    # An infinity may have become NaN on its way.
    assert re.search(
        rf"rank {last} has {'NaN' if value is NAN else '(Inf|NaN)'} in its micro-batch 1, and came to", text
    )
    assert f"rank {last - 1} has" not in text
    assert re.search(r"of 'units\.0\.(linear|norm)\.\w+' first", text), text
    assert same_text(world, text)
    train(model, lambda step: batch(world.rank, step))
    assert watch.step == 3
    watch.remove()
    watch.remove()
    model.poison = value
    backward(model, world)


@each_stage
def test_a_nan_may_be_a_warning(world, stage):
    model = make(world, stage)
    mz.watch_nonfinite(model, action="warn")
    model.poison = NAN
    for turn in range(2):  # the second adds to gradients that are spoiled: said once in a step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(model, world)
        said = [str(one.message) for one in caught if "must be finite" in str(one.message)]
        assert len(said) == (turn == 0)
    model.zero_grad()
    with pytest.warns(RuntimeWarning, match="rank 0 has NaN in its micro-batch 0"):
        backward(model, world)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sum_that_overflows_is_told_apart(world, stage):
    """Finite on every rank in fp32, too large for the fp16 in which gradients travel."""
    model = mz.shard(seeded(lambda: nn.Linear(2, 2)), world, stage=stage, precision=mz.Precision(reduce=torch.float16))
    mz.watch_nonfinite(model)
    if world.size == 1:
        return
    with pytest.raises(NonFiniteError, match=r"in the sum over ranks, held by rank.*Precision\(reduce=torch.float32\)"):
        model(torch.full((1, 2), 1e6)).sum().backward()


@each_stage
def test_a_scalers_overflow_is_no_error(world, stage):
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, precision=mz.Precision(param=torch.float16))
    scaler = mz.GradScaler(init_scale=2.0**40, backoff_factor=2.0**-32)
    watch = mz.watch_nonfinite(model, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        scaler.scale(model(batch(world.rank, step)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert watch.overflows == 1
    assert watch.step == 1
    scaler.update(0.5)  # nothing that a smaller scale could mend
    with pytest.raises(NonFiniteError):
        scaler.scale(model(torch.full((1, 7), NAN)).sum()).backward()


@each_stage
def test_parameters_are_watched_if_asked(world, stage):
    model = make(world, stage)
    mz.watch_nonfinite(model, parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    backward(model, world)
    optimizer.step()
    for param in model.parameters():
        if param.grad is not None and param.grad.numel():
            param.grad.view(-1)[0] = INF
    with pytest.raises(NonFiniteError, match=r"in 'first.weight' after step 1, in values held by ranks? 0") as caught:
        optimizer.step()
    assert same_text(world, str(caught.value))


def test_exact_micro_batches_are_numbered(world):
    if world.size == 3:
        return
    model = make(world, 2, exact=True)
    mz.watch_nonfinite(model)

    def step():
        for at, micro in enumerate(mz.micro_batches(model, torch.ones(8, 7), 8)):
            model.poison = NAN if (at, world.rank) == (1, 0) else 0.0
            model(micro).square().mean().backward()

    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"rank 0 has NaN in its micro-batch 1"):
            step()


def test_wrong_uses_of_the_watch(world):
    model = make(world, 3)
    with pytest.raises(ArgumentError, match="action must be one of raise, warn"):
        mz.watch_nonfinite(model, action="log")
    mz.watch_nonfinite(model)
    with pytest.raises(ArgumentError, match="not watched yet"):
        mz.watch_nonfinite(model)
    if world.size > 1:
        with pytest.raises(ArgumentError, match="options of watch_nonfinite must be the same"):
            mz.watch_nonfinite(make(world, 0), parameters=world.rank == 0)


# Ranks that do not come together, without strict mode


def fragile(world, stage, **options):
    """A model on a communicator of its own, which the test will break."""
    comm = mz.Communicator(world.mpi, timeout=0.5)
    return mz.shard(seeded(Skipping), comm, stage=stage, units={Unit}, **options)


@pytest.mark.parametrize(
    ("stage", "what"), [(0, "backward outside no_sync"), (3, "forward of 'Skipping' in train mode")]
)
def test_a_rank_with_fewer_batches_is_named(world, stage, what):
    """S7: without `join` the others say which rank did not come, and to what; never a silent hang."""
    model, last = fragile(world, stage), world.size - 1
    train(model, lambda step: batch(world.rank, step))
    if world.rank != last:
        with pytest.raises(CollectiveTimeoutError, match=rf"^{what}.*not all ranks came to it: .*rank {last}\b"):
            train(model, lambda step: batch(world.rank, step), steps=1)


def test_the_full_state_on_rank_0_alone_is_named(world):
    """S9: nobody else calls anything."""
    if world.size == 1:
        return
    model = fragile(world, 3)
    if world.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"^full_parameters: not all ranks came to it: .*rank 1\b"):
            mz.full_parameters(model)


@pytest.mark.parametrize("loads", [True, False])
def test_a_unit_used_on_some_ranks_only_is_named(world, monkeypatch, loads):
    """S8: at stage 3, where its gather needs all ranks: each names the unit that it was about to gather."""
    if world.size == 1:
        return
    monkeypatch.setenv("MPIZERO_LOADS", str(int(loads)))
    model = fragile(world, 3, node_shared=False)
    model.skip = 0 if world.rank == 0 else None
    unit = "units.1.linear.weight" if world.rank == 0 else "units.0.linear.weight"
    text = r"got rank 0: all_gather.*ranks? 1.*: all_gather" if loads else r"waited 0.5 s for: receive from rank"
    with pytest.raises(CollectiveError, match=rf"parameters {unit} and 3 more.*{text}"):
        model(batch(world.rank))


# Replicas


def damage(world, tensor):
    """Change one bit of the last rank's tensor, as faulty memory would: no version counter sees it."""
    if world.rank == world.size - 1:
        tensor.detach().view(-1).view(torch.uint8).numpy()[0] ^= 1


def differs(world, name):
    last = world.size - 1
    if world.size == 2:
        return rf"{name} differs between rank 0 and rank 1"
    return rf"{name} on rank {last} differs from ranks {', '.join(map(str, range(last)))}"


@pytest.mark.parametrize("shared", [None, False])
@each_stage
def test_a_flipped_bit_is_found(world, stage, shared):
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=shared)
    optimizer = torch.optim.Adam(model.parameters())
    watch = mz.watch_replicas(model, optimizer, every=1)
    train(model, lambda step: batch(world.rank, step))
    backward(model, world)
    optimizer.step()
    mz.check_replicas(model, optimizer)
    backward(model, world)
    mz.check_replicas(model, optimizer)
    if world.size == 1:
        return
    damage(world, model.scale)
    with pytest.raises(ShardError, match=differs(world, "buffer 'scale'")) as caught:
        mz.check_replicas(model)
    assert same_text(world, str(caught.value))
    mz.check_replicas(model, skip=["scale"])
    damage(world, model.scale)
    damage(world, optimizer.state[next(iter(optimizer.state))]["step"])
    with pytest.raises(ShardError, match=differs(world, "the optimizer's state of 'first.weight'")):
        optimizer.step()
    damage(world, optimizer.state[next(iter(optimizer.state))]["step"])
    if stage == 0 or (stage < 3 and shared is False):
        flat = model._mpizero_runtime.units[1].flats[0]
        damage(world, flat.full[flat.layout.slots[1].offset :])
        with pytest.raises(ShardError, match=differs(world, f".*parameter '{flat.members[1].names[0]}'")):
            optimizer.step()
        damage(world, flat.full[flat.layout.slots[1].offset :])
    optimizer.param_groups[0]["lr"] *= 1 + world.rank
    with pytest.raises(ShardError, match="option 'lr' of parameter group 0"):
        optimizer.step()
    watch.remove()
    optimizer.step()


@pytest.mark.sizes(4)
def test_replicas_of_hybrid_sharding(world):
    if world.size != 4:
        return
    group = world.split(world.rank // 2)
    model = mz.shard(seeded(Net), world, stage=3, units={Unit}, group=group, node_shared=False)
    optimizer = torch.optim.Adam(model.parameters())
    backward(model, world)
    optimizer.step()
    mz.check_replicas(model, optimizer)
    shard = next(param for param in model.parameters() if param.numel())
    damage(world, shard)
    with pytest.raises(ShardError, match=r"the shard of parameter '.*' differs between rank 1 and rank 3"):
        mz.check_replicas(model, optimizer)
    damage(world, shard)
    damage(world, optimizer.state[shard]["exp_avg"])
    with pytest.raises(ShardError, match=r"state of the shard of '.*' differs between rank 1 and rank 3"):
        mz.check_replicas(model, optimizer)


def test_running_statistics_of_ones_own_batches_may_differ(world):
    model = mz.shard(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)), world, stage=0)
    model(batch(world.rank))
    mz.check_replicas(model)
    with pytest.raises(ArgumentError, match="every must be"):
        mz.watch_replicas(model, every=0)
