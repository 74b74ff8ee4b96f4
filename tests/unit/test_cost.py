"""Cost on paper: closed forms of the literature, bounds, and few schedules standing for all."""

from dataclasses import replace
from math import log2

import pytest

from mpizero.collectives import OPERATIONS, algorithms_of, build, even_offsets, scaled
from mpizero.collectives import cost as costs
from mpizero.collectives.cost import cost, lower_bound
from mpizero.collectives.events import evaluate
from mpizero.collectives.links import Cluster, Link, fit, place
from mpizero.collectives.simulate import ScheduleError
from mpizero.collectives.work import Flow, RoundWork
from mpizero.errors import ArgumentError

A, B, G = 3.0, 0.5, 0.25
"""Seconds per message, per byte, per byte reduced: sums of their products are exact."""
POWERS = [2, 4, 8, 16, 32]
ALL = [(operation, entry.name) for operation in OPERATIONS for entry in algorithms_of(operation)]
OUT_OF_STEP = {"tree", "double_tree", "chain", "scatter_all_gather", "leader"}
"""Algorithms in which ranks wait for others' rounds; `sampled` is not for them."""
IN_STEP = [pair for pair in ALL if pair[1] not in OUT_OF_STEP and pair != ("broadcast", "hierarchical")]
LAYOUTS = {
    "blocks": place(32, 8),
    "round robin": place(32, 8, round_robin=True),
    "one a node": place(32, 1),
    "one node": place(32, 32),
}


def cluster_of(nodes, **kwargs):
    local, remote = Link(alpha=2e-6, beta=1e-10), Link(alpha=2e-5, beta=8e-11)
    return Cluster(**{"size": len(nodes), "nodes": nodes, "local": local, "remote": remote, **kwargs})


def uniform(size, **kwargs):
    link = Link(alpha=A, beta=B)
    return cluster_of(place(size, 1), local=link, remote=link, gamma=G, **kwargs)


def near(value):
    return pytest.approx(value, rel=1e-12)


def log(size):
    return int(log2(size))


CLOSED = {
    ("all_reduce", "ring"): lambda p, n: 2 * (p - 1) * A + 2 * n * (p - 1) / p * B + n * (p - 1) / p * G,
    ("all_reduce", "direct"): lambda p, n: 2 * A + 2 * n * (p - 1) / p * B + n * (p - 1) / p * G,
    ("all_reduce", "halving_doubling"): lambda p, n: 2 * log(p) * A + 2 * n * (p - 1) / p * B + n * (p - 1) / p * G,
    ("all_reduce", "tree"): lambda p, n: 2 * log(p) * (A + n * B) + n * log(p) * G,
    ("reduce_scatter", "ring"): lambda p, n: (p - 1) * A + n * (p - 1) / p * (B + G),
    ("reduce_scatter", "direct"): lambda p, n: A + n * (p - 1) / p * (B + G),
    ("reduce_scatter", "halving"): lambda p, n: log(p) * A + n * (p - 1) / p * (B + G),
    ("all_gather", "ring"): lambda p, n: (p - 1) * A + n * (p - 1) / p * B,
    ("all_gather", "direct"): lambda p, n: A + n * (p - 1) / p * B,
    ("all_gather", "doubling"): lambda p, n: log(p) * A + n * (p - 1) / p * B,
    ("broadcast", "tree"): lambda p, n: log(p) * (A + n * B),
    ("reduce", "tree"): lambda p, n: log(p) * (A + n * B + n * G),
    ("barrier", "dissemination"): lambda p, _: log(p) * (A + B),
}


@pytest.mark.parametrize("size", POWERS)
@pytest.mark.parametrize(("operation", "name"), CLOSED)
def test_closed_forms_of_the_literature(operation, name, size):
    nbytes = 96 * size
    assert cost(operation, name, uniform(size), nbytes).seconds == CLOSED[operation, name](size, nbytes)


@pytest.mark.parametrize("size", [3, 5, 12, 33])
def test_ring_has_its_closed_form_at_any_size_and_length(size):
    for nbytes in (1.0, 1000.0):
        found = cost("all_reduce", "ring", uniform(size), nbytes)
        assert found.seconds == near(CLOSED["all_reduce", "ring"](size, nbytes))
        assert found.rounds == 2 * (size - 1)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree"])
def test_rounds_are_the_longest_chain(name):
    expected = {"ring": 30, "halving_doubling": 8, "tree": 8}[name]
    for method in ("events", "sampled"):
        if method == "events" or name != "tree":
            assert cost("all_reduce", name, uniform(16), 64, method=method).rounds == expected


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_more_bytes_cost_more(operation, name):
    cluster = cluster_of(place(12, 4), gamma=1e-10, copy=1e-10, post=1e-6)
    seconds = [cost(operation, name, cluster, nbytes, pieces=2).seconds for nbytes in (0, 1, 100, 10**4, 10**6, 10**8)]
    if operation == "barrier":
        assert len(set(seconds)) == 1
    else:
        assert seconds == sorted(set(seconds))
    assert seconds[0] > 0


@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize(
    "nodes", [place(16, 4), place(16, 4, round_robin=True), place(13, 5), place(9, 9), (0, 0, 0, 1)]
)
@pytest.mark.parametrize("wires", [1, 3])
def test_nothing_beats_the_lower_bound(operation, name, nodes, wires):
    cluster = cluster_of(nodes, wires=wires)
    for nbytes, root in ((1, 0), (10**7, len(nodes) - 1)):
        least = lower_bound(operation, cluster, nbytes, root=root)
        assert 0 < least <= cost(operation, name, cluster, nbytes, root=root, pieces=3).seconds * (1 + 1e-12)


def test_ring_and_direct_reach_the_lower_bound():
    free = Link(alpha=0.0, beta=1e-9)
    cluster = cluster_of(place(8, 1), local=free, remote=free)
    assert cost("all_reduce", "ring", cluster, 8e6).seconds == near(lower_bound("all_reduce", cluster, 8e6))
    shared = cluster_of(place(8, 4), remote=replace(free, alpha=1e-3))
    assert cost("all_to_all", "direct", shared, 8e6).seconds == near(lower_bound("all_to_all", shared, 8e6))
    assert lower_bound("all_reduce", cluster_of((0,)), 8e6) == 0.0


@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize("size", [4, 7])
def test_bytes_are_those_of_the_schedules(operation, name, size):
    nodes, count = place(size, 3), 2520 * size
    schedules = [build(operation, name, size, rank, nodes=nodes, pieces=2) for rank in range(size)]
    whole = 1 if operation == "barrier" else 2 * count
    offsets = even_offsets(count * (size if operation == "all_to_all" else 1), schedules[0].chunks)
    sent = [schedule.sent_bytes(offsets, 2, 4) for schedule in schedules]
    found = cost(operation, name, cluster_of(nodes), whole, pieces=2, itemsize=2, acc_itemsize=4)
    if operation == "barrier":
        assert found.bytes_sent_max == (3 if size == 7 else 2)
    else:
        assert found.bytes_sent_max == near(max(sent))


def test_ring_over_nodes_is_bounded_by_the_slowest_link():
    nodes, link = place(16, 4), Link(alpha=A, beta=B)
    slow = cluster_of(nodes, local=Link(alpha=A / 4, beta=B / 4), remote=link)
    assert cost("all_reduce", "ring", slow, 1600).seconds == CLOSED["all_reduce", "ring"](16, 1600) - 1600 * 15 / 16 * G
    turned = replace(slow, local=slow.remote, remote=slow.local)
    assert cost("all_reduce", "ring", turned, 1600).seconds == cost("all_reduce", "ring", slow, 1600).seconds


def test_ranks_of_a_node_share_its_ports():
    nodes = place(16, 4, round_robin=True)
    one = cost("all_gather", "ring", cluster_of(nodes), 16e6)
    two, many = (cost("all_gather", "ring", cluster_of(nodes, wires=wires), 16e6) for wires in (2, 100))
    alone = cost("all_gather", "ring", cluster_of(place(16, 1)), 16e6)
    assert one.bound_by == "port"
    assert one.terms.port == near(4 * alone.terms.remote)
    assert two.terms.port == near(2 * alone.terms.remote)
    assert many.seconds == near(alone.seconds)
    assert one.wire_bytes_max == 4 * alone.wire_bytes_max == 4 * 15e6


def test_ports_serve_messages_that_meet_late_one_after_the_other():
    def sends(peer, wait):
        return [RoundWork((), (), 0, wait, 0), RoundWork((Flow(peer, 10.0),), (), 0, 0, 0)]

    def receives(peer):
        return [RoundWork((), (Flow(peer, 10.0),), 0, 0, 0)]

    free = Link(alpha=0.0, beta=1.0)
    cluster = cluster_of((0, 0, 1, 2), local=free, remote=free, copy=1.0)
    together = evaluate([sends(2, 0), sends(3, 0), receives(0), receives(1)], cluster)
    assert sum(together.terms) == 20
    apart = evaluate([sends(2, 0), sends(3, 100), receives(0), receives(1)], cluster)
    assert sum(apart.terms) == 110


def test_a_port_that_is_busy_makes_later_messages_wait():
    def sends(peer, nbytes):
        return RoundWork((Flow(peer, nbytes),), (), 0, 0, 0)

    def receives(peer, nbytes):
        return RoundWork((), (Flow(peer, nbytes),), 0, 0, 0)

    free = Link(alpha=0.0, beta=1.0)
    cluster = cluster_of((0, 0, 1, 2, 0), local=free, remote=free)
    long, first, then = sends(2, 100.0), receives(4, 1.0), sends(3, 10.0)
    found = evaluate([[long], [first, then], [receives(0, 100.0)], [receives(1, 10.0)], [sends(1, 1.0)]], cluster)
    assert sum(found.terms) == 110
    assert (found.terms.local, found.terms.port) == (1, 109)


def test_a_message_without_its_other_end_is_an_error():
    alone = [RoundWork((Flow(1, 1.0),), (), 0, 0, 0)]
    with pytest.raises(ScheduleError, match=r"ranks \[0\]"):
        evaluate([alone, []], cluster_of((0, 1)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("operation", "name"), IN_STEP)
def test_few_ranks_stand_for_all(operation, name, layout):
    cluster = cluster_of(LAYOUTS[layout], gamma=5e-11, copy=7e-11, post=1e-7)
    root = 19 if OPERATIONS[operation].rooted else 0
    for nbytes in (64, 64e6):
        whole, few = (cost(operation, name, cluster, nbytes, root=root, method=m) for m in ("events", "sampled"))
        assert few.seconds == pytest.approx(whole.seconds, rel=1e-9)
        assert list(few.terms) == pytest.approx(list(whole.terms), rel=1e-6, abs=1e-12)
        assert few.rounds == whole.rounds
        assert few.bytes_sent_max == near(whole.bytes_sent_max)
        assert few.wire_bytes_max == near(whole.wire_bytes_max)
        assert (whole.method, few.method) == ("events", "sampled")


@pytest.mark.parametrize("name", ["ring", "direct"])
@pytest.mark.parametrize("nodes", [place(31, 8), place(45, 7, round_robin=True)])
def test_few_ranks_stand_for_all_at_any_size(name, nodes):
    cluster = cluster_of(nodes, gamma=5e-11, copy=7e-11)
    whole, few = (cost("all_reduce", name, cluster, 1e7, method=method) for method in ("events", "sampled"))
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert few.schedules == 1


@pytest.mark.parametrize("size", [12, 44])
def test_few_ranks_of_a_folded_size_are_near(size):
    cluster = cluster_of(place(size, 8))
    whole, few = (cost("all_reduce", "halving_doubling", cluster, 1e7, method=m) for m in ("events", "sampled"))
    assert 0.8 * whole.seconds < few.seconds < 1.01 * whole.seconds


@pytest.mark.parametrize(
    ("operation", "name"), [("all_reduce", "double_tree"), ("reduce", "double_tree"), ("broadcast", "chain")]
)
@pytest.mark.parametrize("nodes", [place(256, 8), place(200, 1), place(192, 192)])
def test_pipelines_of_few_ranks_tell_of_many(operation, name, nodes, monkeypatch):
    cluster = cluster_of(nodes, gamma=5e-11)
    whole = cost(operation, name, cluster, 1e8, pieces=8, method="events")
    monkeypatch.setattr(costs, "SHORT", 1024)
    found = cost(operation, name, cluster, 1e8, pieces=8)
    assert found.method == "scaled"
    assert found.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert found.rounds == pytest.approx(whole.rounds, abs=1)
    assert found.schedules < 300


@pytest.mark.parametrize("pieces", [5, 8, 16])
def test_few_pieces_tell_of_many(pieces, monkeypatch):
    cluster = cluster_of(place(16, 4), gamma=5e-11)
    whole = cost("all_reduce", "segmented_ring", cluster, 1e7, pieces=pieces, method="sampled")
    monkeypatch.setattr(costs, "SHORT", 10)
    found = cost("all_reduce", "segmented_ring", cluster, 1e7, pieces=pieces)
    assert found.method == "scaled"
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert found.bytes_sent_max == near(whole.bytes_sent_max)


@pytest.mark.parametrize(
    ("name", "most"), [("ring", 1), ("direct", 1), ("halving_doubling", 1), ("hierarchical", 6), ("double_tree", 1792)]
)
def test_16384_ranks_need_few_schedules(name, most):
    """Time and memory go with the schedules that are built; none stays in the cache of `build`."""
    before = build.cache_info().currsize
    cluster = cluster_of(place(16384, 8))
    found = cost("all_reduce", name, cluster, 1 << 30, pieces=8)
    assert found.schedules <= most
    assert build.cache_info().currsize == before
    assert found.seconds > lower_bound("all_reduce", cluster, 1 << 30)


def test_trees_of_16384_ranks_are_followed_whole():
    found = cost("all_reduce", "tree", cluster_of(place(16384, 8)), 1 << 20)
    assert (found.method, found.schedules, found.rounds) == ("events", 16384, 28)


def test_terms_add_up_and_name_what_binds():
    cluster = cluster_of(place(8, 4), gamma=1e-8, copy=1e-9, post=1e-6)
    found = cost("all_reduce", "halving_doubling", cluster, 1e6)
    assert sum(found.terms) == near(found.seconds)
    assert found.bound_by == "reduction"
    assert all(term > 0 for name, term in found.terms._asdict().items() if name != "remote")
    assert cost("all_reduce", "ring", cluster, 1).bound_by == "latency"
    more = cost("all_reduce", "ring", replace(cluster, post=2e-6), 1)
    assert more.seconds - cost("all_reduce", "ring", cluster, 1).seconds == near(1e-6 * 2 * 14)


def test_messages_of_several_chunks_are_packed_and_unpacked():
    """Of 4 ranks, each sends and receives half of the buffer in two chunks, in the first and in the last round."""
    plain = cost("all_reduce", "halving_doubling", uniform(4), 400)
    packed = cost("all_reduce", "halving_doubling", uniform(4, copy=0.125), 400)
    assert packed.seconds - plain.seconds == 4 * 200 * 0.125


def test_half_precision_sends_its_partial_sums_wide():
    cluster = uniform(8)
    wide, half = (cost("all_reduce", "ring", cluster, 800, itemsize=2, acc_itemsize=acc) for acc in (4, 2))
    assert half.bytes_sent_max == 1400
    assert wide.bytes_sent_max == 1400 + 6 * 100
    assert wide.seconds > half.seconds


def test_one_rank_only_copies():
    found = cost("all_gather", "ring", cluster_of((0,), copy=1.0), 100)
    assert (found.seconds, found.rounds, found.bytes_sent_max, found.wire_bytes_max) == (100.0, 0, 0.0, 0.0)


def test_placement():
    assert place(7, 3) == (0, 0, 0, 1, 1, 1, 2)
    assert place(7, 3, round_robin=True) == (0, 1, 2, 0, 1, 2, 0)
    assert cluster_of((5, 2, 5)).members() == {5: [0, 2], 2: [1]}


def test_a_shrunk_cluster_keeps_whole_nodes_and_the_root():
    smaller, root, share = scaled.shrunk(cluster_of(place(64, 8, round_robin=True)), 20, 13)
    assert (smaller.size, share) == (16, 0.25)
    assert sorted(len(ranks) for ranks in smaller.members().values()) == [8, 8]
    assert smaller.nodes[root] == 13 % 8
    smaller, root, _ = scaled.shrunk(cluster_of(place(64, 32)), 20, 50)
    assert (smaller.size, smaller.nodes[root]) == (20, 1)
    assert scaled.doublings(0.25) == 2


def test_fit_finds_the_link():
    points = [(n, 5e-6 + n * 1e-9) for n in (1, 1000, 10**6)]
    assert fit(points).alpha == pytest.approx(5e-6)
    assert fit(points).beta == pytest.approx(1e-9)
    skewed = [(n, seconds * factor) for (n, seconds), factor in zip(points, (1.1, 0.95, 1.02), strict=True)]
    assert fit(skewed).beta == pytest.approx(1e-9, rel=0.1)
    assert fit(skewed).alpha == pytest.approx(5e-6, rel=0.1)


def test_fit_gives_no_negative_times():
    falling = fit([(1, 2.0), (1000, 1.0)])
    assert falling.beta == 0
    assert falling.alpha == pytest.approx(1.2)
    steep = fit([(10, 1e-9), (1000, 1.0)])
    assert steep.alpha == 0
    assert steep.beta > 0


@pytest.mark.parametrize(
    "points", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)], [(1, float("nan")), (2, 1)]]
)
def test_fit_refuses(points):
    with pytest.raises(ArgumentError, match="must be"):
        fit(points)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Link(alpha=-1, beta=0), r"Link.alpha must be a time of 0 or more \(got -1\)"),
        (lambda: Link(alpha=0, beta=float("nan")), r"Link.beta must be"),
        (lambda: cluster_of((0, 1), size=3), r"a node number for each of the 3 ranks \(got '2 of them'\)"),
        (lambda: cluster_of((), size=0), r"Cluster.size must be 1 or more"),
        (lambda: cluster_of((0,), wires=0), r"Cluster.wires must be 1 or more"),
        (lambda: cluster_of((0,), gamma=float("inf")), r"Cluster.gamma must be"),
        (lambda: place(4, 0), r"ranks per node must be 1 or more"),
        (lambda: cost("all_reduce", "rign", uniform(2), 1), "algorithm must be one of .*ring"),
        (lambda: cost("reduce_all", "ring", uniform(2), 1), "operation must be one of all_reduce"),
        (lambda: cost("all_reduce", "ring", uniform(2), -1), "nbytes must be 0 or more"),
        (lambda: cost("all_reduce", "ring", uniform(2), float("nan")), "nbytes must be 0 or more"),
        (lambda: cost("broadcast", "tree", uniform(2), 1, root=2), "root must be a rank, 0 to 1"),
        (lambda: cost("all_reduce", "ring", uniform(2), 1, pieces=0), "pieces must be 1 or more"),
        (lambda: cost("all_reduce", "ring", uniform(2), 1, itemsize=0), "itemsize must be 1 or more"),
        (lambda: cost("all_reduce", "ring", uniform(2), 1, method="guess"), "method must be one of events, sampled"),
        (lambda: lower_bound("reduce_all", uniform(2), 1), "operation must be"),
    ],
)  # fmt: skip
def test_bad_values_are_errors(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()
