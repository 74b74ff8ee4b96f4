"""Profiles of made-up spans, with figures worked out by hand, and their traces read back."""

import json
import math
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from torch import nn

import mpizero as mz
from mpizero.comm import run_loopback
from mpizero.errors import ShardError
from mpizero.shard import Profile, runtime_of
from mpizero.shard.spans import Span, covered, steps_of
from mpizero.shard.trace import trace_of

MIB = 1 << 20
BEFORE = [Span("gather", "a", -2, -1, 64), Span("reduce", "b", -1, 0.25, 64)]
FIRST = [
    Span("forward", "", 0, 4),
    Span("agree", "", 0, 0.5),
    Span("gather", "a", 0.5, 2, 2 * MIB),
    Span("wait", "a", 1, 2),
    Span("gather", "b", 1.5, 3, 4 * MIB),  # begins while that of a is under way
    Span("backward", "", 4, 9),
    Span("reduce", "b", 5, 8, 4 * MIB),
    Span("reduce", "a", 7, 9.5, 2 * MIB),
    Span("wait", "a", 9, 9.5),
    Span("step", "", 9.5, 10),
    Span("gather", "a", 9.75, 11, 2 * MIB),  # issued in the first step, there in the second
]
SECOND = [
    Span("forward", "", 10, 13),
    Span("wait", "a", 10, 11),
    Span("backward", "", 13, 15),
    Span("reduce", "a", 14, 15, 2 * MIB),
    Span("wait", "a", 14, 15),
    Span("step", "", 15.5, 16),
]
UNFINISHED = [Span("forward", "", 16, 18), Span("gather", "b", 16.5, 17, 4 * MIB), Span("wait", "b", 16.5, 17)]
ALL = [*BEFORE, *FIRST, *SECOND, *UNFINISHED]

SUMMARY = """\
rank 0 of 1, medians of 2 steps

                    ms  % of step
step           8000.00      100.0
  forward      3500.00       43.8
  backward     3500.00       43.8
  optimizer     500.00        6.2
compute        6000.00       75.0
communication  4875.00       60.9
  hidden       2875.00       35.9
  exposed      2000.00       25.0
    waits      1750.00       21.9
    meetings    250.00        3.1

share of communication hidden: 37.1%

unit  gathers  gathered MiB  reductions  reduced MiB  waited ms
b         0.5          2.00         0.5         2.00       0.00
a           1          2.00           1         2.00    1750.00"""


def profiled(comm, spans):
    """A profile that began at 0 by the clock of the spans, and 1000 s after the wall clock's zero."""
    found = Profile(comm)
    found._start, found._wall = 0.0, 1000 * 10**9
    for span in spans:
        found.record(span)
    return found


def alone(body):
    return run_loopback(1, body)[0]


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(1, 2), (4, 6)], 3),
        ([(4, 6), (1, 2), (2, 3)], 4),
        ([(0, 5), (1, 2), (3, 7)], 7),
        ([(0, 1), (0, 3), (1, 1)], 3),
    ],
)
def test_a_union_counts_every_moment_once(intervals, length):
    assert covered(intervals) == length


@pytest.mark.parametrize("spans", [ALL, ALL[::-1]], ids=["in order", "backwards"])
def test_two_steps_by_hand(spans):
    first, second = steps_of(spans, 0)

    assert (first.seconds, first.forward, first.backward, first.optimizer) == (10, 4, 5, 0.5)
    assert (first.waited, first.agreed, first.exposed, first.compute) == (1.5, 0.5, 2, 8)
    assert first.communication == 0.5 + 2.5 + 4.5 + 0.25
    assert first.hidden == 5.75
    assert first.hidden_share == 5.75 / 7.75

    assert (second.seconds, second.forward, second.backward, second.optimizer) == (6, 3, 2, 0.5)
    assert (second.waited, second.agreed, second.exposed, second.compute) == (2, 0, 2, 4)
    assert (second.communication, second.hidden, second.hidden_share) == (2, 0, 0)


def test_units_by_hand():
    """What was issued before the profile is not counted; what runs across a step's end counts where it was issued."""
    first, second = steps_of(ALL, 0)
    a, b = first.units["a"], first.units["b"]

    assert (a.gathers, a.gathered_bytes, a.reductions, a.reduced_bytes, a.waited) == (2, 4 * MIB, 1, 2 * MIB, 1.5)
    assert (b.gathers, b.gathered_bytes, b.reductions, b.reduced_bytes, b.waited) == (1, 4 * MIB, 1, 4 * MIB, 0)
    assert list(second.units) == ["a"]
    a = second.units["a"]
    assert (a.gathers, a.gathered_bytes, a.reductions, a.reduced_bytes, a.waited) == (0, 0, 1, 2 * MIB, 2)


def test_a_wait_outside_its_collective_hides_nothing():
    (step,) = steps_of([Span("gather", "a", 0, 1), Span("wait", "a", 1, 3), Span("step", "", 3, 4)], 0)

    assert (step.communication, step.exposed, step.hidden) == (1, 2, 0)


def test_a_collective_as_long_as_several_steps_gives_each_its_time():
    ends = [Span("step", "", end - 0.5, end) for end in (1, 2, 3)]
    steps = steps_of([*ends, Span("reduce", "a", 0.5, 2.25, 8)], 0)

    assert [step.communication for step in steps] == [0.5, 1, 0.25]
    assert [step.units["a"].reductions for step in steps] == [1, 0, 0]


def test_a_span_that_takes_no_time_counts():
    steps = steps_of([Span("step", "", 0, 1), Span("gather", "a", 1, 1, 8), Span("step", "", 1, 2)], 0)

    assert [sum(unit.gathers for unit in step.units.values()) for step in steps] == [0, 1]


@pytest.mark.parametrize("spans", [[], BEFORE, UNFINISHED])
def test_no_step_is_said_so(spans):
    found = alone(lambda comm: profiled(comm, spans))

    assert found.steps == ()
    assert found.summary().startswith("rank 0 of 1: no step was finished")


def test_a_step_without_communication_hides_none():
    found = alone(lambda comm: profiled(comm, [Span("forward", "", 0, 1), Span("step", "", 1, 2)]))

    assert math.isnan(found.steps[0].hidden_share)
    assert found.steps[0].compute == 2
    assert found.summary().endswith("no communication")


def test_the_summary_is_a_table_of_medians():
    found = alone(lambda comm: profiled(comm, ALL))

    assert found.summary() == SUMMARY


def exported(tmp_path, spans):
    path = tmp_path / "trace.json"
    alone(lambda comm: profiled(comm, spans).export(path))
    return json.loads(path.read_text())


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_what_the_format_asks_for(tmp_path):
    """Catapult's Trace Event Format: name, ph, pid and tid always; ts and dur for X; args.name for names."""
    trace = exported(tmp_path, ALL)

    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts", "args"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["tid"] != event["pid"]
    for event in complete(trace):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert len(complete(trace)) == len(ALL)


def test_the_trace_names_units_bytes_and_times(tmp_path):
    events = complete(exported(tmp_path, ALL))
    (found,) = (event for event in events if event["name"] == "gather b" and event["ts"] == 3.5e6)

    assert found["dur"] == 1.5e6
    assert found["args"] == {"nbytes": 4 * MIB}
    assert found["cat"] == "gather"
    assert {event["name"] for event in events if event["cat"] == "agree"} == {"agree"}
    assert next(event for event in events if event["cat"] == "wait")["args"] == {}


def test_lanes_tell_compute_waits_and_concurrent_collectives(tmp_path):
    trace = exported(tmp_path, ALL)
    lanes = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    used = {}
    for event in complete(trace):
        used.setdefault(lanes[event["tid"]], []).append(event)

    assert list(lanes.values()) == ["compute", "wait", "communication", "communication 2"]
    assert {event["cat"] for event in used["compute"]} == {"forward", "backward", "step"}
    assert {event["cat"] for event in used["wait"]} == {"wait", "agree"}
    assert [event["name"] for event in used["communication 2"]] == ["gather b", "reduce a"]
    for lane in ("communication", "communication 2"):
        ends = [(event["ts"], event["ts"] + event["dur"]) for event in used[lane]]
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))


def test_a_collective_inside_another_has_a_lane_of_its_own():
    rows = [("reduce", "c", 5, 6, 0), ("gather", "a", 0, 9, 0), ("gather", "b", 2, 4, 0), ("gather", "d", 9, 10, 0)]
    lanes = {event["name"]: event["tid"] for event in complete(trace_of([("here", rows)]))}

    assert lanes["gather a"] == lanes["gather d"]
    assert lanes["gather b"] == lanes["reduce c"] != lanes["gather a"]


def test_an_empty_trace_has_its_lanes(tmp_path):
    trace = exported(tmp_path, [])

    assert complete(trace) == []
    names = [event["args"].get("name") for event in trace["traceEvents"]]
    assert {"compute", "wait", "communication"} <= set(names)


def test_all_ranks_are_in_one_file(tmp_path):
    """Rank r began r seconds later by the wall clock, and recorded r + 1 spans at the same time of its own clock."""

    def body(comm):
        found = profiled(comm, [Span("gather", "über", second, second + 1, 8) for second in range(comm.rank + 1)])
        found._wall += comm.rank * 10**9
        found.export(tmp_path / f"{comm.rank}.json")

    run_loopback(3, body)
    trace = json.loads((tmp_path / "0.json").read_text())

    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    starts = [(event["pid"], event["name"], event["ts"]) for event in complete(trace)]
    assert starts == [(rank, "gather über", 1e6 * (rank + n)) for rank in range(3) for n in range(rank + 1)]
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert [named[rank].split(" on ")[0] for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    def body(comm):
        try:
            profiled(comm, FIRST).export(tmp_path / "nowhere" / "trace.json")
        except OSError as error:
            return str(error)
        return None

    texts = run_loopback(2, body)
    assert "nowhere" in texts[0]
    assert texts[1].startswith("rank 0 could not write the trace")


def sharded(comm):
    return mz.shard(nn.Linear(3, 3), comm, stage=0)


def test_a_model_has_one_profile_at_a_time():
    def body(comm):
        model, other = sharded(comm), sharded(comm)
        with mz.profile(model) as first:
            with pytest.raises(ShardError, match="only one at a time"), mz.profile(model):
                pass
            with mz.profile(other):
                pass
            runtime_of(model).observer(FIRST[0])
        with mz.profile(model) as second:
            pass
        return first.spans, second.spans, runtime_of(model).observer

    assert alone(body) == ((FIRST[0],), (), None)


def test_a_profile_ends_with_its_block_whatever_happens():
    def body(comm):
        model = sharded(comm)
        with pytest.raises(ZeroDivisionError), mz.profile(model):
            raise ZeroDivisionError
        return runtime_of(model).observer

    assert alone(body) is None


def test_only_a_sharded_model_is_profiled():
    with pytest.raises(ShardError, match=r"mpizero\.shard"), mz.profile(nn.Linear(3, 3)):
        pass
