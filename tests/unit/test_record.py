"""The flight record: what is written is read, of the living and the dead, half-written, and where there is no room."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.comm import About
from mpizero.comm import record as module
from mpizero.comm.record import (
    AT_RING,
    DIED,
    DONE,
    ENTRIES,
    ENTRY,
    FAILED,
    LEFT,
    MOST,
    OLD,
    RUNNING,
    STOPPED,
    TEXTS,
    UNDER_WAY,
    Record,
    clean,
    folder,
)
from mpizero.comm.recorded import Recorded
from mpizero.comm.stacks import where
from mpizero.comm.standing import LINES, Standing, died, grouped, has_done, standing
from mpizero.errors import ArgumentError

ROOT = Path(__file__).parent.parent.parent
UID = 1 << 40


@pytest.fixture
def mine(tmp_path):
    return Record(tmp_path / "1.record", rank=2, size=5)


def read(record):
    return Recorded(record.path, record.memory)


def gather(count=8):
    return About("all_gather", f"all_gather({count} elements)", nbytes=4 * count, algorithm="loads")


@pytest.fixture
def child(tmp_path):
    """Start a process that makes a record, runs a few lines and then waits; return it and its record's path."""
    started = []

    def start(body="", name="9.record"):
        path = tmp_path / name
        text = (
            "import sys, time\nfrom pathlib import Path\nfrom mpizero.comm import About\n"
            "from mpizero.comm.record import *\nfrom mpizero.comm.stacks import answer_for\n"
            f"mine = Record(Path({str(path)!r}), 0, 2)\n{body}\nprint('ready', flush=True)\n"
            "def stuck():\n    time.sleep(100)\nstuck()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process, path

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_who_it_is_and_what_it_called(mine):
    mine.open_group(UID, 1, [0, 1, 2, 4], "data")
    first = mine.begin(UID, 1, gather(), "blocks.7")
    mine.end(first)
    second = mine.begin(UID, 2, About("barrier"), "")
    found = read(mine)

    assert (found.rank, found.size, found.pid, found.state) == (2, 5, os.getpid(), RUNNING)
    assert abs(found.began + found.wall - time.time()) < 100
    assert [tuple(group) for group in found.groups()] == [(UID, 1, (0, 1, 2, 4), "data")]
    assert [(call.number, call.sequence, call.state) for call in found.calls()] == [(1, 1, DONE), (2, 2, UNDER_WAY)]
    call = found.call(UID, 1)
    assert (call.what, call.plain) == ("all_gather(8 elements) by loads", "all_gather(8 elements)")
    assert (call.title, call.nbytes) == ("all_gather #1 (blocks.7)", 32)
    assert found.began <= call.start <= call.end
    assert [call.number for call in found.under_way()] == [second]
    assert found.latest().number == second
    assert found.latest(UID + 1) is None
    assert found.call(UID, 3) is None
    mine.end(second, FAILED)
    assert found.call(UID, 2).state == FAILED
    assert found.under_way() == []


def test_a_text_is_written_once(mine):
    assert mine.text("blocks.0") == mine.text("blocks.0") != mine.text("blocks.1")
    assert read(mine).text(mine.text("blocks.1")) == "blocks.1"
    long = "é" * 20_000
    assert long.startswith(read(mine).text(mine.text(long)).rstrip("\N{REPLACEMENT CHARACTER}"))


def test_when_texts_have_no_room_calls_keep_their_names_and_the_end_its_cause(mine):
    for turn in range(TEXTS // 1000):
        mine.text(f"{turn} " + "x" * 1000)
    before = len(mine._texts)
    for turn in range(2000):
        mine.text(f"and {turn}")
    mine.end(mine.begin(UID, 1, gather(), "blocks.7"))
    mine.conclude(DIED, "ZeroDivisionError: " + "x" * 1000)
    found = read(mine)

    assert len(mine._texts) < before + 500
    assert found.latest().what == "all_gather"
    assert found.latest().label == "(no room for more texts)"
    assert found.cause.startswith("ZeroDivisionError: xxx")


def test_closed_communicators_give_their_rows_back(mine):
    for uid in range(1, 600):
        mine.open_group(uid, 0, [0, 1])
    assert len(read(mine).groups()) == module.GROUPS
    for uid in range(1, 600):
        mine.close_group(uid)
    assert read(mine).groups() == []
    mine.open_group(7, 0, [3, 1, 2])
    assert read(mine).groups()[0].members == (3, 1, 2)


def test_the_ring_keeps_the_last_calls(mine):
    old = mine.begin(UID, 1, gather(), "")
    for sequence in range(2, ENTRIES + 2):
        mine.end(mine.begin(UID + 1, sequence, gather(), ""))
    mine.end(old)  # its place is another's
    found = read(mine)

    assert [call.number for call in found.calls()] == list(range(2, ENTRIES + 2))
    assert found.under_way() == []
    assert found.latest().state == DONE
    assert found.call(UID, 1) is None
    assert found.has_wrapped


def test_an_entry_that_is_being_written_is_left_out(mine):
    for sequence in range(1, 4):
        mine.end(mine.begin(UID, sequence, gather(), ""))
    ring = np.frombuffer(mine.memory, ENTRY, ENTRIES, AT_RING)
    ring[2]["state"] = 0
    ring[3]["number"] = 0
    assert [call.sequence for call in read(mine).calls()] == [1]
    ring[1]["number"] = 2
    assert read(mine).calls() == []


def test_the_first_word_on_how_it_ends_counts(mine):
    mine.conclude(DIED, "ValueError: no")
    mine.conclude(STOPPED, "abort(1)")
    found = read(mine)
    assert (found.state, found.cause) == (DIED, "ValueError: no")
    assert found.ended >= found.began


def test_a_child_process_does_not_speak_for_its_parent(mine):
    pid = os.fork()
    if pid == 0:
        mine.conclude(DIED, "a child")
        mine.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert read(mine).state == RUNNING
    assert mine.path.exists()
    mine.remove()
    assert not mine.path.exists()


def test_alive_stopped_and_dead(child):
    process, path = child("mine.begin(5, 1, About('barrier'), '')")
    found, waits = Recorded(path), Recorded(path).latest()
    assert found.is_alive()
    assert standing(1, found, waits) == Standing(1, gone=False, text="waiting in it too")
    process.send_signal(signal.SIGSTOP)
    while "stopped" not in standing(1, found, waits).text:  # the kernel may take a moment; the test has a time-out
        time.sleep(0.001)
    assert found.is_alive()
    process.kill()
    process.wait()
    assert not found.is_alive()
    assert found.state == RUNNING
    assert died(found) == "died in barrier #1 (killed, or by os._exit)"
    assert standing(1, found, waits).gone


def test_where_a_process_is_in_its_own_code(child):
    process, path = child("answer_for(mine)")
    found = Recorded(path)
    assert where(found).startswith("<string>:")
    assert " in stuck < " in where(found)
    process.send_signal(signal.SIGSTOP)
    assert where(found) == ""


@pytest.mark.parametrize("body", ["", "import signal\nsignal.signal(46, lambda *_: None)\nanswer_for(mine)"])
def test_who_has_another_use_for_the_signal_is_not_asked(child, body):
    process, path = child(body)
    assert where(Recorded(path)) == ""
    assert process.poll() is None


def test_a_process_of_another_container_is_not_asked(child, monkeypatch):
    process, path = child("answer_for(mine)")
    monkeypatch.setattr("mpizero.comm.recorded.space", lambda: 1)
    process.send_signal(signal.SIGSTOP)
    found = Recorded(path)
    assert where(found) == ""
    assert "stopped" not in standing(1, found, None).text


def test_no_record_is_no_news():
    assert standing(1, None, None) == Standing(1, gone=False, text="its record cannot be read here")


def test_what_a_rank_that_left_has_done(mine):
    for sequence in (1, 2):
        mine.end(mine.begin(UID, sequence, gather(), ""))
    one, two = read(mine).calls()
    mine.end(mine.begin(UID, 3, gather(), ""), FAILED)
    failed = read(mine).latest()
    found = read(mine)
    assert has_done(found, two)
    assert not has_done(found, failed)
    assert not has_done(found, two._replace(sequence=4))
    assert not has_done(found, two._replace(what="broadcast(8 elements) by tree"))
    for sequence in range(ENTRIES - 1):  # of three calls the first two places are others' now
        mine.begin(UID + 1, sequence, gather(), "")
    assert found.call(UID, 1) is None
    assert has_done(found, one)
    assert not has_done(found, failed)
    mine.begin(UID + 1, ENTRIES, gather(), "")
    assert has_done(found, failed)  # not known any more: the time-out has to find it


def test_many_ranks_take_few_lines():
    same = [Standing(rank, gone=False, text="waiting in it too") for rank in range(100)]
    lines = grouped(same).splitlines()
    assert lines == ["  ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 88 more: waiting in it too"]
    apart = [Standing(rank, gone=False, text=f"in code of its own since {rank} s") for rank in range(100)]
    lines = grouped(apart).splitlines()
    assert len(lines) == LINES + 1
    assert lines[-1] == f"  and {100 - LINES} ranks more"


def made(place, name, state=RUNNING, ago=0.0):
    """Leave the record of a process that is gone, as far as this one sees, for which its own locks do not count."""
    record = Record(place / f"{name}.record", rank=0, size=1)
    record.stacks.touch()
    record.conclude(state, "")
    record._header["wall"] -= ago
    return record.path


def test_clean_removes_what_ended_well_and_what_is_old(tmp_path, child):
    _, living = child("mine.conclude(LEFT, '')", name="living.record")
    well, killed, failed = made(tmp_path, "a", LEFT), made(tmp_path, "b"), made(tmp_path, "c", DIED)
    old = made(tmp_path, "d", DIED, ago=OLD + 5)
    strange = tmp_path / "x.record"
    strange.write_text("something else")
    clean(tmp_path)

    assert living.exists()
    assert not well.exists()
    assert not well.with_suffix(".stacks").exists()
    assert killed.exists()
    assert failed.exists()
    assert failed.with_suffix(".stacks").exists()
    assert not old.exists()
    assert strange.exists()


def test_a_long_job_that_has_just_failed_is_not_old(tmp_path):
    path = made(tmp_path, "a", DIED, ago=OLD + 5)
    with path.open("r+b") as file:
        file.seek(AT_RING)
        file.write(np.array([(4096, 1, 1, 0, 0, 0, time.monotonic() + OLD, DONE, 0, 0)], ENTRY).tobytes())
    clean(tmp_path)
    assert path.exists()


def test_clean_leaves_the_newest_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    paths = [made(tmp_path, str(turn), DIED, ago=100.0 * turn) for turn in range(4)]
    clean(tmp_path)
    assert [path.exists() for path in paths] == [True, True, False, False]
    assert MOST >= 64


@pytest.fixture
def fresh(monkeypatch):
    """The process's record as before the first call."""
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=3, size=4))
    monkeypatch.setattr(module, "mpi", lambda: mpi)
    module.record.cache_clear()
    yield module.record
    module.record.cache_clear()


def test_a_folder_of_the_users(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("MPIZERO_RECORD", str(tmp_path / "deep" / "down"))
    found = fresh()
    assert found.path.parent == tmp_path / "deep" / "down"
    assert f"-{os.getpid()}-000003.record" in found.path.name
    assert found.path.stat().st_mode & 0o777 == 0o600
    assert fresh() is found


def test_by_default_each_user_has_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIZERO_RECORD", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    assert folder() == tmp_path / "mpizero-ada"

    def nameless():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert folder() == tmp_path / f"mpizero-{os.getuid()}"


def test_a_folder_of_another_user_is_not_used(fresh, monkeypatch, tmp_path, capfd):
    monkeypatch.delenv("MPIZERO_RECORD", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert fresh() is None
    assert "mpizero: rank 3 keeps no flight record" in capfd.readouterr().err
    assert [path.name for path in tmp_path.rglob("*.record")] == []


def test_no_record_where_none_is_wanted(fresh, monkeypatch, capfd):
    monkeypatch.setenv("MPIZERO_RECORD", "0")
    assert folder() is None
    assert fresh() is None
    assert capfd.readouterr().err == ""


def test_no_room_is_said_and_no_file_is_left(fresh, monkeypatch, tmp_path, capfd):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("MPIZERO_RECORD", str(tmp_path))
    monkeypatch.setattr("os.posix_fallocate", full)
    assert fresh() is None
    assert fresh() is None
    text = capfd.readouterr().err
    assert text.count("keeps no flight record ([Errno 28] No space left on device)") == 1
    assert "MPIZERO_RECORD names another folder" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 100, module.SIZE - 1, module.SIZE + 8])
def test_a_part_of_a_record_is_refused(mine, kept, tmp_path):
    path = tmp_path / "part"
    path.write_bytes((bytes(mine.memory) + b"more more")[:kept])
    with pytest.raises(ArgumentError, match=f"a flight record of {module.SIZE} bytes .got '{kept} bytes'"):
        Recorded(path)


def test_other_contents_are_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(bytes(module.SIZE))
    with pytest.raises(ArgumentError, match="other contents"):
        Recorded(path)
