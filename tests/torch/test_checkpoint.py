"""Save at some number of ranks, load at another: parameters, moments and steps equal to the bit."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from helpers.checkpoints import (
    PRECISIONS,
    WAYS,
    differing,
    everything,
    job_of,
    make,
    shared_folder,
    train,
    wait_for_all,
)
from torch import nn

import mpizero as mz
from mpizero.testing.covering import covering
from mpizero.testing.models import awkward_model, token_loss, tokens

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4), pytest.mark.filterwarnings("ignore:stage 3 with one")]

AXES = {"saved": list(WAYS), "loaded": list(WAYS), "precision": ["fp32", "bf16"], "other": ["fp32", "bf16"]}
RANKS = (1, 2, 3, 4, 6)


def forward_sees(model, values):
    """Compare a loss with that of a plain model with the same values: full parameters have to follow the shards.

    `values` are those of `everything`, on rank 0 alone.
    """
    with torch.no_grad():
        found = float(token_loss(model, tokens(1, 0, 4)))
        if values:
            plain = awkward_model(1)
            for name, param in plain.named_parameters(remove_duplicate=False):
                param.copy_(values[f"parameter {name}"])
            for name, buffer in plain.named_buffers():
                buffer.copy_(values[f"buffer {name}"])
            assert found == pytest.approx(float(token_loss(plain, tokens(1, 0, 4))), rel=3e-3)


def moved(world, saving, loading, case):
    """Save at `saving` ranks, load at `loading`; return what differs, on ranks of both jobs."""
    before = after = None
    with shared_folder(world) as folder:
        job = job_of(world, saving)
        if job[0] is not None:
            model, optimizer = make(job, case["saved"], case["precision"])
            train(model, optimizer, job[0])
            before = everything(model, optimizer)
            mz.save(folder / "one", model, optimizer, extra={"step": 2})
        wait_for_all(world)
        job = job_of(world, loading)
        if job[0] is not None:
            model, optimizer = make(job, case["loaded"], case["other"], seed=9)
            assert mz.load(folder, model, optimizer) == {"step": 2}
            after = everything(model, optimizer)
            forward_sees(model, after)
            train(model, optimizer, job[0], steps=1, first=2)
        wait_for_all(world)
    return [] if before is None or after is None else differing(before, after)


def cases(saving, loading, strength):
    hybrid = {ranks: ranks in {4, 6} for ranks in (saving, loading)}
    found = covering(AXES, strength)
    return [
        {**case, **{side: "3" for side, ranks in (("saved", saving), ("loaded", loading))
                    if case[side] == "hybrid" and not hybrid[ranks]}}
        for case in found
    ]  # fmt: skip


@pytest.mark.timeout_s(120)
def test_any_ranks_to_any_ranks(world):
    """Case C1: between this number of ranks and each smaller one, both ways, a few of the ways in turn."""
    size = world.size
    pairs = dict.fromkeys([(size, other) for other in range(1, size + 1)] + [(other, size) for other in range(1, size)])
    for number, (saving, loading) in enumerate(pairs):
        few = cases(saving, loading, 2)
        for case in few[number::18]:
            assert moved(world, saving, loading, case) == [], case


def saved_each_way(world, saving, folder):
    """Save at `saving` ranks in each way and precision; return the values, by way and precision, on rank 0."""
    job, found = job_of(world, saving), {}
    for seed, (way, precision) in enumerate(product(ways_at(saving), PRECISIONS)):
        if job[0] is not None:
            model, optimizer = make(job, way, precision, seed=seed)
            train(model, optimizer, job[0], first=seed)
            found[way, precision] = everything(model, optimizer)
            mz.save(folder / f"{way}-{precision}", model, optimizer, extra={"seed": seed})
    wait_for_all(world)
    return found


def ways_at(ranks):
    return [way for way in WAYS if way != "hybrid" or ranks in {4, 6}]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("saving", RANKS)
@pytest.mark.parametrize("loading", RANKS)
def test_any_ranks_to_any_ranks_in_full(world, saving, loading):
    """Case C1, the whole product: what each way and precision has saved is loaded in each, one after the other."""
    most = max(saving, loading)
    if world.size not in {most, most + most // 6}:  # six of seven too, a number of ranks that is tested anyway
        pytest.skip(f"runs in {most} ranks")
    with shared_folder(world) as folder:
        before = saved_each_way(world, saving, folder)
        job = job_of(world, loading)
        for way, precision in product(ways_at(loading), PRECISIONS):
            model = None if job[0] is None else make(job, way, precision, seed=99)[0]
            for seed, name in enumerate(product(ways_at(saving), PRECISIONS)):
                if model is None:
                    continue
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
                assert mz.load(folder / "-".join(name), model, optimizer) == {"seed": seed}
                after = everything(model, optimizer)
                assert differing(before.get(name, after), after) == [], (name, way, precision)
                forward_sees(model, after)
            if model is not None:
                train(model, optimizer, job[0], steps=1, first=2)
            wait_for_all(world)


class Permuted(nn.Module):
    """The same names in another order, and in other units."""

    def __init__(self, names):
        super().__init__()
        for name, shape in names:
            self.register_parameter(name, nn.Parameter(torch.rand(shape)))

    def forward(self, x):
        return sum((param * x).sum() for param in self.parameters())


SHAPES = [("a", (70, 3)), ("b", (1,)), ("c", (5, 40)), ("d", ()), ("e", (0,)), ("f", (130,))]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "NAdam", "Adagrad", "ASGD", "Rprop", "RMSprop"])
def test_parameters_in_another_order(world, optimizer):
    """Case C4: mapped by name, with each optimizer's own states; group options come along."""
    kind = getattr(torch.optim, optimizer)
    more = {"momentum": 0.9} if optimizer == "SGD" else {}
    with shared_folder(world) as folder:
        model = mz.shard(Permuted(SHAPES), world)
        named = dict(model.named_parameters())
        optim = kind(
            [{"params": [named["a"], named["d"]], "lr": 0.5}, {"params": [named[n] for n in "bcef"]}], lr=0.1, **more
        )
        for step in range(2):
            model(torch.tensor(step + 1.0)).backward()
            optim.step()
        before = everything(model, optim)
        mz.save(folder / "one", model, optim)
        other = mz.shard(Permuted(SHAPES[::-1]), world, stage=2)
        named = dict(other.named_parameters())
        optim = kind([{"params": [named[n] for n in "fecb"]}, {"params": [named["d"], named["a"]]}], lr=0.3, **more)
        mz.load(folder / "one", other, optim)
        assert differing(before, everything(other, optim)) == []
        assert [group["lr"] for group in optim.param_groups] == [0.1, 0.5]


def test_scalars_alone(world):
    """The moments of a scalar parameter are elements, its steps are not."""
    with shared_folder(world) as folder:
        model = mz.shard(Permuted([("d", ()), ("g", ())]), world)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor(2.0)).backward()
        optimizer.step()
        mz.save(folder / "one", model, optimizer)
        other = mz.shard(Permuted([("g", ()), ("d", ())]), world)
        second = torch.optim.AdamW(other.parameters())
        mz.load(folder / "one", other, second)
        assert differing(everything(model, optimizer), everything(other, second)) == []


def test_extra_and_generators(world):
    """Schedulers, scalers, tensors and odd values come back as they were; generators go on where they stood."""
    with shared_folder(world) as folder:
        model, optimizer = make((world, None), "3")
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
        train(model, optimizer, world, 1)
        scheduler.step()
        scaler = mz.GradScaler(init_scale=8.0)
        extra = {
            "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), 3: (1, {2}, b"x", None, float("inf")),
            "order": torch.randperm(7, generator=torch.Generator().manual_seed(1)), "array": np.arange(6).reshape(2, 3),
            "half": torch.tensor(1.5, dtype=torch.bfloat16), "$odd": [True],
        }  # fmt: skip
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        np.random.seed(world.rank)  # noqa: NPY002
        mz.save(folder / "one", model, optimizer, extra=extra)
        drawn = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        found = mz.load(folder / "one", model, optimizer)
        assert torch.equal(torch.rand(3), drawn[0])
        assert (random.random(), np.random.rand()) == drawn[1:]  # noqa: NPY002
        assert found.keys() == extra.keys()
        for key in ("order", "half"):
            assert torch.equal(found[key], extra[key])
            assert found[key].dtype == extra[key].dtype
        assert np.array_equal(found["array"], extra["array"])
        for key in ("scaler", 3, "$odd", "scheduler"):
            assert found[key] == extra[key]
        scheduler.load_state_dict(found["scheduler"])
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_generators_on_another_number_of_ranks(world):
    """Seeded from what was saved, each rank otherwise, the same each time."""
    with shared_folder(world) as folder:
        job = job_of(world, 1)
        if job[0] is not None:
            mz.save(folder / "one", make(job, "0")[0])
        world.mpi.Barrier()
        model, drawn = make((world, None), "3")[0], []
        for _ in range(2):
            mz.load(folder / "one", model)
            drawn.append(float(torch.rand(())))
            torch.manual_seed(5)
        assert drawn[0] == drawn[1]
        assert len(set(world.mpi.allgather(drawn[0]))) == world.size


def test_ties_and_frozen(world):
    """Case C7: ties are stored once and known; a model without the tie takes the value under both names."""
    with shared_folder(world) as folder:
        model, _ = make((world, None), "3")
        before = mz.full_parameters(model)
        mz.save(folder / "one", model)

        def untied(seed):
            other = awkward_model(seed)
            other.head.weight = nn.Parameter(torch.zeros_like(other.head.weight))
            return other

        apart, _ = make((world, None), "2", model=untied, seed=4)
        mz.load(folder / "one", apart)
        after = mz.full_parameters(apart)
        assert differing(before, after) == []
        mz.save(folder / "two", apart)
        mz.load(folder / "two", model)
        assert differing(before, mz.full_parameters(model)) == []
        with torch.no_grad():
            dict(apart.named_parameters())["head.weight"].add_(1.0)
        mz.save(folder / "two", apart)
        with pytest.raises(mz.CheckpointError, match=r"embedding.weight, head.weight must have been saved alike"):
            mz.load(folder / "two", model)


def test_keys_are_the_plain_model_s(world):
    """Case C6, and C8: no padding, no more than the elements."""
    with shared_folder(world) as folder:
        model, _ = make((world, None), "3")
        keys = set(awkward_model(0).state_dict())
        mz.save(folder / "one", model, generators=False)
        from mpizero.checkpoint.folder import read_manifest

        manifest = read_manifest(folder / "one")
        assert {key.removeprefix("model/") for key in manifest.tensors} | set(manifest.ties) == keys
        elements = sum(tensor.numel() for tensor in awkward_model(0).parameters()) + 24
        assert sum(one.numel for one in manifest.tensors.values()) == elements
        overhead = sum(one.nbytes for one in manifest.files) - 4 * elements
        assert 0 < overhead < world.size * 12000
        shares = [one.nbytes for one in manifest.files]
        assert max(shares) - min(shares) < 4 * 64 * 4 + 4000


def test_a_state_dict_is_whole_or_refused(world):
    """Case C5."""
    model, _ = make((world, None), "3")
    if world.size > 1:
        with pytest.raises(mz.ShardError, match=r"with mpizero.unsharded"):
            model.state_dict()
        with pytest.raises(mz.ShardError, match=r"load before mpizero.shard"):
            model.load_state_dict(awkward_model(1).state_dict())
    with mz.unsharded(model):
        state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in awkward_model(0).state_dict().items()
    }
