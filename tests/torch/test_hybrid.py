"""Hybrid sharding on real ranks: groups that hold the model once each, beside one process and beside plain sharding."""

import pytest
import torch
from helpers.small import BF16, Net, Unit, batch, close, joined, same_everywhere, seeded
from torch import nn

import mpizero as mz
from mpizero.errors import ArgumentError, ArgumentTypeError
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4), pytest.mark.filterwarnings("ignore:stage 3 with one unit")]


@pytest.fixture(scope="module")
def groups(world):
    """This rank's group of each kind: pairs of neighbours, and ranks that lie apart."""
    if world.size < 4 or world.size % 2:
        return {}
    return {"neighbours": world.split(world.rank // 2), "apart": world.split(world.rank % 2)}


def frozen(net):
    for unit in net.units:
        unit.linear.requires_grad_(requires_grad=False)
    return net


def accumulate(model, x_of, kept, micros):
    for micro in range(micros):
        if micro < kept:
            with mz.no_sync(model):
                model(x_of(micro)).float().square().mean().backward()
        else:
            model(x_of(micro)).float().square().mean().backward()


def trained(model, x_of, *, kept=0, micros=2, norm=None):
    """Return two steps' norms, the parameters at the end standing in the model."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)
    sharded, norms = hasattr(model, "_mpizero_runtime"), []
    for step in range(2):
        accumulate(model, lambda micro, step=step: x_of(2 * step + micro), kept if sharded else 0, micros)
        if norm is not None:
            clip = (
                mz.clip_grad_norm_
                if sharded
                else lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm)
            )
            norms.append(float(clip(model, norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def net(half):
    return frozen(seeded(Net)) if half else seeded(Net)


COVER = [(1, None, 0), (1, BF16, 1), (2, None, 1), (2, BF16, 0), (3, None, 0), (3, None, 1), (3, BF16, 0), (3, BF16, 1)]


@pytest.mark.parametrize(("stage", "precision", "kept"), COVER)
def test_as_one_process_and_as_plain_sharding(world, groups, stage, precision, kept):
    """Neighbours have the bits of plain sharding, whose order of sums is theirs; groups apart are close."""
    if not groups:
        return
    limit = 1e-5 if precision is None else 2e-2
    for half, norm, shared in ((False, 0.5, not kept), (True, None, bool(kept))):
        plain, found = net(half), {}
        expected = trained(plain, lambda step: joined(world, step), norm=norm)
        for kind, group in {None: None, **groups}.items():
            options = {"group": group, "node_shared": shared, "bucket_bytes": 1 if half else 1 << 20}
            model = mz.shard(net(half), world, stage=stage, units={Unit}, precision=precision, **options)
            assert (runtime_of(model).replicas is None) == (group is None)
            norms = trained(model, lambda step: batch(world.rank, step), kept=kept, norm=norm)
            found[kind] = mz.full_parameters(model), norms
            for name, value in found[kind][0].items():
                close(value, plain.get_parameter(name), limit)
            close(torch.tensor(norms), torch.tensor(expected), limit)
        for name, value in found["neighbours"][0].items():
            assert torch.equal(value, found[None][0][name]), name
        assert found["neighbours"][1] == found[None][1]


def test_each_group_holds_the_model_once(world, groups):
    """A rank's shards are those of its place in the group, and all replicas stay alike to the bit."""
    if not groups:
        return
    for group in groups.values():
        model = mz.shard(seeded(Net), world, units={Unit}, group=group, node_shared=False)
        total = sum(param.numel() for param in model.parameters())
        assert mz.all_reduce(torch.tensor([total]), group).item() == sum(p.numel() for p in seeded(Net).parameters())
        trained(model, lambda step: batch(world.rank, step))
        for value in mz.full_parameters(model).values():
            assert same_everywhere(world, value)


def test_all_start_from_rank_0(world, groups):
    """S3: rank 0 of all ranks, not of each group; buffers too."""
    for group in groups.values():
        for shared in (True, False):
            model = mz.shard(seeded(Net, world.rank), world, units={Unit}, group=group, node_shared=shared)
            expected = seeded(Net)
            for name, value in mz.full_parameters(model).items():
                assert torch.equal(value, expected.get_parameter(name))
            assert torch.equal(model.scale, expected.scale)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_axes_of_size_1(world, stage):
    """Groups of one rank are plain replication, one group of all is plain sharding: gradients are reduced once."""
    found = []
    for group in (None, world.split(world.rank), world.split(0)):
        model = mz.shard(seeded(Net), world, stage=stage, units={Unit}, group=group)
        assert runtime_of(model).replicas is None
        trained(model, lambda step: batch(world.rank, step))
        found.append(mz.full_parameters(model))
        if group is not None:
            group.close()
    for full in found[1:]:
        for name, value in full.items():
            assert torch.equal(value, found[0][name])


def test_the_node_is_the_group_of_hybrid_shard(world):
    model = mz.shard(seeded(Net), world, stage=mz.HYBRID_SHARD, units={Unit})
    assert runtime_of(model).ranks.group.size == world.node.size
    trained(model, lambda step: batch(world.rank, step))
    plain = seeded(Net)
    trained(plain, lambda step: joined(world, step))
    for name, value in mz.full_parameters(model).items():
        close(value, plain.get_parameter(name))


def test_what_is_no_group(world):
    """An error on all ranks, before anything is cut."""
    with pytest.raises(ArgumentTypeError, match=r"group must be an mpizero\.Communicator"):
        mz.shard(seeded(Net), world, group=2)
    if world.size < 3 or world.size % 2 == 0:
        return
    uneven = world.split(world.rank // 2)
    model = seeded(Net)
    with pytest.raises(
        ArgumentError, match=r"groups of equally many ranks, for hybrid sharding \(got 'groups of \[1, 2\]"
    ):
        mz.shard(model, world, group=uneven)
    uneven.close()
    mz.shard(model, world)  # as if nothing had been
