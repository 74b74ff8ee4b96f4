"""`mpizero simulate train`: what it prints and draws, and what it refuses."""

import json

import pytest

from mpizero.cli import main

SMALL = ["simulate", "train", "--layers", "4", "--width", "512", "--ranks", "8", "--per-node", "4", "--flops", "10T"]


def told(capsys, *words):
    assert main([*SMALL, *words]) == 0
    return capsys.readouterr().out


def record(capsys, *words):
    return json.loads(told(capsys, "--json", *words))


def test_the_tables(capsys):
    text = told(capsys)
    assert text.startswith("transformer of 4 layers, width 512, stage 3, bf16, 8 ranks on 2 nodes\n")
    for word in ("step ", "compute ", "exposed communication", "idle", "tokens/s", "utilisation", "hierarchical",
                 "gathers of parameters", "reductions of gradients", "optimizer", "unit buffers"):  # fmt: skip
        assert word in text, word


def test_json_has_the_figures(capsys):
    found = record(capsys, "--batch", "2", "--context", "1024", "--peak", "20T")
    assert found["schema_version"] == 1
    assert (found["ranks"], found["nodes"], found["training"]["stage"]) == (8, 2, 3)
    assert found["compute"] + found["exposed"] + found["idle"] == pytest.approx(found["seconds"])
    assert found["tokens_per_second"] == pytest.approx(8 * 2048 / found["seconds"])
    assert found["utilisation"] == pytest.approx(found["flops_per_rank"] / 20e12)
    assert found["state"]["optimizer"] == pytest.approx(12 * found["parameters"] / 8)
    assert {row["kind"] for row in found["traffic"]} == {"meet", "gather", "reduce"}


def test_every_option_counts(capsys):
    plain = record(capsys)
    for words in (
        ["--ranks", "16"], ["--per-node", "2"], ["--layers", "5"], ["--width", "640"], ["--vocabulary", "9000"],
        ["--context", "1024"], ["--batch", "2"], ["--accumulate", "2"], ["--stage", "0"], ["--group", "4"],
        ["--precision", "fp32"], ["--prefetch", "0"], ["--bucket", "1G"], ["--reshard-after-forward", "no"],
        ["--flops", "5T"], ["--memory", "1GB/s"], ["--launch", "1ms"], ["--drive", "100MB/s"], ["--alpha", "1ms"],
        ["--beta", "1GB/s"], ["--wires", "4"], ["--gamma", "1GB/s"], ["--post", "1ms"],
        ["--straggle", "0.1"], ["--slow", "3:2"],
        ["--recompute"], ["--group", "4", "--node-shared"],
    ):  # fmt: skip
        assert record(capsys, *words)["seconds"] != plain["seconds"], words
    for moved in (["--offload", "optimizer=host", "--host-rate"], [*DISK, "--disk-rate"]):
        times = [record(capsys, *moved, rate)["seconds"] for rate in ("1GB/s", "100MB/s")]
        assert plain["seconds"] < times[0] < times[1]
    assert record(capsys, *DISK, "--group-bytes", "64K")["buffers"] < record(capsys, *DISK)["buffers"]
    kept = record(capsys, "--accumulate", "2", "--no-sync")
    assert kept["seconds"] < record(capsys, "--accumulate", "2")["seconds"]
    drawn = [record(capsys, "--straggle", "0.1", "--seed", seed)["seconds"] for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert record(capsys, "--choice", "best")["seconds"] <= plain["seconds"] * 1.0001


DISK = ["--device", "cpu", "--offload", "optimizer=disk,params=disk"]


def test_the_table_of_what_is_moved(capsys):
    text = told(capsys, *DISK)
    for word in ("exposed communication and offload", "parameters, by unit", "disk read", "optimizer's step",
                 "disk write", "on disk"):  # fmt: skip
        assert word in text, word
    found = record(capsys, *DISK)
    assert found["compute"] + found["exposed"] + found["idle"] == pytest.approx(found["seconds"])
    assert found["offload"]["params"] == "disk"
    assert found["outside"]["optimizer"] == pytest.approx(12 * found["parameters"] / 8)
    assert found["state"]["parameters"] == found["state"]["optimizer"] == 0
    assert {(row["kind"], row["link"]) for row in found["traffic"]} >= {
        ("read", "disk read"), ("stream", "disk read"), ("stream", "disk write")
    }  # fmt: skip


def test_parameters_alone_choose_a_shape(capsys):
    for number, least in (("7e9", 6.5e9), ("1T", 0.95e12), ("100M", 0.9e8)):
        assert main(["simulate", "train", "--params", number, "--ranks", "8", "--json"]) == 0
        assert least < json.loads(capsys.readouterr().out)["parameters"] < 1.1 / 0.95 * least


def test_a_timeline_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg"):
        target = tmp_path / f"step.{ending}"
        told(capsys, "--plot", str(target))
        assert target.stat().st_size > 5000
    told(capsys, *DISK, "--plot", str(tmp_path / "disk.svg"))
    assert "disk write" in (tmp_path / "disk.svg").read_text()
    text = (tmp_path / "step.svg").read_text()
    assert text.count("<path") > 20


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--stage", "4"], "--stage must be one of 0, 1, 2, 3 (got '4')"),
        (["--precision", "int8"], "--precision must be one of bf16, fp16, fp32"),
        (["--ranks", "0"], "--ranks must be a whole number, 1 or more"),
        (["--layers", "0"], "--layers must be a whole number, 1 or more"),
        (["--layers", ""], "--layers must be given, or --params in its place"),
        (["--params", "7e9"], "--params must be given without --layers and --width"),
        (["--flops", "fast"], "--flops must be a number as 7e9, 0.05 or 200T"),
        (["--flops", "0"], "flops must be above 0"),
        (["--peak", "0"], "--peak must be a number"),
        (["--beta", "1,2,3"], "--beta must be one value, or two"),
        (["--group", "3"], "group must be a divisor of the 8 ranks"),
        (["--slow", "3"], "--slow must be ranks with factors"),
        (["--slow", "9:2"], "rank of Stragglers.slow must be 0 to 7"),
        (["--straggle", "x"], "--straggle must be a number"),
        (["--choice", "worst"], "--choice must be one of auto, best"),
        (["--service", "turns"], "--service must be one of fifo, shared"),
        (["--reshard-after-forward", "maybe"], "--reshard-after-forward must be one of auto, yes, no"),
        (["--node-shared"], "node_shared must be for stages 1 to 3 and groups within one node"),
        (["--device", "tpu"], "--device must be one of gpu, cpu"),
        (["--offload", "optimizer"], "--offload must be optimizer=disk"),
        (DISK[2:], "offload must be to host for a model on a GPU"),
        ([*DISK, "--stage", "0"], "offload must be None at stage 0"),
        ([*DISK, "--stage", "2"], "offload of params must be left out below stage 3"),
        (["--plot", "step.gif"], "--plot must be a file that ends in .png or .svg"),
        (["--plot", "nowhere/step.png"], "in a folder that exists"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(capsys, words, text):
    assert main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpizero simulate: ")
    assert text in error


def test_train_is_told_of_where_collectives_are(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "mpizero simulate train --help" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as over:
        main(["simulate", "train", "--help"])
    assert over.value.code == 0
    assert "--straggle" in capsys.readouterr().out
