"""Ways to use a sharded model that plain torch has or users try, by case where there is one, on real ranks."""

import copy

import pytest
import torch
from helpers.small import BF16, STAGES, Net, Unit, batch, close, joined, same_everywhere, seeded, train
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError, CollectiveTimeoutError, ShardError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 3), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]

each_stage = pytest.mark.parametrize("stage", STAGES)


@each_stage
def test_a_method_other_than_forward(world, stage):
    """S18: a plain error, or, where the values are whole and no gradient is taken, the right result."""
    model, plain = mz.shard(seeded(Net), world, stage=stage, units={Unit}), seeded(Net)
    if world.size > 1:
        with pytest.raises(ShardError, match=r"'first.weight' must be gathered before linear"):
            model.encode(batch(0))
    if world.size == 1 or stage == 0:
        with torch.no_grad():
            close(model.encode(batch(0)), plain.encode(batch(0)))
    with mz.unsharded(model):
        close(model.encode(batch(0)), plain.encode(batch(0)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_handle_shows_and_hides(world, stage):
    """S18: shapes and gradients may be looked at; values, by whatever way, may not be computed with."""
    if world.size == 1:
        return
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    model(batch(world.rank)).sum().backward()
    shard = dict(model.named_parameters())["first.weight"]
    handle = model.first.weight
    assert handle.shape == shard.shape
    assert handle.grad is shard.grad
    assert "'first.weight', this rank's shard" in repr(handle)
    for use in (
        lambda: handle.data + 1,
        lambda: handle.T,
        lambda: handle * 2,
        handle.detach,
        lambda: torch.zeros_like(handle),
        handle.numpy,
        handle.tolist,
        lambda: copy.deepcopy(handle),
        lambda: setattr(handle, "data", torch.zeros(1)),
        lambda: nn.init.zeros_(handle),
    ):
        with pytest.raises(ShardError, match=r"first\.weight"):
            use()
    handle.grad = None
    assert shard.grad is None
    with pytest.raises(ShardError, match="cannot be copied or pickled"):
        copy.deepcopy(model)


@each_stage
def test_optimizer_built_before_shard(world, stage):
    """S19: an error that says to build it after; so for one built from attributes."""
    model = seeded(Net)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    mz.shard(model, world, stage=stage, units={Unit})
    model(batch(world.rank)).sum().backward()
    with pytest.raises(ShardError, match=r"must be built after mpizero.shard.*'first.weight'"):
        before.step()
    if world.size > 1:
        with pytest.raises(ShardError, match="must be built after"):
            torch.optim.SGD([model.first.weight], lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


class Muonish(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim == 2:
                    with torch.no_grad():
                        param.sub_(torch.linalg.svd(param.grad, full_matrices=False)[0] @ param.grad.T @ param)


MATRIX_OPTIMIZERS = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Muonish": Muonish,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=2),
}


@each_stage
@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_optimizers_that_need_whole_matrices(world, stage, name):
    """S22: refused, but where nothing is cut."""
    model = mz.shard(seeded(lambda: nn.Linear(8, 8)), world, stage=stage)
    optimizer = MATRIX_OPTIMIZERS[name](model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(batch(world.rank, width=8)).square().mean()
        loss.backward()
        return loss

    closure()
    arguments = [closure] if name == "LBFGS" else []
    if stage > 0 and world.size > 1:
        with pytest.raises(ShardError, match=f"element-wise.*{name}"):
            optimizer.step(*arguments)
        return
    optimizer.step(*arguments)
    for value in mz.full_parameters(model).values():
        if name != "LBFGS":
            assert same_everywhere(world, value)


@each_stage
def test_an_element_wise_optimizer_of_the_users(world, stage):
    @mz.elementwise
    class Plain(Muonish):
        def step(self, closure=None):  # noqa: ARG002
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.sub_(0.1 * param.grad)

    model, plain = mz.shard(seeded(Net), world, stage=stage, units={Unit}), seeded(Net)
    for m, x in ((plain, joined(world)), (model, batch(world.rank))):
        m(x).square().mean().backward()
        Plain(m.parameters()).step()
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@each_stage
def test_a_step_after_only_no_sync(world, stage):
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mz.no_sync(model):
        model(batch(world.rank)).sum().backward()
    with pytest.raises(ShardError, match="must follow a backward outside no_sync"):
        optimizer.step()
    with pytest.raises(ShardError, match="must follow a backward outside no_sync"):
        mz.clip_grad_norm_(model, 1.0)
    optimizer.zero_grad()
    model(batch(world.rank)).sum().backward()
    optimizer.step()


def test_torch_clipping_is_refused(world):
    """S23: never the norm of one rank's shards."""
    for stage in (1, 2, 3):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
        model(batch(world.rank)).sum().backward()
        if world.size == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            continue
        for clip in (nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_):
            with pytest.raises(ShardError, match=r"must be clipped by mpizero.clip_grad_norm_"):
                clip(model.parameters(), 1.0)
        with pytest.raises(ShardError, match=r"must be clipped by mpizero.clip_grad_norm_"):
            nn.utils.clip_grad_norm_([next(model.parameters())], 1.0)
    plain = seeded(Net)
    plain(batch(0)).sum().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_on_rank_0_alone_times_out(world, stage):
    """S23: the others never come: an error by time-out that names the remedy."""
    model = mz.shard(seeded(Net), mz.Communicator(world.mpi, timeout=1), stage=stage, units={Unit})
    if world.size == 1:
        return
    if world.rank == 0:
        with torch.no_grad(), pytest.raises(CollectiveTimeoutError, match=r"with mpizero.unsharded\(model\)"):
            model(batch(0))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_on_rank_0_alone_meets_another_call(world, stage):
    """S23: the others go on training: an error on every rank that says what each one called."""
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    if world.size == 1:
        return
    model.train(world.rank != 0)
    with pytest.raises(ShardError, match=r"rank 0: forward of 'Net' in eval mode.*rank 1: forward of 'Net' in train"):
        model(batch(0))
    model.train()
    train(model, lambda step: batch(world.rank, step))


CALLS = {
    "full_parameters": mz.full_parameters,
    "unsharded": lambda model: mz.unsharded(model).__enter__(),
    "clip_grad_norm_": lambda model: mz.clip_grad_norm_(model, 1.0),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shared", [None, False])
def test_the_full_state_on_rank_0_alone(world, call, shared):
    """S9: at once an error on every rank that says who called what; then all go on, in whatever order they like."""
    if world.size == 1:
        return
    for stage in (1, 2, 3):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=shared)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(world.rank)).square().mean().backward()
        with pytest.raises(ShardError, match=rf"rank 0: {call}; rank 1: forward of 'Net'"):
            CALLS[call](model) if world.rank == 0 else model(batch(world.rank))
        optimizer.step()
        optimizer.zero_grad()
        train(model, lambda step: batch(world.rank, step))
        for value in mz.full_parameters(model).values():
            assert same_everywhere(world, value)


@each_stage
def test_evaluation_on_rank_0_alone_inside_unsharded(world, stage):
    """S23: the right way."""
    model, plain = mz.shard(seeded(Net), world, stage=stage, units={Unit}), seeded(Net)
    for m, x in ((plain, joined(world)), (model, batch(world.rank))):
        m(x).square().mean().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    with mz.unsharded(model):
        if world.rank == 0:
            close(model(batch(5)), plain(batch(5)))  # with a graph that no backward will use
    model.zero_grad()
    plain.zero_grad()
    train(model, lambda step: batch(world.rank, step))
    train(plain, lambda step: joined(world, step))
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@each_stage
@pytest.mark.parametrize("change", ["write", "step"])
def test_a_parameter_changed_between_forward_and_backward(world, stage, change):
    """S23: raises, as plain torch does; never a gradient at other values than the loss."""
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(world.rank)).square().mean().backward()
    loss = model(batch(world.rank)).square().mean()
    if change == "step":
        optimizer.step()
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
    with pytest.raises(ShardError, match="must be left alone between forward and backward"):
        loss.backward()
    optimizer.zero_grad()
    train(model, lambda step: batch(world.rank, step))


@each_stage
def test_writes_in_place_between_steps_are_seen(world, stage):
    model, plain = mz.shard(seeded(Net), world, stage=stage, units={Unit}), seeded(Net)
    train(model, lambda _: batch(0))
    with torch.no_grad():
        for m in (model, plain):
            for param in m.parameters():
                param.fill_(0.25)
        close(model(batch(1)), plain(batch(1)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dict_outside_unsharded(world, stage):
    """C5, C6: a refusal that names the right call; inside, whole tensors under the keys from before."""
    plain = seeded(Net)
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    if world.size > 1:
        with pytest.raises(ShardError, match=r"state_dict .*with mpizero.unsharded\(model\)"):
            model.state_dict()
        with pytest.raises(ShardError, match=r"state_dict .*with mpizero.unsharded\(model\)"):
            model.units[0].state_dict()
        with pytest.raises(ShardError, match=r"load_state_dict .*load before mpizero.shard"):
            model.load_state_dict(plain.state_dict())
    with mz.unsharded(model):
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value)


@each_stage
def test_forward_without_grad(world, stage):
    """In eval and in train mode, under no_grad and inference_mode, between steps."""
    model, plain = mz.shard(seeded(Net), world, stage=stage, units={Unit}), seeded(Net)
    for step, guard in enumerate((torch.no_grad, torch.inference_mode, torch.enable_grad)):
        for m in (model, plain):
            m.eval()
        with guard():
            close(model(batch(9)), plain(batch(9)))
        for m in (model, plain):
            m.train()
        train(plain, lambda _, step=step: joined(world, step), steps=1)
        train(model, lambda _, step=step: batch(world.rank, step), steps=1)


@each_stage
def test_two_models_at_once(world, stage):
    """Two sharded models, one optimizer over both, the second fed by the first."""

    def both(m1, m2, x):
        optimizer = torch.optim.SGD([*m1.parameters(), *m2.parameters()], lr=0.1)
        for _ in range(2):
            m2(torch.nn.functional.pad(m1(x), (0, 2))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = [seeded(Net, seed) for seed in (0, 1)]
    model = [mz.shard(seeded(Net, seed), world, stage=stage, units={Unit}) for seed in (0, 1)]
    both(*plain, joined(world))
    both(*model, batch(world.rank))
    for m, p in zip(model, plain, strict=True):
        for name, value in mz.full_parameters(m).items():
            close(value, p.get_parameter(name))


def test_precision_keeps_integer_and_mixed_parameters(world):
    """Parameters of several dtypes in one unit, and one that is no float."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(7, 7, dtype=torch.bfloat16), nn.Linear(7, 7, dtype=torch.float64)
            self.index = nn.Parameter(torch.arange(7).flip(0), requires_grad=False)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).double())[:, self.index]

    results = []
    for stage in STAGES:
        model = train(mz.shard(seeded(Mixed), world, stage=stage), lambda step: batch(world.rank, step))
        results.append(mz.full_parameters(model))
        assert torch.equal(results[-1]["index"], torch.arange(7).flip(0))
        assert [value.dtype for value in results[-1].values()] == [torch.int64] + [torch.float32] * 2 + [
            torch.float64
        ] * 2
        for name, value in results[-1].items():
            assert torch.equal(value, results[0][name])


@each_stage
def test_unfrozen_and_frozen_after_shard(world, stage):
    """S14: half of the model trains first, then the other half; what was frozen is exact, nothing else is lost."""
    plain, model = seeded(Net), mz.shard(seeded(Net), world, stage=stage, units={Unit})
    for m, x_of in ((plain, lambda step: joined(world, step)), (model, lambda step: batch(world.rank, step))):
        for inside in (True, False, None):
            for name, param in m.named_parameters():
                param.requires_grad_(inside is None or name.startswith("units") == inside)
            before = [param.detach().clone() for param in m.parameters()]
            train(m, x_of)
            for param, value in zip(m.parameters(), before, strict=True):
                assert param.numel() == 0 or torch.equal(param, value) != param.requires_grad
                assert param.requires_grad or param.grad is None
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


@pytest.mark.parametrize("stage", [1, 3])
def test_requires_grad_that_differs_between_ranks(world, stage):
    """S14: refused on every rank, whoever changed it."""
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    if world.size == 1:
        return
    if world.rank == world.size - 1:
        model.first.weight.requires_grad_(requires_grad=False)
    with pytest.raises(ArgumentError, match=r"requires_grad of first\.weight is"):
        model(batch(world.rank))
    model.first.weight.requires_grad = True
    train(model, lambda step: batch(world.rank, step))


@each_stage
def test_parameters_given_other_memory_after_shard(world, stage):
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    model.to(torch.float64)
    with pytest.raises(ShardError, match="must keep their memory and dtype"):
        model(batch(world.rank))


def test_models_that_differ_between_ranks(world):
    """Shapes, names and options are compared before anything is sent."""
    if world.size == 1:
        return
    with pytest.raises(ArgumentError, match="the same on all ranks"):
        mz.shard(nn.Linear(3, 4 + world.rank), world)
    with pytest.raises(ArgumentError, match="the same on all ranks"):
        mz.shard(seeded(Net), world, units={Unit}, precision=BF16 if world.rank else None)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changes_inside_unsharded_or_forward(world, stage):
    """S23: full parameters are for reading: a change in place raises, since shards would not see it."""

    class Writing(Net):
        def forward(self, x):
            with torch.no_grad():
                self.last.weight.mul_(2)
            return super().forward(x)

    if world.size == 1:
        return
    model = mz.shard(seeded(Net), world, stage=stage, units={Unit})
    with pytest.raises(ShardError, match="must be left alone inside unsharded"), mz.unsharded(model), torch.no_grad():
        model.first.weight.zero_()
    writing = mz.shard(seeded(Writing), world, stage=stage, units={Unit})
    with pytest.raises(ShardError, match="must be left alone inside forward"):
        writing(batch(world.rank))


def test_a_step_inside_unsharded(world):
    model = mz.shard(seeded(Net), world, units={Unit})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(world.rank)).sum().backward()
    with mz.unsharded(model), pytest.raises(ShardError, match=r"must step outside mpizero.unsharded"):
        optimizer.step()
    optimizer.step()


def test_second_derivatives(world):
    """A gradient penalty: refused at stage 3, right below."""

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    plain = seeded(Net)
    penalty(plain, joined(world)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for stage in STAGES:
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, node_shared=False)
        if stage == 3 and world.size > 1:
            with pytest.raises(ShardError, match="second derivatives"):
                penalty(model, batch(world.rank)).backward()
            continue
        penalty(model, batch(world.rank)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name, value in mz.full_parameters(model).items():
            close(value, plain.get_parameter(name))


BAD = [
    ({"stage": 4}, ArgumentError, "stage must be one of 0, 1, 2, 3"),
    ({"units": {nn.Conv2d}}, ArgumentError, r"match some module \(.*LayerNorm.*Unit"),
    ({"units": {"Unit"}}, ArgumentTypeError, r"the model has .*Unit"),
    ({"units": 3}, ArgumentTypeError, r"the model has .*Unit"),
    ({"units": {nn.ModuleList}}, ArgumentError, r"a forward of their own .*'units'"),
    ({"precision": "bf16"}, ArgumentTypeError, r"precision must be an mpizero.Precision .*Precision\(param="),
]


@pytest.mark.parametrize(("options", "kind", "text"), BAD)
def test_unknown_options_name_the_known_ones(world, options, kind, text):
    with pytest.raises(kind, match=text):
        mz.shard(seeded(Net), world, **options)


def test_other_mistakes(world):
    with pytest.raises(ArgumentError, match=r"Precision.param must be .*torch.bfloat16"):
        mz.Precision(param=torch.int8)
    with pytest.raises(ArgumentTypeError, match=r"model must be a torch.nn.Module"):
        mz.shard("model", world)
    with pytest.raises(ShardError, match=r"mpizero.shard was called on"):
        mz.clip_grad_norm_(nn.Linear(2, 2), 1.0)
    model = mz.shard(seeded(Net), world, units={Unit})
    for again in (model, nn.Sequential(model), model.units[0]):
        with pytest.raises(ArgumentError, match="not sharded yet"):
            mz.shard(again, world)
    with pytest.raises(ArgumentError, match="max_norm must be positive"):
        mz.clip_grad_norm_(model, 0)
