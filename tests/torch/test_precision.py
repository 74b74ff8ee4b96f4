"""Precisions of results, buffers and kept modules, and autocast around a sharded model."""

import pytest
import torch
from helpers.small import Net, Unit, batch, close, joined, seeded
from torch import nn

import mpizero as mz
from mpizero.shard import runtime_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

PLACES = [(0, None), (1, None), (2, False), (3, None), (3, False)]
"""Stages, and whether a node shares the parameters."""


def trained(world, stage, node_shared, precision=None, *, cast=False):
    """Train two steps; return the model, its result and the whole parameters."""
    model = mz.shard(
        seeded(Net), world, stage=stage, units={Unit}, node_shared=node_shared, precision=precision or mz.Precision()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            result = model(batch(world.rank, step))
        result.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, result.detach(), mz.full_parameters(model)


def all_equal(found):
    _, result, full = found[0]
    for _, other, parameters in found[1:]:
        assert torch.equal(other, result)
        for name, value in full.items():
            assert torch.equal(parameters[name], value), name


def plain(world, steps=2):
    """Return the parameters of the same training in one process, in fp32."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model(joined(world, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_kept_modules(world):
    """Norms compute in fp32 inside a bf16 model, at every stage the same bits; near to plain fp32."""
    precision = mz.Precision(param=torch.bfloat16, keep_fp32={nn.LayerNorm})
    found, expected = [trained(world, *place, precision) for place in PLACES], plain(world)
    all_equal(found)
    for model, result, full in found:
        assert result.dtype is torch.bfloat16
        for flat in runtime_of(model).flats:
            kept = {"norm" in slot.name for slot in flat.layout.slots}
            assert kept == {flat.dtype is torch.float32}
        with mz.unsharded(model):
            for name, param in model.named_parameters():
                assert (param.dtype is torch.float32) == ("norm" in name)
        for name, value in full.items():
            assert value.dtype is torch.float32
            close(value, expected[name], 0.02)
    # Kept norms give other numbers than norms in bf16: the option is no empty word.
    _, _, without = trained(world, 3, None, mz.Precision(param=torch.bfloat16))
    assert any(not torch.equal(without[name], value) for name, value in found[0][2].items())


def test_a_predicate_chooses_what_is_kept(world):
    """A unit of its own, and the root's last matrix."""
    model, chosen = seeded(Net), []
    chosen += [model.last, model.units[0].norm]
    precision = mz.Precision(param=torch.bfloat16, keep_fp32=lambda module: any(module is one for one in chosen))
    mz.shard(model, world, units={Unit}, precision=precision)
    model(batch(world.rank)).sum().backward()
    with mz.unsharded(model):
        kept = [name for name, param in model.named_parameters() if param.dtype is torch.float32]
    assert kept == ["last.weight", "last.bias", "units.0.norm.weight", "units.0.norm.bias"]


def test_results_and_buffers(world):
    """`output` casts what the root returns and nothing inside; `buffers` casts floating buffers, once."""
    seen = []
    precision = mz.Precision(param=torch.bfloat16, output=torch.float32, buffers=torch.bfloat16)
    found = []
    for place in PLACES:
        model, result, full = trained(world, *place, precision)
        found.append((model, result, full))
        assert result.dtype is torch.float32
        assert model.scale.dtype is torch.bfloat16
        model.units[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        with torch.no_grad():
            assert model(batch(world.rank)).dtype is torch.float32
        assert seen.pop() is torch.bfloat16
    all_equal(found)
    assert torch.equal(model.scale, seeded(Net).scale.to(torch.bfloat16))


def test_results_in_containers(world):
    """Tensors in the root's tuples and dicts are cast, whole numbers are not."""

    class Pair(Net):
        def forward(self, x):
            return {"logits": super().forward(x), "pair": (x.argmax(), x)}

    model = mz.shard(seeded(Pair), world, units={Unit}, precision=mz.Precision(output=torch.float64))
    result = model(batch(world.rank))
    assert result["logits"].dtype is result["pair"][1].dtype is torch.float64
    assert result["pair"][0].dtype is torch.int64
    result["logits"].sum().backward()
    assert all(param.grad.dtype is torch.float32 for param in model.parameters())


def test_autocast_around_a_sharded_model(world):
    """fp32 parameters, bf16 products: the same bits at every stage, near to the plain model under autocast."""
    found = [trained(world, *place, cast=True) for place in PLACES]
    all_equal(found)
    assert found[0][1].dtype is torch.bfloat16
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(joined(world, step))
        result.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        close(found[0][2][name], value, 0.01)
