"""mpizero report: what it says of records that are made up, how it puts runs together, and what it leaves out."""

import fcntl
import json
import signal
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.dumps import WALL, WORLD, alive, dump

from mpizero.cli import main
from mpizero.cli.arrivals import latecomers, operations
from mpizero.cli.dump_trace import trace_of
from mpizero.cli.dumps import find, read, read_all
from mpizero.cli.runs import Run, runs_of
from mpizero.cli.verdict import verdict
from mpizero.comm.record import DIED, DONE, ENTRIES, FAILED, HEADER, LEFT, SIZE, STOPPED

REDUCE = "all_reduce(4 elements of float32, op sum) by loads"
GATHER = "all_gather(8 elements of float32) by ring"
WENT = [(REDUCE, 1.0, 1.1), (REDUCE, 2.0, 2.1)]
WAITS = [*WENT, (GATHER, 3.0, 0.0, "blocks.8")]
NOW = time.time() - WALL
"""The present in the times of the records: a rank that is alive is asked now."""


@pytest.fixture
def made(tmp_path):
    """Make records in a folder; `made.run()` is what is read of them."""

    def make(rank, *args, **options):
        return dump(tmp_path / "records", rank, *args, **options)

    make.folder = tmp_path / "records"
    make.run = lambda: Run(read_all(find([make.folder])[0])[0])
    return make


def first(made):
    return verdict(made.run())[0]


def said(made):
    return "\n".join(verdict(made.run()))


def report(capsys, *words):
    code = main(["report", *map(str, words)])
    return code, *capsys.readouterr()


def test_one_rank_went_without_a_word(made):
    for rank in (0, 1):
        made(rank, WAITS, state=STOPPED, cause="SIGTERM", ended=3.5)
    made(2, WENT, host="b")
    assert first(made).startswith(
        "Rank 2 on b ended without a word (killed, or os._exit); it was in its own code after "
    )
    assert "all_reduce #2" in first(made)
    assert "Ranks 0-1 waited in all_gather #3 (blocks.8) for rank 2 since" in said(made)
    assert "SIGTERM" not in said(made)


def test_when_all_went_without_a_word_the_one_that_was_waited_for_is_likely_the_first(made):
    for rank in (0, 2):
        made(rank, WAITS)
    made(1, WENT)
    assert first(made).startswith("No rank said why it ended; rank 1 on a was likely the first (killed, or os._exit): ")


def test_all_went_and_none_waited(made):
    for rank in range(3):
        made(rank, WENT)
    assert first(made).startswith("No rank said why it ended, and none waited for another")


def test_a_rank_that_raised_in_its_own_code(made):
    for rank in (0, 1):
        made(rank, WAITS, state=STOPPED, cause="SIGTERM", ended=4.0)
    made(2, WENT, state=DIED, cause="ZeroDivisionError: the reason", ended=2.5)
    assert first(made).startswith(
        "Rank 2 on a raised ZeroDivisionError: the reason; it was in its own code, 0.4 s after all_reduce #2 at "
    )


def test_of_ranks_that_raised_the_first_is_the_cause(made):
    made(0, WENT, state=DIED, cause="KeyError: late", ended=3.0)
    made(1, WENT, state=DIED, cause="KeyError: early", ended=2.5)
    assert "early" in first(made)
    assert "late" not in said(made)


def test_a_time_out_is_a_consequence(made):
    for rank in (0, 1):
        calls = [*WENT, {"what": GATHER, "start": 3.0, "end": 9.0, "state": FAILED}]
        made(rank, calls, state=DIED, cause="CollectiveTimeoutError: all_gather waited 6 s for rank 2", ended=9.0)
    made(2, WENT)
    assert first(made).startswith("Rank 2 on a did not come, and ended without a word, before the job did or with it;")
    assert "Ranks 0-1 waited in all_gather #3 for rank 2" in said(made)


def test_a_rank_that_left_while_others_wait(made):
    for rank in (0, 1):
        made(rank, WAITS)
    made(2, WENT, state=LEFT, cause="exit code 0", ended=2.6)
    assert first(made).startswith("Rank 2 on a left (exit code 0); it was in its own code, 0.5 s after all_reduce #2")


def test_a_rank_that_was_killed_inside_a_call_that_all_have_entered(made):
    for rank in (0, 2):
        made(rank, WAITS, state=STOPPED, cause="SIGTERM", ended=5.0)
    made(1, WAITS)
    assert first(made).startswith("Rank 1 on a ended without a word (killed, or os._exit); it was in all_gather #3")


def test_all_left_well(made):
    for rank in range(3):
        made(rank, WENT, state=LEFT, ended=5.0)
    assert said(made) == "All 3 ranks left by their own exit."


@pytest.mark.parametrize("other", ["all_gather(8 elements of float32)", "all_reduce(5 elements of float32, op sum)"])
def test_a_mismatch_says_who_called_what(made, other):
    for rank in (0, 2):
        made(rank, [*WENT, (REDUCE, 3.0, 0.0)])
    made(1, [*WENT, (f"{other} by direct", 3.0, 0.0)])
    assert first(made) == (
        "The ranks differ in call 3 on the communicator of ranks 0-2: ranks 0,2 called "
        f"all_reduce(4 elements of float32, op sum), rank 1 called {other}."
    )


def test_a_mismatch_of_what_the_calls_are_about(made):
    for rank, label in enumerate(["blocks.1", "blocks.2", "blocks.1"]):
        made(rank, [(REDUCE, 3.0, 0.0, label)])
    assert "rank 1 called all_reduce(4 elements of float32, op sum) for blocks.2" in first(made)


def test_how_a_call_is_done_is_no_mismatch(made):
    for rank in range(3):
        made(rank, [(f"barrier() by {rank}", 1.0, 1.1)])
    assert made.run().mismatches == []


def test_ranks_that_wait_in_a_circle(made):
    groups = {WORLD: range(2), 5: range(2), 6: range(2)}
    for rank, uid in enumerate((5, 6)):
        made(rank, [{"what": "barrier()", "uid": uid, "start": 1.0, "end": 0.0}], size=2, groups=groups)
    assert first(made) == (
        "Ranks wait for each other in a circle: rank 0 in barrier #1 on communicator 1 for rank 1, "
        "rank 1 in barrier #1 on communicator 2 for rank 0."
    )


def test_who_is_behind(made):
    made(0, [(REDUCE, n, n + 0.1) for n in range(1, 21)])
    made(1, [(REDUCE, n, n + 0.1) for n in range(1, 20)])
    made(2, [(REDUCE, n, n + 0.1) for n in range(1, 7)])
    assert made.run().behind == {0: 0, 1: 1, 2: 14}


def test_calls_that_fell_out_of_the_ring_are_not_missed(made):
    """Of a communicator that was used before the ring's first call nothing is known, and nothing said."""
    groups = {WORLD: range(2), 5: range(2)}
    old = {"what": "barrier()", "uid": 5, "start": 0.5, "end": 0.6, "sequence": 40}
    made(0, [old, *[("barrier()", n, n + 0.1) for n in range(1, ENTRIES)]], size=2, groups=groups)
    made(1, [old, *[("barrier()", n, n + 0.1) for n in range(1, ENTRIES + 1)]], size=2, groups=groups)
    run = made.run()
    assert len(run.ranks[1].calls) == ENTRIES
    assert run.behind == {0: 1, 1: 0}
    assert run.waits == []


def test_a_rank_without_a_record_is_missed(made, capsys):
    for rank in (0, 1):
        made(rank, WAITS)
    code, out, _ = report(capsys, made.folder)
    assert code == 0
    assert out.startswith("2 of 3 ranks on a, ")
    assert "No record here of rank 2: copy the folders of all hosts together" in out
    assert "Rank 2 of which no record is here had not entered what others wait in." in out
    made(1, WENT)
    assert [wait.missing for wait in made.run().waits] == [(1,)], "nobody has to be guessed at"


def test_a_job_at_work(made):
    paths = [made(rank, [*WENT, (REDUCE, NOW, NOW + 0.1)]) for rank in range(3)]
    with alive(*paths):
        assert said(made) == "All 3 ranks are at work; none waits for long."
    assert "No rank said why" in said(made)


def test_a_rank_that_is_stopped_is_named_while_the_job_lives(made):
    paths = [made(rank, WAITS) for rank in (0, 1)]
    third = made(2, WENT)
    with alive(*paths), alive(third) as process:
        data = bytearray(third.read_bytes())
        np.frombuffer(data, HEADER, 1)[0]["pid"] = process.pid
        third.write_bytes(data)
        process.send_signal(signal.SIGSTOP)
        while read(third).process != "T":
            time.sleep(0.01)
        assert first(made).startswith("Rank 2 on a has not entered all_gather #3 (blocks.8) and is stopped (SIGSTOP)")


def test_reading_takes_no_lock(made, monkeypatch):
    made(0, WENT)
    monkeypatch.setattr(fcntl, "lockf", lambda *_: pytest.fail("a lock"))
    assert made.run().size == 3
    assert [path.name for path in made.folder.iterdir()] == ["000000.record"]


def test_records_that_share_a_communicator_by_way_of_others_are_one_run(tmp_path):
    groups = [{1: (0, 1)}, {1: (0, 1), 2: (1, 2)}, {2: (1, 2)}]
    paths = [dump(tmp_path / "one", rank, WENT, groups=each) for rank, each in enumerate(groups)]
    paths += [dump(tmp_path / "two", rank, WENT, groups={9: range(3)}, began=500.0) for rank in range(3)]
    runs = runs_of(read_all(paths)[0])
    assert [[each.rank for each in run.ranks] for run in runs] == [[0, 1, 2], [0, 1, 2]]
    assert [run.began - WALL for run in runs] == [500.0, 0.0]


def test_ranks_of_a_job_that_died_while_it_started_are_joined(tmp_path):
    paths = [dump(tmp_path / "one", rank, groups={}, began=0.1 * rank) for rank in range(3)]
    paths += [dump(tmp_path / "two", 0, groups={}, began=0.2), dump(tmp_path / "two", 1, groups={}, command="other.py")]
    paths += [dump(tmp_path / "two", 2, groups={}, began=100.0)]
    runs = runs_of(read_all(paths)[0])
    assert sorted(len(run.ranks) for run in runs) == [1, 1, 1, 3]


def test_the_newest_run_is_reported_and_the_others_in_a_line(tmp_path, capsys):
    for number in range(3):
        for rank in range(2):
            dump(tmp_path / f"{number}", rank, WENT, 2, groups={number + 1: range(2)}, began=10.0 * number)
    code, out, _ = report(capsys, tmp_path)
    assert code == 0
    assert out.count("rank  host") == 1
    assert "2 older runs, which --all reports too:" in out
    assert out.count("2 of 2 ranks  train.py: No rank said") == 2
    assert report(capsys, tmp_path, "--all")[1].count("rank  host") == 3
    found = json.loads(report(capsys, tmp_path, "--json")[1])
    assert [len(found["runs"]), len(found["older_runs"])] == [1, 2]


def test_what_is_no_record_is_said_and_the_rest_used(made, capsys):
    for rank in range(3):
        made(rank, WENT)
    whole = (made.folder / "000000.record").read_bytes()
    (made.folder / "cut.record").write_bytes(whole[: SIZE // 2])
    (made.folder / "empty.record").touch()
    (made.folder / "long.record").write_bytes(whole + b"x")
    (made.folder / "other.record").write_bytes(b"x" * SIZE)
    (made.folder / "folder.record").mkdir()
    (made.folder / "copy.record").write_bytes(whole)
    (made.folder / "notes.txt").touch()
    code, out, err = report(capsys, made.folder, made.folder / "none", made.folder / "notes.txt")
    assert code == 0
    assert out.startswith("3 ranks on a, ")
    told = {Path(line.split(": ")[1]).name: line.partition(".record: ")[2] for line in err.splitlines()}
    assert set(told) == {"cut.record", "empty.record", "long.record", "other.record", "folder.record", "none"} | {
        "notes.txt",
        "copy.record",
    }
    assert told["cut.record"] == f"cut short, {SIZE // 2} of {SIZE} bytes: copy it again; left out"
    assert told["empty.record"] == "empty; left out"
    assert told["long.record"] == told["other.record"] == "no flight record; left out"
    assert told["folder.record"] == "not a file; left out"
    assert told["copy.record"].startswith("the same record as ")
    assert "none: no such file; left out" in err


def test_a_damaged_record_is_said(made, capsys):
    path = made(0, WENT)
    data = path.read_bytes().replace(b"\x03\x000-2", b"\x03\x000-x")
    path.write_bytes(data)
    code, _, err = report(capsys, path)
    assert code == 1
    assert err.splitlines() == [
        f"mpizero report: {path}: damaged: its list of communicators makes no sense; left out",
        f"mpizero report: no flight record in {path}",
    ]


def test_a_folder_that_may_not_be_read(made, capsys, monkeypatch):
    made(0, WENT)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    code, _, err = report(capsys, made.folder)
    assert code == 1
    assert f"{made.folder}: Permission denied; left out" in err


def test_nothing_to_report(tmp_path, capsys, monkeypatch):
    assert report(capsys, tmp_path) == (1, "", f"mpizero report: no flight record in {tmp_path}\n")
    monkeypatch.setenv("MPIZERO_RECORD", str(tmp_path / "none"))
    assert report(capsys)[0] == 1
    monkeypatch.setenv("MPIZERO_RECORD", "0")
    code, _, err = report(capsys)
    assert code == 2
    assert "MPIZERO_RECORD must be a folder (got '0')" in err


def test_the_default_folder_is_this_hosts(made, capsys, monkeypatch):
    made(0, WENT, size=2)
    monkeypatch.setenv("MPIZERO_RECORD", str(made.folder))
    assert report(capsys)[1].startswith("1 of 2 ranks on a, ")


def late(made):
    """Ten calls to which rank 2 comes 0.2 s after rank 1, who comes 0.1 s after rank 0; the first one it leads."""
    for rank in range(3):
        calls = [(REDUCE, 1.0 - 0.01 * rank, 1.5)]
        calls += [(REDUCE, n + (0.0, 0.1, 0.3)[rank], n + 0.5) for n in range(2, 12)]
        made(rank, calls, host="ab"[rank // 2])


def test_who_comes_last(made):
    late(made)
    found = {each.rank: each for each in latecomers(made.run())}
    assert list(found) == [2, 0]
    assert (found[2].times, found[2].of, found[0].times) == (10, 11, 1)
    assert found[2].middle == pytest.approx(0.2, abs=1e-5)
    assert found[2].waited == pytest.approx(10 * (0.3 + 0.2), abs=1e-5)
    assert found[0].longest == pytest.approx(0.01, abs=1e-5)


def test_where_the_time_goes(made):
    late(made)
    made(0, [(REDUCE, 1.0, 1.5), (GATHER, 2.0, 4.0), (GATHER, 5.0, 0.0)], size=3)
    gathers, reductions = sorted(operations(made.run()), key=lambda each: each.name)
    assert (gathers.name, gathers.algorithm, gathers.calls, gathers.nbytes) == ("all_gather", "ring", 1, 16)
    assert gathers.per_rank == pytest.approx(2.0 / 3, abs=1e-5)
    assert (reductions.algorithm, reductions.calls) == ("loads", 23)


def test_ranks_of_a_host_are_put_on_one_clock(made):
    """Each rank read the wall clock for itself; of another host of the same name it is another clock."""
    for rank, wall in enumerate((WALL, WALL + 0.01, WALL + 50.0)):
        made(rank, WENT, wall=wall)
    assert [each.calls[0].start - WALL for each in made.run().ranks] == pytest.approx([1.0, 1.0, 51.0], abs=1e-5)


@pytest.mark.parametrize("size", [3, 40])
def test_lines_are_short_enough_to_read(made, capsys, size):
    for rank in range(size):
        calls = [
            (f"{REDUCE} {'x' * 40}", 1.0, 1.1),
            (GATHER, 2.0, 0.0, "gradients of blocks.3.norm1.weight and 11 more"),
        ]
        made(rank, calls[: 1 + (rank != 1)], size, host=f"node-{rank // 4:04d}.cluster", cause="y " * 99, state=DIED)
    _, out, _ = report(capsys, made.folder)
    assert max(map(len, out.splitlines())) <= 100
    table = next(part for part in out.split("\n\n") if part.lstrip().startswith("rank ")).splitlines()
    assert len(table) == 1 + (3 if size == 3 else 2)
    assert size == 3 or table[1].split()[:3] == ["0,2-39", "10", "hosts"]


def test_the_trace_has_what_the_format_asks_for(made, tmp_path, capsys):
    late(made)
    dump(made.folder, 1, [(REDUCE, 1.0, 1.5), (REDUCE, 2.1, 2.5), (GATHER, 2.3, 3.0, "blocks.8"), (REDUCE, 4.0, 0.0)])
    path = tmp_path / "trace.json"
    assert report(capsys, made.folder, "--trace", path)[0] == 0
    trace = json.loads(path.read_text())
    events = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0
        events[event["ph"]].append(event)
    assert set(events) == {"X", "M", "i", "s", "f"}
    assert len(events["X"]) == 11 + 4 + 11
    lanes = defaultdict(list)
    for event in events["X"]:
        assert event["dur"] >= 0
        assert set(event["args"]) == {"call", "algorithm", "label", "nbytes", "number", "state"}
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {pid for pid, _ in lanes} == {0, 1, 2}
    assert len(lanes) == 4, "rank 1 had two calls under way together"
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    named = [event for event in events["X"] if event["name"] == "all_gather blocks.8"]
    assert [event["args"]["algorithm"] for event in named] == ["ring"]
    starts, ends = ({event["id"]: event for event in events[phase]} for phase in "sf")
    assert starts.keys() == ends.keys()
    for number, end in ends.items():
        assert end["bp"] == "e"
        assert end["ts"] >= starts[number]["ts"]
        assert any(low <= end["ts"] <= high for low, high in lanes[end["pid"], end["tid"]])
    (under_way,) = [event for event in events["X"] if event["args"]["state"] == "under way"]
    assert under_way["ts"] + under_way["dur"] == pytest.approx(11.5e6, abs=10)


def test_the_trace_of_a_rank_without_calls(made):
    made(0, [], size=1)
    assert {event["ph"] for event in trace_of(made.run())["traceEvents"]} == {"M", "i"}


@pytest.mark.parametrize("words", [["--trace", "no/such/folder/t.json"], ["--trace", "t.json", "--all"]])
def test_a_trace_that_cannot_be_written(tmp_path, capsys, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        dump(tmp_path / f"{number}", 0, WENT, 1, groups={number + 1: range(1)}, began=float(number))
    code, _, err = report(capsys, tmp_path, *words)
    assert code == 2
    assert "--trace must be " in err


def test_json(made, capsys):
    for rank in (0, 1):
        made(rank, WAITS, state=STOPPED, cause="SIGTERM", ended=3.5)
    made(2, [*WENT, {"what": REDUCE, "start": 3.0, "end": 3.1, "state": DONE}], host="b")
    found = json.loads(report(capsys, made.folder, "--json")[1])
    assert found["schema_version"] == 1
    (run,) = found["runs"]
    assert run["verdict"][0].startswith("The ranks differ in call 3")
    assert run["mismatches"][0]["calls"]["2"] == {"call": REDUCE, "label": ""}
    assert [rank["state"] for rank in run["ranks"]] == ["was ended", "was ended", "no word"]
    assert run["ranks"][0]["waits"][0]["missing"] == []
    assert run["hosts"] == ["a", "b"]
    assert {"latecomers", "operations", "communicators", "files", "began", "until"} <= run.keys()
