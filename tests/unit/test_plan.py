"""The arithmetic of `plan`: the two accounts, what mpizero holds, what it sends, and how long that takes."""

import pytest

from mpizero.collectives.cost import lower_bound
from mpizero.collectives.links import Cluster, Link, place
from mpizero.errors import ArgumentError, ArgumentTypeError
from mpizero.plan import (
    ACCOUNTS,
    STAGES,
    Limits,
    ModelShape,
    Setup,
    UnitShape,
    account_bytes,
    advice,
    enough_ranks,
    equal_units,
    model_state_bytes,
    sent_per_step,
    smallest_stage,
    step_of,
    transformer,
    widths,
)
from mpizero.plan.times import Network, compute_seconds, times_of, traffic_of

BILLION = 10**9
BF16 = widths("bf16")
WIDE = transformer(32, 4096)
"""32 layers of 12 x 4096 x 4096 weights."""


def network(setup, beta, wires=1):
    link = Link(alpha=0, beta=beta)
    return Network(setup, link, link, wires=wires)


@pytest.mark.parametrize(
    ("account", "ranks", "expected"),
    [("16", 64, [112, 29.3, 15.5, 1.75]), ("20", 32, [140, 58.6, 17.9, 4.4])],
)
def test_gigabytes_of_7_billion_parameters(account, ranks, expected):
    found = [account_bytes(7 * BILLION, ranks, stage, ACCOUNTS[account]).total / BILLION for stage in STAGES]
    assert found == pytest.approx(expected, rel=0.006)
    kinds = account_bytes(7 * BILLION, ranks, 0, ACCOUNTS[account])
    assert kinds.total == kinds.parameters + kinds.gradients + kinds.optimizer == 7 * BILLION * int(account)


def test_a_unit_of_width_4096_takes_403_megabytes():
    step = step_of(WIDE, Setup(ranks=32, widths=BF16))
    assert step.largest_unit / 1e6 == pytest.approx(403, abs=0.5)
    assert step.phases["forward"].held.gathered == pytest.approx(2 * 402.67e6, rel=1e-3)  # one at work, one ahead


def test_bytes_of_a_step_on_32_ranks():
    """12.5 GB for the gathers of a forward; stage 3 moves half as much again as an all-reduce, 40.7 and 27.1 GB."""
    kept = Setup(ranks=32, widths=BF16, reshard_after_forward=False)
    assert traffic_of(step_of(WIDE, kept)).gathered / 1e9 == pytest.approx(12.5, abs=0.05)
    model = equal_units(7 * BILLION, 32)
    found = [traffic_of(step_of(model, Setup(ranks=32, stage=stage, widths=BF16))) for stage in STAGES]
    assert [round(one.nbytes / 1e9, 1) for one in found] == [27.1, 27.1, 27.1, 40.7]
    assert found[3].nbytes / found[0].nbytes == pytest.approx(1.5)
    assert [one.collectives for one in found] == [32, 64, 64, 96]
    assert [one.messages for one in found] == [64 * 31, 64 * 31, 64 * 31, 96 * 31]


@pytest.mark.parametrize(("gigabytes", "seconds"), [(450, 0.054), (50, 0.49)])
def test_gradients_of_7_billion_parameters_on_8_ranks(gigabytes, seconds):
    step = step_of(equal_units(7 * BILLION, 32), Setup(ranks=8, stage=0, widths=BF16))
    assert traffic_of(step).nbytes / 1e9 == pytest.approx(24.5, abs=0.01)
    times = times_of(step, network(step.setup, 1e-9 / gigabytes))
    assert times.communication == pytest.approx(seconds, rel=0.01)
    assert times.compute is times.exposed is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("stage", STAGES)
def test_state_and_traffic_are_the_formulas_without_padding(stage, precision):
    """`model_state_bytes` and `sent_per_step`, on a model that needs no padding; private and shared by a node."""
    own = "fp64" if precision == "fp64" else "fp32"
    width = {"fp32": 4, "bf16": 2, "fp64": 8}[precision]
    model = equal_units(64 * 4 * 1000, 4)
    for shared in (False, True):
        setup = Setup(
            ranks=4, stage=stage, widths=widths(precision, own=own), on_gpu=False, node_shared=shared, moments=1
        )
        formula = model_state_bytes(model.numel, 4, stage, working_bytes=width, moments=1, node_shared=shared)
        step = step_of(model, setup)
        state = step.phases["between steps"].state
        assert (state.parameters, state.gradients, state.optimizer) == pytest.approx(
            (formula.parameters, formula.gradients, formula.optimizer)
        )
        sent = sent_per_step(model.numel, 4, stage, working_bytes=width, node_shared=shared)
        assert traffic_of(step).nbytes == pytest.approx(sent)


def test_one_rank_sends_nothing_and_cuts_nothing():
    for stage in STAGES:
        step = step_of(equal_units(6400, 2), Setup(ranks=1, stage=stage))
        assert traffic_of(step).collectives == traffic_of(step).nbytes == 0
        assert step.peak == pytest.approx(16 * 6400, rel=0.01)


def test_what_lives_within_a_step():
    """Of 4 units of u bytes in bf16, at stage 3 between nodes: one and `prefetch` gathered, three with gradients."""
    model = equal_units(4 * 64 * 10_000, 4)
    unit = 2 * 64 * 10_000
    found = {}
    for prefetch in (0, 1, 2):
        step = step_of(model, Setup(ranks=10, widths=BF16, prefetch=prefetch, bucket_bytes=1))
        found[prefetch] = step.phases["forward"].held, step.phases["backward"].held
    assert [found[prefetch][0].gathered / unit for prefetch in (0, 1, 2)] == [1, 2, 3]
    assert [found[prefetch][1].gathered / unit for prefetch in (0, 1)] == [1, 2]
    assert found[1][1].flying == pytest.approx(3.2 * unit)  # and a tenth of each that is summed, in bf16
    kept = step_of(model, Setup(ranks=10, widths=BF16, micro_batches=2))
    assert kept.phases["forward"].held.kept == 4 * model.numel
    assert (
        step_of(model, Setup(ranks=10, widths=BF16, reshard_after_forward=False)).phases["forward"].held.gathered
        == 4 * unit
    )


def test_small_units_travel_together():
    """After the first, which goes alone; a bucket is copied, and so held twice while it is packed."""
    model = equal_units(9 * 6400, 9)
    alone, packed = (step_of(model, Setup(ranks=4, stage=2, bucket_bytes=nbytes)) for nbytes in (1, 4 * 4 * 6400))
    assert [step.moves[-1].operation for step in (alone, packed)] == ["reduce_scatter"] * 2
    sizes = [
        [move.nbytes // 25600 for move in step.moves if move.operation == "reduce_scatter"] for step in (alone, packed)
    ]
    assert sizes == [[1] * 9, [1, 4, 4]]
    assert traffic_of(alone).nbytes == traffic_of(packed).nbytes


def test_room_in_shared_memory():
    """For the root and two units where ranks of a node sum gradients in place; none on GPUs and between nodes."""
    root = UnitShape(name="", parameters=(("head", (640, 10)),), flops=0.0)
    model = ModelShape(name="m", units=(*equal_units(3 * 64_000, 3).units[:-1], root))

    def room(**words):
        return step_of(model, Setup(ranks=4, stage=2, bucket_bytes=1, **words)).phases["between steps"].room

    assert room(on_gpu=False) == 4 * (6400 + 2 * 64_000)
    assert room(on_gpu=False, per_node=2) == room() == 0


def test_hybrid_groups_cost_what_their_ranks_do():
    model = equal_units(64 * 800, 4)
    plain = step_of(model, Setup(ranks=4, widths=BF16))
    hybrid = step_of(model, Setup(ranks=16, group=4, widths=BF16))
    assert hybrid.phases["between steps"].state == plain.phases["between steps"].state
    across = sum(move.nbytes for move in hybrid.moves if move.across)
    assert across == 4 * model.numel / 4  # fp32, of a shard
    assert {move.ranks for move in hybrid.moves} == {4}
    assert step_of(model, Setup(ranks=4, group=4, widths=BF16)).moves == plain.moves
    assert step_of(model, Setup(ranks=16, group=1, widths=BF16)).phases["between steps"].state.parameters > 0


def test_kept_and_frozen_parameters_have_buffers_of_their_own():
    unit = UnitShape(name="a", parameters=(("w", (64, 64)), ("norm", (64,)), ("still", (64,))), flops=0.0)
    root = UnitShape(name="", parameters=(), flops=0.0)
    plain, kept, frozen = (
        step_of(ModelShape(name="m", units=(shape, root)), Setup(ranks=1, stage=0, widths=BF16, moments=0))
        .phases["between steps"]
        .state
        for shape in (unit, *(UnitShape(**{**vars(unit), key: frozenset({"norm"})}) for key in ("kept", "frozen")))
    )
    assert kept.parameters - plain.parameters == 2 * 64
    assert plain.optimizer - kept.optimizer == 4 * 64  # it is its own master copy
    assert plain.gradients - frozen.gradients == 4 * 64


def test_exposed_time():
    """With endless computation the first gather and the last sum are left, and with a root that computes nothing the
    gather of the unit at which backward turns round."""
    model = equal_units(64 * 4000, 4)
    step = step_of(model, Setup(ranks=4, widths=BF16, bucket_bytes=1))
    net = network(step.setup, 1e-9)
    unit = net.seconds(step.moves[0])
    assert unit == pytest.approx(2 * 64_000 * 0.75e-9)
    slow = times_of(step, net, compute_seconds(model, 10**6, 1e9))
    assert slow.compute == pytest.approx(3 * 2 * model.numel * 1e6 / 1e9)
    assert slow.exposed == pytest.approx(3 * unit)
    assert slow.least_exposed == pytest.approx(2 * unit)
    quick = times_of(step, net, compute_seconds(model, 1, 1e30))
    assert quick.exposed == pytest.approx(quick.communication) == pytest.approx(12 * unit)
    middle = times_of(step, net, (unit / 2,) * len(model.units))
    assert 3 * unit < middle.exposed < 12 * unit
    assert times_of(step, network(step.setup, 0.0), compute_seconds(model, 1, 1.0)).exposed == 0


def test_replicas_share_the_ports_of_their_node():
    setup = Setup(ranks=16, per_node=4, group=4, widths=BF16)
    step = step_of(equal_units(64 * 800, 1), setup)
    across = next(move for move in step.moves if move.across)
    one, four = (network(setup, 1e-9, wires).seconds(across) for wires in (1, 4))
    assert one == pytest.approx(4 * four)
    assert four == pytest.approx(2 * 3 / 4 * across.nbytes * 1e-9)


def test_columns_of_replicas_get_equal_parts_of_the_ports():
    """Groups of 2, two of them on a node of 4 ranks with 2 ports: each of the node's 2 columns has one port."""
    step = step_of(equal_units(64 * 800, 1), setup := Setup(ranks=16, per_node=4, group=2, widths=BF16))
    across = next(move for move in step.moves if move.across)
    local, remote = Link(alpha=0, beta=1e-12), Link(alpha=0, beta=1e-9)
    column = Cluster(size=8, nodes=place(8, 2), local=local, remote=remote, wires=1)
    expected = lower_bound(across.operation, column, across.nbytes)
    assert Network(setup, local, remote, wires=2).seconds(across) == pytest.approx(expected)


def test_the_smallest_stage_that_fits():
    peaks = [(0, 100.0), (1, 40.0), (2, 40.0), (3, 10.0)]
    assert smallest_stage(peaks, Limits(memory=50)) == 1
    assert smallest_stage(peaks, Limits(memory=50, activations=20)) == 3
    assert smallest_stage(peaks, Limits(memory=5)) is None
    assert smallest_stage(peaks, Limits()) == 0


def test_advice_says_what_is_needed():
    model = equal_units(7 * BILLION, 32)

    def said(memory=0.0, activations=0.0, batch=0, ranks=8, stages=STAGES):
        steps = {stage: step_of(model, Setup(ranks=ranks, stage=stage, widths=BF16)) for stage in stages}
        return " ".join(advice(model, steps, Limits(memory=memory, activations=activations, batch=batch)))

    assert said(80e9) == said() == ""
    offload = "On 8 ranks stage 3 fits with --offload optimizer=host."
    assert said(12e9) == f"Stage 3 fits from 16 ranks on (found by doubling). {offload}"
    assert enough_ranks(model, Setup(ranks=8, widths=BF16), Limits(memory=12e9)) == 16
    assert step_of(model, Setup(ranks=16, widths=BF16)).peak < 12e9 < step_of(model, Setup(ranks=8, widths=BF16)).peak
    assert "leave --stage and --group out" in said(80e9, stages=(0,))
    assert "No number of ranks" in said(1e9)
    assert "tensor parallelism" in said(1e9)
    assert "Activations alone" in said(80e9, activations=90e9)
    assert "8 sequences are fewer than 16 ranks" in said(batch=8, ranks=16)
    assert "pipeline parallelism" in said(batch=8, ranks=16)
    assert said(batch=8, ranks=8) == ""


def test_advice_where_links_are_slow():
    model = equal_units(7 * BILLION, 32)
    step = step_of(model, Setup(ranks=8, widths=BF16))
    compute = compute_seconds(model, 4096, 400e12)
    slow, quick = (times_of(step, network(step.setup, beta), compute) for beta in (1e-9, 1e-12))
    assert "More than a third" in advice(model, {3: step}, Limits(), slow)[0]
    assert advice(model, {3: step}, Limits(), quick) == []


def test_sixteen_thousand_ranks_and_a_trillion_parameters():
    model = transformer(128, 25600, vocabulary=51200)
    step = step_of(model, Setup(ranks=16384, widths=BF16))
    assert model.numel == pytest.approx(1.008e12, rel=0.01)
    assert step.phases["between steps"].total == pytest.approx(16 * model.numel / 16384, rel=0.001)
    assert times_of(step, network(step.setup, 1e-9 / 50, wires=8)).communication > 0


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"ranks": 0}, ArgumentError, "ranks must be 1 or more"),
        ({"ranks": 2.5}, ArgumentTypeError, "ranks must be a whole number"),
        ({"ranks": 4, "per_node": 0}, ArgumentError, "per_node must be 1 or more"),
        ({"ranks": 4, "stage": 4}, ArgumentError, "stage must be one of"),
        ({"ranks": 4, "group": 3}, ArgumentError, "group must be a divisor of the number of ranks, 4"),
        ({"ranks": 4, "node_shared": True}, ArgumentError, "node_shared must be False or None"),
        ({"ranks": 4, "micro_batches": 0}, ArgumentError, "micro_batches must be 1 or more"),
    ],
)
def test_jobs_that_are_none(words, error, text):
    with pytest.raises(error, match=text):
        Setup(**words)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: widths("fp8"), r"precision must be one of fp32, bf16, fp16, fp64 \(got 'fp8'\)"),
        (lambda: widths("bf16", reduce="int8"), "reduce precision must be one of"),
        (lambda: equal_units(0, 1), "parameters must be at least 1"),
        (lambda: equal_units(3, 4), "units must be at most the number of parameters, 3"),
        (lambda: account_bytes(7, 0, 1, ACCOUNTS["16"]), "ranks must be at least 1"),
        (lambda: compute_seconds(WIDE, 0, 1.0), "tokens must be 1 or more"),
        (lambda: compute_seconds(WIDE, 1, 0.0), "flops must be above 0"),
    ],
)
def test_numbers_that_make_no_sense(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
