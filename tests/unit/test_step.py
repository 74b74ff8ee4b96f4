"""Simulated training steps: what must hold of them whatever the machine, and small ones that are reckoned by hand."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from mpizero.collectives.links import Cluster, Link, place
from mpizero.errors import ArgumentError
from mpizero.plan import ModelShape, UnitShape, transformer
from mpizero.plan.events import Actor, follow
from mpizero.plan.instructions import GROUP, POST, REPLICAS, Job, Program
from mpizero.plan.prices import LOCAL, REMOTE, Price, Prices, group_of, replicas_of
from mpizero.plan.program import program_of
from mpizero.plan.simulation import simulate_step
from mpizero.plan.training import Speeds, Stragglers, Training

FREE = Link(alpha=0.0, beta=0.0)
SLOW = Link(alpha=1e-6, beta=1e-9)
MODEL = transformer(6, 256, vocabulary=512)
SPEEDS = Speeds(flops=1e12, update=1e-12)
STAGES = (0, 1, 2, 3)


def cluster(size, per_node=1, *, local=SLOW, remote=SLOW, **more):
    return Cluster(size=size, nodes=place(size, per_node), local=local, remote=remote, **more)


def training(stage=3, **options):
    return Training(model=MODEL, stage=stage, **{"working_bytes": 4, "bucket_bytes": 1, "tokens": 4096.0, **options})


def seconds(stage=3, where=None, *, stragglers=None, service="shared", **options):
    more = {} if stragglers is None else {"stragglers": stragglers}
    return simulate_step(training(stage, **options), where or cluster(4), SPEEDS, service=service, **more).seconds


def alone(stage, ranks=1):
    """The seconds of forward, backward and the optimizer's part."""
    step = simulate_step(training(stage), cluster(ranks, local=FREE, remote=FREE), SPEEDS)
    return step.compute


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_computes_and_nothing_else(stage):
    step = simulate_step(training(stage), cluster(1), SPEEDS)
    work = 3 * sum(unit.flops for unit in MODEL.units) * 4096 / SPEEDS.flops
    assert step.seconds == step.compute == pytest.approx(work + MODEL.numel * SPEEDS.update, rel=1e-3)
    assert (step.exposed, step.idle, step.traffic) == (0, 0, ())
    assert step.flops == pytest.approx(SPEEDS.flops * work / step.seconds)


@pytest.mark.parametrize("stage", STAGES)
def test_links_at_no_cost_leave_compute(stage):
    step = simulate_step(training(stage), cluster(8, 2, local=FREE, remote=FREE), SPEEDS)
    assert step.seconds == pytest.approx(step.compute)
    assert step.exposed == step.idle == step.communication == 0
    assert sum(one.sent for one in step.traffic) > MODEL.numel


@pytest.mark.parametrize("stage", STAGES)
def test_faster_links_never_make_a_step_longer(stage):
    times = [
        seconds(stage, cluster(8, 2, remote=Link(alpha=1e-6, beta=beta))) for beta in (0.0, 1e-10, 1e-9, 5e-9, 2e-8)
    ]
    assert times == sorted(times)
    assert times[-1] > 1.5 * times[0]
    assert times[0] >= alone(stage, 8)


def test_what_takes_time_adds_up():
    for stage in STAGES:
        step = simulate_step(training(stage), cluster(8, 2), SPEEDS, stragglers=Stragglers(spread=0.3, seed=1))
        assert step.compute + step.exposed + step.idle == pytest.approx(step.seconds)
        assert step.exposed > 0
        assert step.idle > 0


def test_stage_3_moves_half_as_much_again():
    def moved(stage, **options):
        step = simulate_step(training(stage, **options), cluster(4), SPEEDS)
        return sum(one.sent for one in step.traffic if one.kind != "meet")

    whole = sum(-(-unit.numel // 256) * 256 for unit in MODEL.units) * 4
    assert moved(0) == moved(1) == moved(2) == pytest.approx(2 * 3 / 4 * whole, rel=1e-3)
    assert moved(3, reshard_after_forward=True) == pytest.approx(1.5 * moved(0))
    assert moved(3, reshard_after_forward=False) == pytest.approx(moved(0))
    assert moved(0) < moved(3) < 1.5 * moved(0)


def equal_units(flops=1e6):
    """Three blocks of equal size and a root of a few elements that computes nothing."""
    units = [UnitShape(name=f"b{i}", parameters=(("w", (1024, 64)),), flops=flops) for i in range(3)]
    return ModelShape(name="equal", units=(*units, UnitShape(name="", parameters=(("w", (64,)),), flops=0.0)))


def equal_step(stage, link, **options):
    """On two ranks; a block's forward takes 1 ms, its backward 2 ms, and its gather 65536 x 4 / 2 bytes."""
    work = {"model": equal_units(), "tokens": 1.0, "working_bytes": 4, "bucket_bytes": 1, **options}
    return simulate_step(
        Training(stage=stage, **work), cluster(2, local=link, remote=link), Speeds(flops=1e9), service="shared"
    )


def test_stage_0_hides_all_but_the_last_reductions():
    nbytes = 65536 * 4 / 2
    link = Link(alpha=0.0, beta=0.5e-3 / nbytes)  # a block's all-reduce takes twice 0.5 ms: less than a backward
    assert equal_step(0, link).seconds == pytest.approx(9e-3 + 1e-3, rel=0.01)
    link = Link(alpha=0.0, beta=2e-3 / nbytes)  # twice 2 ms: they queue, three of them after the first backward
    assert equal_step(0, link).seconds == pytest.approx(3e-3 + 2e-3 + 3 * 4e-3, rel=0.01)


def test_stage_3_hides_gathers_one_unit_ahead():
    nbytes = 65536 * 4 / 2
    link = Link(alpha=0.0, beta=0.5e-3 / nbytes)
    # The first gather of forward is waited for, and the last reduction; backward's first is begun when forward ends.
    assert equal_step(3, link).seconds == pytest.approx(9e-3 + 3 * 0.5e-3, rel=0.02)
    # Without prefetch all are waited for, those of backward behind the reduction of the unit before.
    assert equal_step(3, link, prefetch=0).seconds == pytest.approx(9e-3 + 9 * 0.5e-3, rel=0.02)


def test_gathers_of_stage_2_begin_at_once_and_are_waited_for_one_by_one():
    link = Link(alpha=0.0, beta=2e-3 / (65536 * 4 / 2))  # 2 ms, beside a forward of 1 ms and a backward of 2 ms
    assert equal_step(2, link).seconds == pytest.approx(3 * 2e-3 + 1e-3 + 6e-3 + 2e-3, rel=0.02)


def test_a_core_that_drives_messages_computes_less_meanwhile():
    """A block's reduction of 2 x 0.5 ms takes the core for a fifth of that, all of it beside the next backward."""
    nbytes = 65536 * 4 / 2
    link = Link(alpha=0.0, beta=0.5e-3 / nbytes)
    work = {"model": equal_units(), "tokens": 1.0, "working_bytes": 4, "bucket_bytes": 1}
    where = cluster(2, local=link, remote=link)
    speeds = [Speeds(flops=1e9, drive=drive) for drive in (0.0, 0.2e-3 / (2 * nbytes))]
    free, busy = (simulate_step(Training(stage=0, **work), where, speed) for speed in speeds)
    assert busy.compute - free.compute == pytest.approx(2 * 0.2e-3, rel=0.01)  # the last has no computation beside it
    assert busy.seconds - free.seconds == pytest.approx(2 * 0.2e-3, rel=0.01)


def test_a_core_that_has_waited_for_its_messages_is_free_again():
    link = Link(alpha=0.0, beta=0.5e-3 / (65536 * 4 / 2))
    speeds = Speeds(flops=1e9, drive=0.2e-3 / (65536 * 4 / 2))
    work = Training(model=equal_units(), tokens=1.0, working_bytes=4, bucket_bytes=1, prefetch=0)
    step = simulate_step(work, cluster(2, local=link, remote=link), speeds)
    took = {span.label: span.stop - span.start for span in step.spans if span.row == "compute"}
    assert took["forward b1"] == pytest.approx(1e-3)
    assert took["backward b1"] == pytest.approx(2e-3 + 0.2e-3)  # beside the reduction of the block before


def test_a_shared_copy_is_not_gathered():
    step = simulate_step(training(3, node_shared=True), cluster(4, 4), SPEEDS)
    assert {one.kind for one in step.traffic} == {"reduce", "meet"}
    assert step.seconds < seconds(3, cluster(4, 4))


def test_recomputing_adds_a_forward_of_every_block():
    free = cluster(2, local=FREE, remote=FREE)
    more = seconds(0, free, recompute=True) - seconds(0, free)
    assert more == pytest.approx(sum(unit.flops for unit in MODEL.units[:-1]) * 4096 / SPEEDS.flops)


def test_no_sync_reduces_once():
    def kinds(**options):
        step = simulate_step(training(2, backwards=4, **options), cluster(4), SPEEDS)
        return {one.kind: one.count for one in step.traffic}

    assert kinds() == {"meet": 12, "gather": 7, "reduce": 28}
    assert kinds(no_sync=True) == {"meet": 6, "gather": 7, "reduce": 7}
    assert seconds(2, backwards=4, no_sync=True) < seconds(2, backwards=4)
    half = {"backwards": 2, "working_bytes": 2}
    reduced = [simulate_step(training(2, no_sync=kept, **half), cluster(4), SPEEDS).traffic[-1] for kept in (0, 1)]
    assert reduced[1].sent == pytest.approx(reduced[0].sent)  # once, in fp32


def test_buckets_reduce_small_units_together():
    step = simulate_step(training(2, bucket_bytes=1 << 30), cluster(4), SPEEDS)
    assert {one.kind: one.count for one in step.traffic}["reduce"] == 2  # the first goes alone


@pytest.mark.parametrize(
    ("stage", "options", "most"), [(0, {}, 7), (2, {}, 2), (3, {}, 2), (2, {"bucket_bytes": 5 << 20}, 1)]
)
def test_how_many_reductions_are_under_way(stage, options, most):
    """Two at most where gradients are cut, one where it is of several units; as many as there are units at stage 0."""
    program = program_of(training(stage, **options), cluster(4), SPEEDS, group=4, choice="auto")
    under_way, seen = set(), []
    for item in program.instructions:
        if item.job >= 0 and program.jobs[item.job].label.startswith("reduce"):
            (under_way.add if item.kind == POST else under_way.discard)(item.job)
            seen.append(len(under_way))
    assert max(seen) == most
    assert not under_way


def test_a_straggler_delays_everybody():
    free = cluster(8, 2, local=FREE, remote=FREE)
    for stage in STAGES:
        even = simulate_step(training(stage), free, SPEEDS)
        slow = simulate_step(training(stage), free, SPEEDS, stragglers=Stragglers(slow={5: 2.0}))
        assert slow.seconds == slow.slowest == pytest.approx(2 * even.seconds)
        assert slow.compute == pytest.approx(even.compute * 9 / 8)
        assert slow.idle == pytest.approx(even.compute * 7 / 8)


def test_which_rank_is_slow_makes_no_difference():
    where = cluster(8, 4)
    found = [
        simulate_step(training(3, group=group), where, SPEEDS, stragglers=Stragglers(slow={rank: 1.7}))
        for group in (0, 4, 2)
        for rank in (0, 3, 7)
    ]
    for same in (found[0:3], found[3:6], found[6:9]):
        for step in same[1:]:
            for name in ("seconds", "compute", "exposed", "idle"):
                assert getattr(step, name) == pytest.approx(getattr(same[0], name))
    assert found[0].seconds > seconds(3, where)


def test_what_is_drawn_follows_from_the_seed():
    def drawn(seed, **options):
        return simulate_step(
            training(3, **options), cluster(8, 4), SPEEDS, stragglers=Stragglers(spread=0.2, seed=seed)
        )

    for group in (0, 4):
        assert drawn(1, group=group) == drawn(1, group=group)
        assert drawn(1, group=group).seconds != drawn(2, group=group).seconds
        assert drawn(1, group=group).seconds > seconds(3, cluster(8, 4), group=group)


def test_hybrid_groups_gather_within_and_sum_across():
    step = simulate_step(training(3, group=4, bucket_bytes=1), cluster(16, 4), SPEEDS)
    links = {one.kind: one.link for one in step.traffic}
    assert links == {"meet": REMOTE, "gather": LOCAL, "reduce": LOCAL, "replicas": REMOTE}
    sums = next(one for one in step.traffic if one.kind == "replicas")
    assert sums.sent == pytest.approx(2 * 3 / 4 * MODEL.numel * 4 / 4, rel=0.01)
    assert step.state.total == pytest.approx(MODEL.numel * 16 / 4)
    assert {span.row for span in step.spans} == {"compute", LOCAL, REMOTE}


def test_groups_of_one_rank_are_stage_0():
    assert seconds(3, cluster(4), group=1) == seconds(0, cluster(4))


def test_columns_share_the_ports_of_their_nodes():
    whole = cluster(32, 8, wires=2)
    columns = replicas_of(whole, 8)
    assert (columns.size, columns.nodes, columns.wires) == (4, (0, 1, 2, 3), 1)
    assert columns.remote.beta == pytest.approx(4 * SLOW.beta)  # eight columns on two ports
    assert replicas_of(cluster(32, 8, wires=16), 8).remote.beta == SLOW.beta
    pairs = replicas_of(cluster(32, 8, wires=4), 2)
    assert (pairs.size, pairs.nodes[:5], pairs.wires) == (16, (0, 0, 0, 0, 1), 2)
    assert group_of(whole, 8).nodes == (0,) * 8


def both_at_once(*, shared):
    """A program that begins 2 s on the network for its group and then 1 s for replicas, and waits for both."""
    program = Program(group=1, stage=0)
    first = program.post(Job("gather a", GROUP, Price(2.0, REMOTE, 0, 0, "")))
    second = program.post(Job("replicas b", REPLICAS, Price(1.0, REMOTE, 0, 0, "")))
    program.wait(second)
    program.wait(first)
    actor = Actor(program, np.ones(1), None, traced=True)
    follow(program, [actor], shared=shared)
    return {span.label: (span.start, span.stop) for span in actor.times.spans}


def test_communicators_share_a_link_or_take_turns():
    assert both_at_once(shared=True) == {"gather a": (0, 3), "replicas b": (0, 2)}
    assert both_at_once(shared=False) == {"gather a": (0, 2), "replicas b": (2, 3)}


def test_one_communicator_runs_in_order_however_links_are_shared():
    program = Program(group=1, stage=0)
    jobs = [
        program.post(Job(f"gather {i}", GROUP, Price(1.0, link, 0, 0, ""))) for i, link in enumerate((REMOTE, LOCAL))
    ]
    for job in jobs:
        program.wait(job)
    actor = Actor(program, np.ones(1), None, traced=True)
    follow(program, [actor], shared=True)
    assert [(span.start, span.stop) for span in actor.times.spans] == [(0, 1), (1, 2)]


def test_fifo_and_shared_links_carry_the_same():
    where = cluster(16, 4, wires=1)
    times = {service: seconds(3, where, group=8, service=service) for service in ("fifo", "shared")}
    step = simulate_step(training(3, group=8), where, SPEEDS)
    for found in times.values():
        assert max(step.communication, step.compute) <= found <= step.communication + step.compute
    assert times["fifo"] == pytest.approx(times["shared"], rel=0.25)


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_algorithms_are_no_slower(stage):
    where = cluster(16, 4)
    best = simulate_step(training(stage), where, SPEEDS, choice="best")
    assert best.seconds <= 1.0001 * seconds(stage, where)


def test_prices_are_those_of_the_cost_model():
    from mpizero.collectives.cost import cost

    where = cluster(8, 2)
    price = Prices(cluster=where).of("all_gather", 1 << 20, 4)
    assert price.seconds == cost("all_gather", price.algorithm, where, 1 << 20).seconds
    meeting = Prices(cluster=where).meeting(20)
    assert (meeting.algorithm, meeting.seconds) == ("direct", cost("all_gather", "direct", where, 160).seconds)
    large = cluster(66, 6, local=Link(alpha=1e-6, beta=1e-11))
    assert Prices(cluster=large).of("reduce_scatter", 1 << 20, 4).algorithm == "direct"
    assert Prices(cluster=large, choice="best").of("reduce_scatter", 1 << 20, 4).algorithm == "hierarchical"
    halves, wholes = (Prices(cluster=large, choice="best").of("reduce_scatter", 1 << 20, width) for width in (2, 4))
    assert halves.sent > 1.1 * wholes.sent  # partial sums of 16-bit elements travel as 32


def test_many_groups_are_one_where_they_are_alike():
    """16,384 ranks in groups of a node, with one slow rank: two actors, whatever the number of groups."""
    where = cluster(16384, 8, local=FREE)
    program = program_of(training(3, group=8), where, SPEEDS, group=8, choice="auto")
    step = simulate_step(training(3, group=8), where, SPEEDS, stragglers=Stragglers(slow={16383: 3.0}))
    assert step.seconds > 3 * alone(3)
    assert sum(item.kind == POST for item in program.instructions) < 60
    assert step.tokens_per_second == pytest.approx(16384 * 4096 / step.seconds)


SCRIPT = """
import resource, sys
from mpizero.collectives.links import Cluster, Link, place
from mpizero.plan import transformer
from mpizero.plan.simulation import simulate_step
from mpizero.plan.training import Speeds, Stragglers, Training
link = Link(alpha=1e-5, beta=2e-11)
where = Cluster(size=16384, nodes=place(16384, 8), local=link, remote=link, wires=8)
model = transformer(128, 25600, vocabulary=51200)
even = Stragglers(spread=0.05)
step = simulate_step(Training(model=model, tokens=2048.0), where, Speeds(flops=4e14), stragglers=even)
print(model.numel, step.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_trillion_parameters_on_16384_ranks():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=300)
    numel, took, kib = done.stdout.split()
    assert int(numel) > 1e12
    assert float(took) > 3 * 2 * 1e12 * 2048 / 4e14
    assert int(kib) < 2 << 20


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: training(4), "stage must be one of 0, 1, 2, 3"),
        (lambda: training(tokens=0.0), "tokens must be above 0"),
        (lambda: training(working_bytes=3), "working_bytes must be 2, 4 or 8"),
        (lambda: training(reduce_bytes=1), "reduce_bytes must be"),
        (lambda: training(backwards=0), "backwards must be a whole number, 1 or more"),
        (lambda: training(prefetch=-1), "prefetch must be"),
        (lambda: training(bucket_bytes=True), "bucket_bytes must be"),
        (lambda: Speeds(flops=0.0), "flops must be above 0"),
        (lambda: Speeds(flops=1e9, update=-1.0), "update must be 0 or more"),
        (lambda: Stragglers(slow={0: 0.0}), "factor of Stragglers.slow must be above 0"),
        (lambda: Stragglers(slow={-1: 2.0}), "rank of Stragglers.slow must be"),
        (lambda: Stragglers(spread=4.0), "Stragglers.spread must be 0 to 3"),
        (lambda: Stragglers(seed=-1), "Stragglers.seed must be"),
        (lambda: seconds(group=3), "group must be a divisor of the 4 ranks"),
        (lambda: seconds(3, cluster(24, 8), group=6), "group must be whole nodes of 8 ranks, or equal parts of one"),
        (lambda: seconds(3, cluster(12, 8), group=4), "with as many ranks on every node"),
        (lambda: seconds(3, node_shared=True), "node_shared must be for stages 1 to 3 and groups within one node"),
        (lambda: seconds(0, cluster(4, 4), node_shared=True), "node_shared must be"),
        (lambda: seconds(stragglers=Stragglers(slow={4: 2.0})), "rank of Stragglers.slow must be 0 to 3"),
        (lambda: seconds(service="turns"), "service must be one of fifo, shared"),
        (
            lambda: seconds(3, dataclasses.replace(cluster(4), nodes=place(4, 2, round_robin=True))),
            "Cluster.nodes must be ranks placed node by node",
        ),
        (
            lambda: simulate_step(training(), cluster(2), SPEEDS, choice="worst"),
            "choice must be one of auto, best",
        ),
    ],
)  # fmt: skip
def test_impossible_steps_are_refused(build, text):
    with pytest.raises(ArgumentError, match=text):
        build()
