"""State and parameters of a model in device memory, moved to the host or a disk: the bits of a run without.

The device is played by the host, as in test_gpu_shard.py: its copies are late.
"""

from contextlib import nullcontext

import pytest
import torch
from helpers.offloading import SMALL, assert_equal, built, sharded, train
from helpers.small import BF16

import mpizero as mz
from mpizero.errors import DeviceMemoryError
from mpizero.shard.source import Source
from mpizero.shard.transfers import AT_ONCE, Transfers
from mpizero.testing.covering import covering
from mpizero.testing.host_runtime import OUT_OF_MEMORY, HostRuntime, HostRuntimeError, stand_in

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

AXES = {
    "stage": (3, 2, 1),
    "places": (("cpu", None), ("cpu", "cpu"), ("disk", "cpu"), ("cpu", "disk"), ("disk", "disk"), ("disk", None)),
    "precision": (None, BF16),
    "optimizer": ("AdamW fused", "SGD"),
    "clip": (False, True),
    "pin": (True, False),
    "during_backward": (False, True),
}


@pytest.fixture
def played(world):
    """The runtime of a device that the host plays, and a communicator for it."""
    runtime, comm = HostRuntime(world.rank), mz.Communicator(world.mpi)
    with stand_in(runtime):
        yield runtime, comm
    comm.close()


def places(folder, optimizer, params, **options):
    real = {"disk": folder}
    return mz.Offload(optimizer=real.get(optimizer, optimizer), params=real.get(params, params), **options)


@pytest.mark.parametrize("case", covering(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_the_bits_of_a_run_in_device_memory(played, tmp_path, case):
    _, comm = played
    optimizer, params = case["places"]
    offload = places(tmp_path, optimizer, params if case["stage"] == 3 else None, pin=case["pin"], group_bytes=SMALL)
    early = case["during_backward"] and not case["clip"]
    options = {"stage": case["stage"], "precision": case["precision"]}
    plain, ours = sharded(comm, **options), sharded(comm, offload, **options)
    more = {"during_backward": True} if early else {}
    optimizers = [
        built(plain, case["optimizer"], offloaded=False),
        built(ours, case["optimizer"], offloaded=True, **more),
    ]
    for model, its in zip((plain, ours), optimizers, strict=True):
        train(model, its, comm, 3, clip=case["clip"])
    assert_equal(plain, optimizers[0], ours, optimizers[1])


@pytest.mark.slow
@pytest.mark.parametrize("clip", AXES["clip"])
@pytest.mark.parametrize("precision", AXES["precision"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "case", [(stage, where) for stage in AXES["stage"] for where in AXES["places"] if stage == 3 or where[1] is None]
)
def test_the_bits_after_twenty_steps(played, tmp_path, case, precision, clip):
    (_, comm), (stage, where) = played, case
    offload = places(tmp_path, *where, group_bytes=SMALL)
    plain, ours = (sharded(comm, one, stage=stage, precision=precision) for one in (None, offload))
    optimizers = [built(plain, "AdamW fused", offloaded=False), built(ours, "AdamW fused", offloaded=True)]
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        train(model, optimizer, comm, 20, clip=clip)
    assert_equal(plain, optimizers[0], ours, optimizers[1])


@pytest.mark.parametrize(("stage", "precision"), [(3, BF16), (2, None)], ids=["3-bf16", "2-fp32"])
@pytest.mark.parametrize("kept", [True, False])
def test_several_backwards_of_a_step(played, stage, precision, kept):
    """Kept back by `no_sync`, or added to gradients that have come down before; a unit unused in one of them."""
    _, comm = played
    options = {"stage": stage, "precision": precision}
    models = sharded(comm, **options), sharded(comm, mz.Offload(params="cpu" if stage == 3 else None), **options)
    optimizers = [built(model, "AdamW fused", offloaded=at == 1) for at, model in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(4):
            x = torch.full((3, 5), number + 1.0 + comm.rank)
            with mz.no_sync(model) if kept else nullcontext():
                model(x).float().sum().backward()
            model[0].bias.requires_grad_(number != 2)
            model(x * x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(models[0], optimizers[0], models[1], optimizers[1])


def test_exact_sums(played):
    _, comm = played
    data = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    models = [sharded(comm, offload, stage=3, exact=True) for offload in (None, mz.Offload(params="cpu"))]
    optimizers = [built(model, "AdamW fused", offloaded=at == 1) for at, model in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            for micro in mz.micro_batches(model, data, 2 * comm.size):
                model(micro).sum().backward()
            mz.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(models[0], optimizers[0], models[1], optimizers[1])


def test_checkpoints_go_from_and_to_the_host(played, tmp_path_factory):
    _, comm = played
    folder = comm.mpi.bcast(str(tmp_path_factory.mktemp("checkpoint")))
    away = sharded(comm, mz.Offload(params="cpu"), stage=3, precision=BF16)
    optimizer = mz.offloaded(torch.optim.AdamW, away, lr=1e-2)
    train(away, optimizer, comm, 2)
    mz.save(folder, away, optimizer)
    near, back = sharded(comm, stage=1, precision=BF16), sharded(comm, mz.Offload(), stage=2, precision=BF16)
    its = torch.optim.AdamW(near.parameters(), lr=1e-2), mz.offloaded(torch.optim.AdamW, back, lr=1e-2)
    for model, one in ((near, its[0]), (back, its[1])):
        mz.load(folder, model, one)
    for model, one in ((near, its[0]), (back, its[1]), (away, optimizer)):
        train(model, one, comm, 2, seed=1)
    for model in (back, away):
        found, expected = mz.full_parameters(model), mz.full_parameters(near)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.sizes(1)
@pytest.mark.parametrize("kind", ["working", "parked"])
def test_host_memory_is_written_again_only_when_it_was_copied_from(world, kind):
    runtime = HostRuntime(restless=0)
    with stand_in(runtime) as device:
        source = Source(torch.ones(5), None, Transfers(device, pin=True))
        setattr(source, kind, torch.zeros(5, dtype=torch.bfloat16))
        seen = []
        for value in (2, 3):
            source.master.fill_(value)
            target = torch.zeros(5, dtype=torch.bfloat16)
            with source.aside():
                source.fill(target)
            seen.append(target)
        source.follow()
    assert [target.tolist() for target in seen] == [[2] * 5, [3] * 5]


@pytest.mark.sizes(1)
def test_parameters_are_let_go_on_one_rank_too(played):
    _, comm = played
    model = sharded(comm, mz.Offload(params="cpu"), stage=3)
    train(model, torch.optim.AdamW(model.parameters()), comm, 2)
    assert sum(flat.full.untyped_storage().nbytes() for flat in mz.shard.runtime_of(model).flats) == 0


@pytest.mark.sizes(1)
def test_gradients_come_down_through_few_pieces_of_memory(world):
    runtime = HostRuntime(restless=0)
    arrived = []
    with stand_in(runtime) as device:
        transfers = Transfers(device, pin=True)
        for value in range(3 * AT_ONCE):
            transfers.bring_down(torch.full((5,), float(value)), lambda copy: arrived.append(copy[0].item()))
        transfers.settle()
        assert arrived == list(range(3 * AT_ONCE))
        assert len(runtime._pinned) <= AT_ONCE
        transfers.bring_down(torch.ones(5), lambda copy: copy.view(7))
        with pytest.raises(RuntimeError, match="shape"):
            transfers.settle()


@pytest.mark.sizes(1)
def test_memory_that_cannot_be_page_locked(played, monkeypatch):
    runtime, comm = played

    def refuse(*_):
        raise HostRuntimeError(OUT_OF_MEMORY, "cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(runtime, "hostAlloc", refuse)
    with pytest.raises(DeviceMemoryError, match=r"the host must have [\d,]+ bytes of page-locked .* pass .*pin=False"):
        sharded(comm, mz.Offload(), stage=2)
