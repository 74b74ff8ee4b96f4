"""`mpizero simulate`: what it prints, and what it refuses."""

import json

import pytest

from mpizero.cli import main
from mpizero.cli.quantities import per_byte_of, seconds_of, show_bytes, show_seconds
from mpizero.collectives import algorithms_of
from mpizero.errors import ArgumentError

SMALL = ["simulate", "all_reduce", "--ranks", "16", "--per-node", "4", "--bytes", "1M"]


def told(capsys, *words):
    assert main([*SMALL, *words]) == 0
    return capsys.readouterr().out


def test_a_table_of_all_algorithms_the_fastest_first(capsys):
    text = told(capsys)
    assert text.startswith("all_reduce of 1 MiB of float32 over 16 ranks on 4 nodes of 4 ranks\n")
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split()[:2] == ["algorithm", "rounds"]
    assert {line.split()[0] for line in table[1:]} == {entry.name for entry in algorithms_of("all_reduce")}
    shares = [float(word.rstrip("%")) for line in table[1:] for word in line.split() if word.endswith("%")]
    assert len(shares) == len(table) - 1
    assert shares == sorted(shares, reverse=True)
    assert "Lower bound: " in text


def test_algorithms_can_be_chosen(capsys):
    lines = told(capsys, "--algorithm", "tree,ring,tree").split("\n\n")[1].splitlines()
    assert sorted(line.split()[0] for line in lines[1:]) == ["ring", "tree"]


def test_json_has_the_figures(capsys):
    slow = ["--alpha", "0s,1ms", "--beta", "inf,1GB/s", "--gamma", "inf", "--copy", "inf"]
    found = json.loads(told(capsys, "--json", "--algorithm", "ring", *slow))
    (row,) = found["algorithms"]
    expected = 30 * (1e-3 + (1 << 20) / 16 / 1e9)
    assert row["seconds"] == pytest.approx(expected)
    assert row["algbw_GBs"] == pytest.approx((1 << 20) / expected / 1e9)
    assert row["busbw_GBs"] == pytest.approx(row["algbw_GBs"] * 30 / 16)
    assert (row["algorithm"], row["rounds"], row["bytes_sent_max"]) == ("ring", 30, 30 * (1 << 16))
    assert row["share_of_bound"] == pytest.approx(found["lower_bound_seconds"] / expected)
    assert sum(row["terms"].values()) == pytest.approx(expected)
    assert found["schema_version"] == 1
    assert (found["ranks"], found["nodes"], found["nbytes"]) == (16, 4, 1 << 20)


def test_every_option_counts(capsys):
    def seconds(*words):
        found = json.loads(told(capsys, "--json", "--algorithm", "double_tree", *words))
        return found["algorithms"][0]["seconds"]

    plain = seconds()
    for words in (
        ["--ranks", "32"], ["--per-node", "2"], ["--bytes", "2M"], ["--placement", "round-robin"], ["--alpha", "1us"],
        ["--beta", "1GB/s"], ["--wires", "2"], ["--gamma", "1GB/s"], ["--post", "1us"], ["--pieces", "3"],
        ["--dtype", "bfloat16"],
    ):  # fmt: skip
        assert seconds(*words) != plain, words


def test_a_root_and_packing_count(capsys):
    def seconds(*words):
        assert main(["simulate", *words, "--ranks", "13", "--per-node", "5", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["algorithms"][0]["seconds"]

    broadcast = ["broadcast", "--algorithm", "tree"]
    assert seconds(*broadcast) != seconds(*broadcast, "--root", "12")
    halving = ["all_reduce", "--algorithm", "halving_doubling"]
    assert seconds(*halving) < seconds(*halving, "--copy", "1GB/s")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "0"], "--ranks must be a whole number, 1 or more (got '0')"),
        (["--ranks", "4.5"], "--ranks must be"),
        (["--per-node", "-1"], "--per-node must be"),
        (["--bytes", "64Q"], "--bytes must be"),
        (["--bytes", "0"], "--bytes must be"),
        (["--algorithm", "rign"], "--algorithm must be one of"),
        (["--algorithm", "native"], "--algorithm must be one of"),
        (["--algorithm", ""], "--algorithm must be one of"),
        (["--placement", "random"], "--placement must be one of block, round-robin (got 'random')"),
        (["--alpha", "2"], "--alpha must be a number with s, ms, us or ns behind it (got '2')"),
        (["--alpha", "1us,2us,3us"], "--alpha must be one value, or two with a comma between"),
        (["--beta", "10GB"], "--beta must be a rate above 0"),
        (["--beta", "0GB/s"], "--beta must be a rate above 0"),
        (["--gamma", "1us"], "--gamma must be a rate above 0"),
        (["--copy", ""], "--copy must be"),
        (["--post", "1GB/s"], "--post must be"),
        (["--wires", "0"], "--wires must be"),
        (["--pieces", "0"], "--pieces must be"),
        (["--root", "16"], "--root must be a rank, 0 to 15 (got 16)"),
        (["--dtype", "int3"], "--dtype must be one of float32"),
    ],
)  # fmt: skip
def test_bad_values_exit_2_and_say_why(words, text, capsys):
    assert main([*SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_bad_operations_exit_2(capsys):
    assert main(["simulate", "reduce_all", "--ranks", "4"]) == 2
    assert "operation must be one of all_reduce" in capsys.readouterr().err


def test_the_number_of_ranks_is_needed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "all_reduce"])
    assert ended.value.code == 2
    assert "--ranks" in capsys.readouterr().err


def test_one_rank_takes_no_time_to_speak_of(capsys):
    assert main(["simulate", "barrier", "--ranks", "1"]) == 0
    assert "0 s" in capsys.readouterr().out


def test_times_and_rates():
    assert seconds_of("x", "2us") == pytest.approx(2e-6)
    assert seconds_of("x", "0.5 ms") == pytest.approx(5e-4)
    assert seconds_of("x", "1e-3s") == pytest.approx(1e-3)
    assert per_byte_of("x", "12.5GB/s") == pytest.approx(8e-11)
    assert per_byte_of("x", "100Gbit/s") == pytest.approx(8e-11)
    assert per_byte_of("x", "1B/s") == 1
    assert per_byte_of("x", "inf") == 0
    for text in ("", "us", "-1us", "1 hour", "1us "):
        with pytest.raises(ArgumentError, match="x must be"):
            seconds_of("x", text)


def test_numbers_for_people():
    assert [show_seconds(value) for value in (0, 1.5, 0.25, 2e-6, 3e-9)] == ["0 s", "1.5 s", "250 ms", "2 us", "3 ns"]
    assert [show_bytes(value) for value in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5 GiB"]
