"""`exact=True`: the same bits on 1, 2, 4 and 8 ranks, against a single process, and against plain torch's gradients."""

from functools import cache

import numpy as np
import pytest
import torch
from helpers.small import BF16, Net, Unit, same_everywhere, seeded
from torch import nn

import mpizero as mz
from mpizero.collectives import pairwise
from mpizero.errors import ArgumentError, ShardError
from mpizero.shard import exact_gradients
from mpizero.testing.models import Block, awkward_model, token_loss, tokens

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(1, 2, 4, 8),
    pytest.mark.filterwarnings("ignore:stage 3 with one unit"),
]

M = 8
INTERLEAVED, BLOCKED = "interleaved", "blocked"


def powers(world):
    return world.size & (world.size - 1) == 0


class Dropping(Net):
    """With dropout, and a parameter that every other micro-batch uses."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.rare = nn.Parameter(torch.randn(70, 7))

    def forward(self, x):
        y = super().forward(self.drop(x) + (self.rare.mean(0) if x[0, 0] > 0 else 0))
        return self.drop(y)


def data(step, rows=16):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, 7, generator=generator), "y": torch.randn(rows, 5, generator=generator)}


def loss_of(model, micro):
    return (model(micro["x"]) - micro["y"]).square().mean()


def bits(tensors):
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def trained(comm, *, numbering=INTERLEAVED, steps=20, **options):
    """Return the bits of the norms and of the parameters after training with clipping and dropout."""
    model = mz.shard(seeded(Dropping), comm, units={Unit}, exact=True, **options)
    params = list(model.parameters())
    steppers = [
        torch.optim.AdamW(params[i::2], lr=1e-2, **kind) for i, kind in enumerate(({"fused": True}, {"foreach": True}))
    ]
    norms = []
    for step in range(steps):
        for micro in mz.micro_batches(model, data(step), M, numbering=numbering, seed=5):
            loss_of(model, micro).backward()
        norms.append(mz.clip_grad_norm_(model, 0.2))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    assert torch.stack(norms).min() > 0.2
    return bits([*norms, *mz.full_parameters(model).values()])


def alone(world, function):
    """Return what `function` of a communicator of one rank returns on rank 0, on all ranks."""
    own = world.split(world.rank)
    found = world.mpi.bcast(function(own) if world.rank == 0 else None)
    own.close()
    return found


def test_twenty_steps_have_the_same_bits_on_any_number_of_ranks(world):
    """Fused and foreach AdamW, clipping and dropout, both numberings, against a single process."""
    if not powers(world):
        return
    expected = alone(world, lambda own: trained(own, stage=0))
    for options in ({"stage": 1}, {"stage": 3, "numbering": BLOCKED, "node_shared": False}):
        assert trained(world, **options) == expected, options


def trained_awkward(comm, numbering=INTERLEAVED, **options):
    """Return the bits after two steps in bf16: tied, frozen, unused, empty parameters and such of one element."""
    model = mz.shard(awkward_model(1), comm, units={Block}, exact=True, precision=BF16, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    norms = []
    for step in range(2):
        for micro in mz.micro_batches(model, tokens(1, step, M), M, numbering=numbering):
            token_loss(model, micro).backward()
        norms += [mz.grad_norm(model, order) for order in (1, 3, "inf")]
        norms.append(mz.clip_grad_norm_(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return bits([*norms, *mz.full_parameters(model).values()])


def test_bf16_has_the_same_bits_on_any_number_of_ranks(world):
    if not powers(world):
        return
    expected = alone(world, lambda own: trained_awkward(own, stage=0))
    for stage, numbering, shared in ((2, INTERLEAVED, None), (3, BLOCKED, False), (0, BLOCKED, None)):
        assert trained_awkward(world, numbering, stage=stage, node_shared=shared) == expected, (stage, numbering)


def norms_in_float64(comm, stage):
    """Return norms that are not rounded to fp32, which hides most differences of sums."""
    model = mz.shard(seeded(Dropping).double(), comm, stage=stage, units={Unit}, exact=True)
    rows = {key: value.double() for key, value in data(0).items()}
    for micro in mz.micro_batches(model, rows, M):
        loss_of(model, micro).backward()
    return [float(mz.grad_norm(model, order)) for order in (0.5, 1, 1.5, 2, 2.5, 3, "inf")]


def test_norms_are_exact_sums(world):
    if not powers(world):
        return
    expected = alone(world, lambda own: norms_in_float64(own, 0))
    assert norms_in_float64(world, 0) == norms_in_float64(world, 2) == expected


def test_groups_of_neighbours(world):
    """Hybrid sharding: groups of neighbours are subtrees, others are refused."""
    if world.size != 4:
        return
    expected = alone(world, lambda own: trained(own, stage=0, steps=2))
    near, far = world.split(world.rank // 2), world.split(world.rank % 2)
    for numbering in (INTERLEAVED, BLOCKED):
        assert trained(world, stage=3, steps=2, group=near, numbering=numbering) == expected
    with pytest.raises(ArgumentError, match=r"groups must be .* neighbouring ranks"):
        mz.shard(seeded(Net), world, stage=3, units={Unit}, group=far, exact=True)


MANY = 16


@cache
def plain_terms():
    """Return each micro-batch's gradients by plain torch."""
    model, found = seeded(Dropping), []
    rows = data(7, 2 * MANY)
    for number in range(MANY):
        seed = np.random.SeedSequence((11, 3, number)).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(seed))
        loss_of(model, {key: value[2 * number : 2 * number + 2] for key, value in rows.items()}).backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    return found


def gradients_of(world, numbering, order, loops=1, **options):
    """Return the whole gradients after one or more loops over micro-batches, by a step of length 1 from 0."""
    model = mz.shard(seeded(Dropping), world, units={Unit}, exact=True, **options)
    rows = {key: value.view(MANY, 2, -1)[order].flatten(0, 1) for key, value in data(7, 2 * MANY).items()}
    for _ in range(loops):
        for micro in mz.micro_batches(model, rows, MANY, numbering=numbering, seed=11, step=3):
            loss_of(model, micro).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return bits(mz.full_parameters(model).values())


@pytest.mark.parametrize("numbering", [INTERLEAVED, BLOCKED])
def test_gradients_are_the_tree_of_plain_torchs(world, numbering, monkeypatch):
    """The tree, made from plain torch's gradients by other code; a row of them summed in turn shows the difference."""
    if not powers(world):
        return
    terms, order = plain_terms(), list(range(MANY))
    sums = [pairwise(list(of_one), torch.add) / MANY for of_one in zip(*terms, strict=True)]
    for options in ({"stage": 0}, {"stage": 2}, {"stage": 3, "node_shared": False}):
        assert gradients_of(world, numbering, order, **options) == bits(sums), options
    assert gradients_of(world, numbering, order, loops=2, stage=2) == bits([total + total for total in sums])
    assert gradients_of(world, numbering, order[1:] + order[:1], stage=2) != bits(sums)
    if world.size == 8:  # a rank has two, whose order is the tree's in any case
        return

    def in_turn(self, term):
        self.held = [(1, self.end_with(term))]

    monkeypatch.setattr(exact_gradients.TreeSum, "add", in_turn)
    assert gradients_of(world, numbering, order, stage=2) != bits(sums)


def test_other_numbers_of_ranks(world):
    if powers(world):
        return
    with pytest.raises(
        ArgumentError, match=rf"number of ranks must be a power of two with exact=True \(got {world.size}"
    ):
        mz.shard(seeded(Net), world, exact=True)


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 5), norm

    def forward(self, x):
        return self.norm(self.linear(x))


def test_what_keeps_statistics_is_refused(world):
    """By name, when sharded and when put into train mode afterwards; in eval mode it may stay."""
    if not powers(world):
        return
    joined = mz.convert_sync_batchnorm(Normed(nn.BatchNorm1d(5)), world)
    for model in (
        joined.eval(),
        *(Normed(norm) for norm in (nn.BatchNorm1d(5), nn.InstanceNorm1d(5, track_running_stats=True))),
    ):
        with pytest.raises(ArgumentError, match=r"running statistics .*got 'norm \((Sync)?(Batch|Instance)Norm"):
            mz.shard(model, world, exact=True)
    mz.shard(Normed(nn.BatchNorm1d(5, track_running_stats=False)), world, exact=True)
    model = mz.shard(Normed(nn.BatchNorm1d(5).eval()), world, exact=True)
    for micro in mz.micro_batches(model, data(0), M):
        loss_of(model, micro).backward()
    model.train()
    with pytest.raises(ArgumentError, match=r"got 'norm \(BatchNorm1d\)'"):
        mz.micro_batches(model, data(0), M)


def test_options_that_do_not_go_together(world, monkeypatch):
    if not powers(world):
        return
    with pytest.raises(ArgumentError, match=r"Precision.reduce must be None with exact=True"):
        mz.shard(seeded(Net), world, exact=True, precision=mz.Precision(reduce=torch.bfloat16))
    model = seeded(Net)
    with pytest.raises(ArgumentError, match=r"ignored_params must be frozen .*'first.weight'"):
        mz.shard(model, world, exact=True, ignored_params=[model.first.weight])
    with pytest.raises(ArgumentError, match="sharded with exact=True"):
        mz.micro_batches(mz.shard(seeded(Net), world), data(0), M)
    if world.size > 1:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's own choice, which is left as it is
        torch.set_num_threads(1 + world.rank)
        with pytest.raises(ArgumentError, match="must be the same on all ranks"):
            mz.shard(seeded(Net), world, exact=True)
        torch.set_num_threads(1)


def test_numbers_that_do_not_fit(world):
    if not powers(world):
        return
    model = mz.shard(seeded(Net), world, exact=True)
    for total in (world.size + 1, 0):
        if total % world.size or not total:
            with pytest.raises(ArgumentError, match="num_micro_batches must be a multiple of the number of ranks"):
                mz.micro_batches(model, data(0), total)
    if world.size > 1:
        with pytest.raises(ArgumentError, match=f"must be {world.size} times a power of two with 'blocked'"):
            mz.micro_batches(model, data(0, 3 * world.size), 3 * world.size, numbering=BLOCKED)
        with pytest.raises(ArgumentError, match=r"batch and numbers of a step must be the same .*tensor 0 of batch"):
            mz.micro_batches(model, data(world.rank), M)
        with pytest.raises(ArgumentError, match=r"must be the same on all ranks \(got 'seed"):
            mz.micro_batches(model, data(0), M, seed=world.rank)
    for wrong in ({"numbering": "other"}, {"seed": -1}, {"step": -1}):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} must be"):
            mz.micro_batches(model, data(0), M, **wrong)
    for rows in ({"x": torch.ones(M + 1, 2)}, (torch.ones(M), torch.ones(2 * M)), torch.tensor(1.0), []):
        with pytest.raises(ArgumentError, match="batch must be tensors with equally many rows"):
            mz.micro_batches(model, rows, M)


def around(model, **options):
    """Run one step of a model in the right way."""
    for micro in mz.micro_batches(model, data(0), M, **options):
        loss_of(model, micro).backward()
    return bits([p.grad for p in model.parameters() if p.grad is not None])


def misused(model, numbering, misuse):
    """Run one step in which every micro-batch is treated as `misuse` does."""
    for micro in mz.micro_batches(model, data(0), M, numbering=numbering, step=0):
        misuse(model, micro)


def twice(model, micro):
    loss_of(model, micro).backward()
    loss_of(model, micro).backward()


def never(_, __):
    pass


def stepping(model, micro):
    loss_of(model, micro).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def clipping(model, micro):
    loss_of(model, micro).backward()
    mz.clip_grad_norm_(model, 1.0)


def penalised(model, micro):
    (loss_of(model, micro) + sum(p.square().sum() for p in model.parameters())).backward()


def threaded(model, micro):
    torch.set_num_threads(2)
    try:
        loss_of(model, micro).backward()
    finally:
        torch.set_num_threads(1)


def unsynced(model, micro):
    with mz.no_sync(model):
        loss_of(model, micro).backward()


def trying_again(model, micro):
    with pytest.raises(ZeroDivisionError):
        failing(model, micro)
    loss_of(model, micro).backward()


def failing(model, micro):
    output = model(micro["x"])
    output.register_hook(lambda _: 1 // 0)
    output.sum().backward()


ALWAYS = [
    (trying_again, "got one outside the loop"),
    (twice, "got a second one"),
    (never, "must have one backward"),
    (threaded, "number of torch's threads must stay 1"),
]
BEFORE_THE_LAST = [(stepping, "a step must follow"), (clipping, r"clipping must follow .* micro-batch 1 of")]


@pytest.mark.parametrize(("stage", "numbering"), [(0, BLOCKED), (3, INTERLEAVED)])
def test_misuse_inside_a_step(world, stage, numbering):
    """Each is refused on all ranks and gives the step up: the next one, of the same numbers, is as if it were first."""
    if not powers(world):
        return
    shared = False if stage else None
    model = mz.shard(seeded(Dropping), world, stage=stage, units={Unit}, exact=True, node_shared=shared)
    expected = around(model, numbering=numbering, step=0)
    model.zero_grad()
    misuses = [*ALWAYS, *(BEFORE_THE_LAST if world.size < M else [])]
    if numbering == INTERLEAVED:
        misuses.append((unsynced, "no_sync must be left to"))
    if stage and world.size > 1:  # elsewhere the model has no shards beside its parameters
        misuses.append((penalised, r"gradients of the shards of .* must be left alone"))
    for misuse, text in misuses:
        with pytest.raises(ShardError, match=text):
            misused(model, numbering, misuse)
        model.zero_grad()
        assert around(model, numbering=numbering, step=0) == expected, text
        model.zero_grad()
    with pytest.raises(ShardError, match="got one outside the loop"):
        loss_of(model, data(0)).backward()


def test_a_step_given_up(world):
    """Left by `break` and by another loop inside: no gradients, and the next step counts anew."""
    if not powers(world):
        return
    model = mz.shard(seeded(Dropping), world, stage=2, units={Unit}, exact=True)
    before = torch.get_rng_state()
    expected = around(model, step=0)
    assert torch.equal(torch.get_rng_state(), before)
    for param in model.parameters():
        param.grad = None
    for micro in mz.micro_batches(model, data(0), M, numbering=BLOCKED):
        loss_of(model, micro).backward()
        if world.size < M:
            break
    assert torch.equal(torch.get_rng_state(), before)
    if world.size < M:
        assert all(param.grad is None for param in model.parameters())
    for param in model.parameters():
        param.grad = None
    assert around(model, step=0) == expected
    loop = mz.micro_batches(model, data(0), M)
    next(loop)
    other = mz.micro_batches(model, data(0), M)
    with pytest.raises(ShardError, match="must end before the next one begins"):
        next(loop)
    other.close()


def test_random_numbers_follow_seed_step_and_micro_batch(world):
    """Dropout differs from step to step, from micro-batch to micro-batch and with the seed, and comes again."""
    if not powers(world):
        return
    model = mz.shard(seeded(Dropping), world, exact=True)
    drawn = {}
    for seed, step in ((0, None), (0, None), (1, 0), (0, 0), (0, 1)):
        mine = torch.zeros(M, 3)
        loop = mz.micro_batches(model, data(0), M, seed=seed, step=step)
        for number, micro in zip(range(world.rank, M, world.size), loop, strict=False):
            mine[number] = torch.rand(3)
            loss_of(model, micro).backward()
        drawn.setdefault((seed, step), []).append(mz.all_reduce(mine, world))
    first, second = drawn[0, None]
    assert torch.equal(first, drawn[0, 0][0])
    assert torch.equal(second, drawn[0, 1][0])
    rows = torch.cat([first, second, drawn[1, 0][0]])
    assert len(rows.unique(dim=0)) == 3 * M
    assert same_everywhere(world, rows)
