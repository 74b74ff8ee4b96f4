"""Parity with the unsharded model, and between stages to the bit, over all options of `shard` and their pairs.

`bin/check` runs a covering in which any two values of any two options meet; with --all also one for any three, and the
product of precision, optimizer, clipping and one feature at a time. Every case goes through all stages.
"""

import pytest
from helpers.ways import (
    AXES,
    FEATURES,
    KNOWN,
    SHARD_OPTIONS,
    STAGES,
    Way,
    model_of,
    train_at_stage_0,
    train_joined,
    train_sharded,
)

from mpizero.testing.covering import covering, one_at_a_time, whole_product
from mpizero.testing.parity import differing, differing_across_ranks

pytestmark = [
    pytest.mark.sizes(2, 3),
    pytest.mark.mpi,
    # torch's compiler looks at `.grad` of every tensor, and hides the warning only where it is no error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LIMITS = {"fp32": 1e-5, "bf16": 0.1, "bf16-fp32": 0.1, "fp16-fp32": 0.1}
"""The largest error of a parameter, as a part of the way that training has moved it. Seen: 2e-7, 0.023 and, where AdamW
enlarges gradients that fp16 rounds coarsely, 0.066."""
ROUNDING = 2e-7
"""The error that storing a parameter in fp32 makes, as a part of its size."""
FULL = (2,)
SHARE = 3
"""Other numbers of ranks than in FULL run one case in so many; any three that follow on each other run all."""


def ways(*, whole):
    """Return the cases, each once."""
    cases = covering(AXES)
    if whole:
        features = one_at_a_time({name: AXES[name] for name in FEATURES})
        others = whole_product({name: AXES[name] for name in AXES if name not in FEATURES})
        cases += [{**feature, **other} for feature in features for other in others]
        cases += covering(AXES, strength=3)
    return list(dict.fromkeys(Way(**case) for case in cases))


def pytest_generate_tests(metafunc):
    if "way" in metafunc.fixturenames:
        cases = enumerate(ways(whole=metafunc.config.getoption("--all")))
        triples = [(index, way, stage) for index, way in cases for stage in STAGES]
        metafunc.parametrize(("index", "way", "stage"), triples, ids=[f"{way}-{stage}" for _, way, stage in triples])


def test_every_way_of_training(world, index, way, stage):
    """S6, S11 to S14, S16: stage 0 is as one process on the joined batch, the other stages as stage 0 to the bit."""
    if world.size not in FULL and (index - world.size) % SHARE:
        pytest.skip("other numbers of ranks run this one")
    reference = train_at_stage_0(way, world)
    if stage == 0:
        assert differing_across_ranks(reference, world) == []
        if world.rank == 0:
            close_to_plain(world, way, reference)
        return
    result = train_sharded(way, stage, world)
    assert differing(result, reference) == []


def close_to_plain(world, way, result):
    plain, start = train_joined(way.numbers, world.size), dict(model_of(way).named_parameters(remove_duplicate=False))
    assert result.keys() == plain.keys()
    for name, expected in plain.items():
        moved = expected - start[name].detach() if name in start else expected
        size, way_moved, error = (float(value.norm()) for value in (expected, moved, result[name] - expected))
        assert error <= LIMITS[way.precision] * way_moved + ROUNDING * size, name
        trained = name not in start or (start[name].requires_grad and name != "unused")
        assert (way_moved > 1e-5 * size) == (trained and bool(expected.numel())), name


@pytest.mark.parametrize("option", ["group", *(name for options in SHARD_OPTIONS.values() for name in options)])
def test_every_option_is_there_to_be_covered(option):
    assert option in KNOWN
