"""The example that bin/quickstart runs, and what bin/quickstart says to bad input."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"


def run(*line):
    return subprocess.run([sys.executable, *map(str, line)], capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 120
    assert EXAMPLE.read_text().count("# <- sharded") == 2


@pytest.mark.parametrize("options", [["--stage", "3"], ["--stage", "1", "--precision", "bf16", "--batch", "1"]])
def test_the_example_trains_and_reports(text, options):
    done = run(ROOT / "bin" / "mzrun", "-n", 2, EXAMPLE, "--steps", 12, "--batch", 2, "--data", text, *options)

    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"validation loss +([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first - 1
    assert "one copy of the parameters; its 2 ranks" in done.stdout
    off = re.search(r"sent per step .* theory .* \(([+-][\d.]+)%\)", done.stdout).group(1)
    assert abs(float(off)) <= 1
    total = re.search(r"total +([\d.]+ \w+) +([\d.]+ \w+)", done.stdout)
    assert float(total.group(1).split()[0]) == pytest.approx(float(total.group(2).split()[0]), rel=0.02)


def test_the_example_runs_alone(text):
    done = run(EXAMPLE, "--steps", 1, "--batch", 2, "--data", text)

    assert done.returncode == 0, done.stderr
    assert "stage 3 on 1 ranks" in done.stdout


def test_an_unknown_stage_lists_the_known_ones(text):
    done = run(EXAMPLE, "--stage", 4, "--data", text)

    assert done.returncode != 0
    assert "stage must be one of 0, 1, 2, 3 (got 4)" in done.stderr


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_quickstart_refuses_data_before_any_set_up(tmp_path, kind):
    path = tmp_path / "data.txt"
    if kind == "empty":
        path.touch()
    done = run(ROOT / "bin" / "quickstart", "--data", path)

    assert done.returncode == 2
    assert "--data must" in done.stderr
    assert str(path) in done.stderr
    assert "set-up" not in done.stdout
