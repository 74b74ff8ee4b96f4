"""`mpizero tune` measures and writes what `auto` follows; `mpizero explain` says what that is."""

import json
import os
import subprocess
import sys

import pytest

from mpizero.cli import main

RANKS = ["-m", "mpizero.cli.mzrun", "-n", "2", "--timeout", "120"]


def test_tune_and_follow(tmp_path):
    """Two ranks measure two operations; a job that finds the table takes what it says, and explain says it too."""
    table = tmp_path / "deep" / "tuning.json"
    env = {**os.environ, "MPIZERO_TUNING": str(table), "OMP_NUM_THREADS": "1"}
    sweep = ["-m", "mpizero", "tune", "--operations", "all_reduce,broadcast", "-b", "1K", "-e", "64K", "-f", "64"]
    line = [sys.executable, *RANKS, *sweep, "--budget", "0.01"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=150, env=env)
    assert done.returncode == 0, done.stderr
    assert f"3 rows for 2 ranks written to {table}" in done.stdout
    data = json.loads(table.read_text())
    assert data["schema_version"] == 1
    assert {(row["operation"], row["order"]) for row in data["rows"]} == {
        ("all_reduce", "any"),
        ("all_reduce", "canonical"),
        ("broadcast", "any"),
    }
    sizes = [choice["nbytes"] for choice in data["rows"][0]["choices"]]
    assert sizes == [1024, 65536]
    for choice in data["rows"][0]["choices"]:
        assert choice["us"] == min(choice["others"].values())
    # Make the table say something that no rule would, and see it followed.
    for row in data["rows"]:
        for choice in row["choices"]:
            choice["algorithm"] = "tree"
    table.write_text(json.dumps(data))
    script = tmp_path / "job.py"
    script.write_text(
        "import numpy as np, mpizero as mz\n"
        "call = mz.prepare(mz.all_reduce, np.ones(9000, np.float32))\n"
        "assert call()[0] == 2\n"
        "print('took', call.algorithm)\n"
    )
    line = [sys.executable, *RANKS, str(script)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=150, env=env)
    assert done.stdout.count("took tree") == 2, done.stderr
    line = [sys.executable, "-m", "mpizero", "explain", "all_reduce", "--ranks", "2", "--bytes", "36K"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60, env=env)
    assert "auto takes tree: the quickest of those measured at 65536 bytes" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--operations", "all_redcue"], "--operations must be of all_reduce"),
        (["--operations", "barrier"], "--operations must be of"),
        (["-b", "1M", "-e", "1K"], "--end must be 1048576 or more"),
        (["-f", "1"], "--factor must be 2 or more"),
        (["--budget", "0"], "--budget must be a number of seconds above 0"),
    ],
)
def test_bad_words(words, text, capsys):
    assert main(["tune", *words]) == 2
    assert text in capsys.readouterr().err


def test_nowhere_to_write(monkeypatch, capsys):
    monkeypatch.setenv("MPIZERO_TUNING", "0")
    assert main(["tune"]) == 2
    assert "--out must be given where MPIZERO_TUNING is 0" in capsys.readouterr().err


def explained(capsys, *words):
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_explain(capsys, monkeypatch):
    monkeypatch.setenv("MPIZERO_TUNING", "0")
    text = explained(capsys, "all_reduce", "--bytes", "64M", "--ranks", "4")
    assert text.startswith("all_reduce, 64 MiB of float32, 4 ranks on one host, order any\nauto takes loads: all ranks")
    text = explained(capsys, "all_reduce", "--bytes", "64M", "--ranks", "8", "--per-node", "2")
    assert "8 ranks on 4 hosts" in text
    assert "auto takes hierarchical: several ranks on each of several hosts" in text
    text = explained(capsys, "all_reduce", "--ranks", "4", "--per-node", "1", "--order", "canonical")
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()[4:] if line}
    assert rows["ring"] == rows["loads"] == rows["native"] == "no"
    assert rows["direct"] == "yes"
    assert "barrier" in explained(capsys, "barrier")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["all_redcue"], "OPERATION must be one of all_reduce"),
        (["all_reduce", "--ranks", "0"], "--ranks must be a whole number"),
        (["all_reduce", "--bytes", "many"], "--bytes must be"),
        (["all_reduce", "--dtype", "float12"], "dtype of the buffer must be one of"),
    ],
)
def test_explain_bad_words(words, text, capsys):
    assert main(["explain", *words]) == 2
    assert text in capsys.readouterr().err
