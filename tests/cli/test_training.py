"""benchmarks/training: its arithmetic, its command line, children that fail, and a quick run of what is cheap."""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, str(ROOT / "benchmarks" / "training")]


@pytest.fixture
def module(monkeypatch):
    """Return a module of benchmarks/training by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: import_module(f"_training_{name}")


def training(*words, limit=200):
    return subprocess.run([*LINE, *words], capture_output=True, text=True, timeout=limit, check=False)


def test_peak_of_sum_is_the_largest_at_one_time_and_not_the_sum_of_peaks(module):
    series = [[(0.0, 5), (1.0, 1), (2.0, 2)], [(0.5, 1), (1.5, 7), (2.5, 1)]]
    assert module("figures").peak_of_sum(series) == 9
    assert module("figures").peak_of_sum(series, since=2.2) == 3
    assert module("figures").peak_of_sum([[(0.0, 5)], []]) == 0


def test_ratios_are_taken_within_a_round_and_the_floor_is_its_median(module):
    times = module("times").Times(optimizer_ms=[20.0])
    times.rounds = [
        {"compute": {"4": [100.0, 300.0, 110.0]}, "mpizero-3": {"4": [121.0]}},
        {"compute": {"4": [200.0]}, "mpizero-3": {"4": [200.0]}},
        {"compute": {"4": [100.0]}},  # a round in which the kind failed
    ]
    assert times.ratios("mpizero-3", "compute", "4") == pytest.approx([1.1, 1.0])
    assert times.limit("4", 0) == 1.0
    assert times.limit("4", 3) == pytest.approx(1 - 20 / 110 / 2)
    found = {figure.name: figure for figure in module("times").figures(times)}
    row = found["step over compute, batch 4, stage 3"]
    assert (row.value, row.low, row.high, row.met) == (pytest.approx(1.05), 1.0, pytest.approx(1.1), True)
    assert found["step over compute, batch 1, stage 3"].met is None


def test_a_figure_meets_its_bar_or_is_forgiven(module):
    want = module("figures").Want(name="x", bar=2.0, aim=1.0)
    assert want.got([2.0]).met is True
    assert want.got([2.1]).met is False
    assert want.got([2.1], forgiven=True).met is True
    assert want.missing("why").met is None
    more = module("figures").Want(name="x", bar=2.0, at_most=False)
    assert (more.got([1.9]).met, more.got([2.0]).met) == (False, True)


def test_state_beyond_the_formula_counts_in_both_directions(module):
    row = {"precision": "fp32", "root": 10, "unit_buffers": 100, "formula": {"total": 1000}}
    assert module("rows").excess({**row, "measured": {"total": 1250}}) == 10
    assert module("rows").excess({**row, "measured": {"total": 900}}) == 100


def test_a_child_that_fails_is_named_with_its_error_and_the_others_are_ended(module, tmp_path):
    jobs = module("jobs")
    bad = [sys.executable, "-c", "raise ValueError('no such thing')"]
    idle = [sys.executable, "-c", "import time; time.sleep(100)"]
    jobs.PATIENCE = 0.2
    start = time.monotonic()
    with pytest.raises(jobs.NotMeasuredError, match="ended with 1: ValueError: no such thing"):
        jobs.attend([(idle, {}), (bad, {})], tmp_path, 60)
    with pytest.raises(jobs.NotMeasuredError, match="took too long and was ended"):
        jobs.attend([(idle, {})], tmp_path, 0.5)
    with pytest.raises(jobs.NotMeasuredError, match="could not be started"):
        jobs.attend([(["/nowhere/python"], {})], tmp_path, 60)
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "steps,nothing"], "--rows must be among steps, hidden"),
        (["--out", "/nowhere"], "--out must be a folder that exists (got '/nowhere')"),
        (["--rounds", "-1"], "--rounds must be above 0 (got -1)"),
    ],
)
def test_refuses_a_bad_command_line(words, said):
    done = training(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_quick_run_counts_bytes_and_writes_its_files(tmp_path):
    done = training("--quick", "--rows", "bytes", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("training-*-quick-part.json")
    found = json.loads(path.read_text())
    assert found["schema_version"] == 2
    assert [row["stage"] for row in found["bytes"]["messages"]] == [0, 1, 2, 3]
    assert found["rows"][0]["met"] is True
    assert {"mpi", "torch", "mpizero"} <= set(found["versions"])
    assert "bytes over messages per step" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_quick_run_of_all_rows(tmp_path):
    done = training("--quick", "--out", str(tmp_path), limit=400)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    (path,) = tmp_path.glob("training-*-quick.json")
    found = json.loads(path.read_text())
    measured = {row["name"] for row in found["rows"] if row["value"] is not None}
    assert "step over compute, batch 4, stage 3" in measured
    assert any("hidden" in name for name in measured) or os.geteuid() != 0
    for ending in (".png", ".svg", ".md"):
        assert path.with_suffix(ending).stat().st_size > 1000
