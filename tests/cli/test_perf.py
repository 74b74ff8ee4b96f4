"""bin/*_perf in several ranks: what they print and write, and that wrong results and wrong flags end them alike."""

import csv
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.pages import Left

from mpizero.bench.results import read_results
from mpizero.collectives import OPERATIONS

ROOT = Path(__file__).parents[2]
NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
PAGES = Left("tests/cli/test_perf.py")
LIMIT = 120
SMALL = ["-n", "3", "-w", "1"]


def job(ranks, script, *args, cwd=ROOT):
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", str(ranks), "--timeout", str(LIMIT), str(script), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT + 30, check=False, cwd=cwd, env=env)


def perf(ranks, operation, *args):
    return job(ranks, ROOT / "bin" / f"{operation}_perf", *args)


def table(done):
    return [line.split() for line in done.stdout.splitlines() if line.startswith(" ")]


@pytest.fixture
def other_job(tmp_path):
    """Run all_reduce_perf in ranks that do something else first."""

    def run(ranks, body, *args):
        script = tmp_path / "other.py"
        head = "import os, sys\nimport mpizero as mz\nfrom mpizero.comm.describe import launcher_rank\n"
        head += "from mpizero.bench.perf import main\nrank = launcher_rank()\n"
        script.write_text(f"{head}{textwrap.dedent(body)}\nsys.exit(main('all_reduce'))\n")
        return job(ranks, script, *args, cwd=tmp_path)

    return run


def test_prints_one_table_and_writes_both_files(tmp_path):
    paths = [tmp_path / "r.json", tmp_path / "r.csv"]
    files = ["--json", str(paths[0]), "--csv", str(paths[1])]
    words = "-b 8 -e 2M -f 512 --algorithm ring,auto,native --versus mpi4py --seed 3"
    done = perf(2, "all_reduce", *words.split(), *SMALL, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes, ways = ["8", "4096", "2097152"], ["ring", "auto", "native", "mpi4py"]
    rows = table(done)
    assert [(row[0], row[4]) for row in rows] == [(size, way) for size in sizes for way in ways]
    assert all(row[-1] == "0" for row in rows)
    assert all(float(row[6]) >= float(row[7]) > 0 and float(row[8]) >= float(row[6]) for row in rows)
    assert done.stdout.count("# ranks 2  hosts 1  ranks per host 2") == 1
    assert done.stdout.count("# Out of bounds values : 0 OK") == 1
    assert "# Avg bus bandwidth : " in done.stdout

    found = read_results(paths[0])
    assert (found["operation"], found["ranks"], found["nodes"], found["seed"]) == ("all_reduce", 2, 1, 3)
    assert {row["nbytes"]: row["limit_GBs"] is not None for row in found["rows"]} == {
        8: False,
        4096: False,
        2 << 20: True,
    }
    assert all(row["iterations"] == 3 and row["wrong"] == 0 for row in found["rows"])
    with paths[1].open(newline="") as file:
        assert [row["algorithm"] for row in csv.DictReader(file)] == ways * 3


@pytest.mark.parametrize("operation", NAMES)
def test_every_operation_with_all_that_can_do_it(operation):
    done = perf(3, operation, "-b", "1", "-e", "20K", "-f", "20000", "--algorithm", "all", "--versus", "mpi4py", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done)
    assert {"auto", "native", "mpi4py"} <= {row[4] for row in rows}
    assert all(row[-1] == "0" for row in rows)
    assert {row[3] for row in rows} == {"sum" if OPERATIONS[operation].reduces else "none"}


def test_gloo_in_the_same_run():
    pytest.importorskip("torch")
    words = "-b 64 -e 64 -d float32,bfloat16 --algorithm auto,direct --versus gloo"
    done = perf(2, "reduce_scatter", *words.split(), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[4] for row in table(done)] == ["auto", "direct", "gloo"] * 2
    assert "Warning" not in done.stderr


def test_device_buffers_over_each_wire(tmp_path):
    """On a GPU that the host plays, with wires side by side in one run, and what there is not left out."""
    pytest.importorskip("torch")
    path = tmp_path / "r.json"
    _, _, ranks, program, *words = PAGES.command("mpirun -n 2 bin/all_reduce_perf")
    done = job(int(ranks), ROOT / program, *words, "--buffer", "private,symmetric", *SMALL, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ["auto@loads", "auto@loads", "auto@staged", "auto@staged", "native@staged", "native@staged", "mpi4py@copies"]
    assert [row[4] for row in table(done)] == ways * 2
    assert all(row[-1] == "0" for row in table(done))
    assert done.stdout.count("# left out: @messages (stand-in): MPI is not known to take GPU memory") == 1
    assert done.stdout.count("# device: stand-in, a GPU that the host plays: times and speeds mean nothing") == 1
    found = read_results(path)
    assert found["device"] == "stand-in"
    assert {row["wire"] for row in found["rows"]} == {"loads", "staged", "copies"}


def test_a_device_that_is_not_waited_for_gives_wrong_results(other_job):
    pytest.importorskip("torch")
    body = """
        from mpizero.bench.place import DevicePlace

        DevicePlace.settled = lambda self, call: call
    """
    words = "-D stand-in --wire staged -b 64K -e 64K -n 10"
    done = other_job(2, body, *words.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert int(table(done)[0][-1]) > 0


def test_a_wire_that_there_is_not(tmp_path):
    pytest.importorskip("torch")
    done = perf(2, "all_reduce", "-D", "stand-in", "--wire", "messages", "-b", "64", "-e", "64", *SMALL)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("--wire must be one that there is here (got 'messages'): MPI is not known") == 1


def test_gloo_that_one_rank_lacks_ends_all(other_job):
    pytest.importorskip("torch")
    done = other_job(
        2, "if rank == 1: sys.modules['torch.distributed'] = None", "-b", "8", "-e", "8", "--versus", "gloo"
    )
    assert done.returncode == 1
    assert done.stderr.count("--versus gloo needs torch with gloo on every rank") == 1


def test_one_wrong_element_on_one_rank_is_exit_code_1(other_job):
    body = """
        honest = mz.all_reduce

        def wrong(x, comm=None, **options):
            honest(x, comm, **options)
            if rank == 1 and x.size > 100:
                x[-1] += 1

        mz.all_reduce = wrong
    """
    done = other_job(2, body, "-b", "8", "-e", "80K", "-f", "10240", *SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [(row[0], row[-1]) for row in table(done)] == [("8", "0"), ("81920", "4")]
    assert "# Out of bounds values : 4 FAILED" in done.stdout


def test_results_of_the_iteration_before_are_wrong(other_job):
    body = """
        honest, kept = mz.all_reduce, {}

        def stale(x, comm=None, **options):
            honest(x, comm, **options)
            x[:], kept[x.size] = kept.get(x.size, x), x.copy()

        mz.all_reduce = stale
    """
    done = other_job(2, body, "-b", "4K", "-e", "4K", *SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert int(table(done)[0][-1]) > 2000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithm rng", "--algorithm must be a list, joined by commas, of auto, native, loads, "),
        ("--fast", "unrecognized arguments: --fast"),
        ("-r 7", "-r must be a rank, 0 to 2 (got 7)"),
        ("-d bfloat16 --algorithm native", "algorithm must be one that can do this"),
    ],
)
def test_wrong_flags_are_said_once_and_end_all_ranks(words, said):
    if "bfloat16" in words:
        pytest.importorskip("torch")
    done = perf(3, "all_reduce", "-b", "64", "-e", "64", *words.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert table(done) == []


def test_ranks_with_different_command_lines(other_job):
    done = other_job(2, "if rank == 1: sys.argv += ['-n', '4']", "-b", "8", "-e", "8")
    assert done.returncode == 2
    assert done.stderr.count("the command line must be the same on all ranks") == 1


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    done = perf(2, "all_reduce", "-b", "8", "-e", "8", "--json", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("--json must be a file that can be written") == 1
    assert table(done) == []


def test_alone_and_help():
    script = str(ROOT / "bin" / "all_reduce_perf")
    done = subprocess.run(
        [sys.executable, script, "-b", "8", "-e", "8", *SMALL, "-c", "0"],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert table(done)[0][-1] == "N/A"
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0
    assert all(flag in shown.stdout for flag in ("-b", "-e", "-f", "--algorithm", "--versus", "--budget"))


def test_json_is_plain(tmp_path):
    """No NaN, which other programs' readers refuse, even for one rank, whose bus bandwidth is 0."""
    path = tmp_path / "r.json"
    done = perf(1, "all_reduce", "-b", "1M", "-e", "1M", *SMALL, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr

    def refuse(text):
        raise AssertionError(text)

    json.loads(path.read_text(), parse_constant=refuse)
