"""The collectives that `plan` says a step has, beside those of a sharded model: by count, messages and bytes."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.comm.loopback import run_loopback  # noqa: E402
from mpizero.plan import STAGES, Setup, step_of, widths  # noqa: E402
from mpizero.plan.times import traffic_of  # noqa: E402
from mpizero.shard.shapes import precision_of, shape_of  # noqa: E402
from mpizero.testing.counts import theory_of  # noqa: E402

WIDTH, RANKS = 24, 3


class Tower(nn.Module):
    """Units with a norm, the second with a frozen bias, and a root of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.layers[1][1].bias.requires_grad_(requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


PRECISIONS = {
    "fp32": (mz.Precision(), "fp32"),
    "bf16": (mz.Precision(param=torch.bfloat16), "bf16"),
    "norms fp32": (mz.Precision(param=torch.bfloat16, keep_fp32=(nn.LayerNorm,)), "bf16"),
}


def planned(stage, precision, **words):
    chosen, name = PRECISIONS[precision]
    setup = Setup(ranks=RANKS, per_node=1, stage=stage, widths=widths(name), on_gpu=False, bucket_bytes=1, **words)
    return step_of(shape_of(Tower(), units={nn.Sequential}, precision=chosen), setup)


def theories(stage, precision, **words):
    def body(comm):
        model = mz.shard(
            Tower(), comm, stage=stage, units={nn.Sequential}, precision=PRECISIONS[precision][0], bucket_bytes=1
        )
        return theory_of(model, **words)

    return run_loopback(RANKS, body)


def check(step, found):
    for rank, theory in enumerate(found):
        moves = Counter((move.operation, move.nbytes) for move in step.moves)
        assert moves == Counter((one.operation, one.numel * one.itemsize) for one in theory.collectives)
        traffic = traffic_of(step)
        assert (traffic.messages, traffic.nbytes) == (theory.messages(rank), theory.nbytes(rank))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_collectives_of_a_step(stage, precision):
    check(planned(stage, precision), theories(stage, precision))


def test_collectives_with_accumulation():
    """Three backwards, two of them in no_sync: at stage 3 all gather, and one reduces, in fp32."""
    check(planned(3, "bf16", micro_batches=3), theories(3, "bf16", backwards=3, kept=2))


def test_the_shape_of_a_model():
    shape = shape_of(Tower(), units={nn.Sequential}, precision=PRECISIONS["norms fp32"][0])
    assert [unit.name for unit in shape.units] == ["layers.0", "layers.1", "layers.2", ""]
    assert shape.numel == sum(param.numel() for param in Tower().parameters())
    assert shape.units[1].kept == {"layers.1.0.weight", "layers.1.0.bias"}
    assert shape.units[1].frozen == {"layers.1.1.bias"}
    assert [unit.flops for unit in shape.units] == [2 * WIDTH * WIDTH] * 4
    assert precision_of(Tower().half()) == "fp16"
    tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    assert shape_of(tied).units[-1].flops == 2 * 40
    tied[1].weight = tied[0].weight
    assert (shape_of(tied).numel, shape_of(tied).units[-1].flops) == (40, 2 * 40)


def test_models_without_a_shape():
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(mz.ArgumentError, match=r"all in one of .*torch.float16', 'torch.float32'"):
        precision_of(mixed)
    with pytest.raises(mz.ArgumentError, match="one with parameters"):
        shape_of(nn.Tanh())
    with pytest.raises(TypeError, match=r"a torch.nn.Module"):
        shape_of(dict)
