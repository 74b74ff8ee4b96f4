"""Runs tests/mpi and tests/torch in 1, 2, 3, 4, 5, 7 and 8 ranks, each number as one job and one test.

Of tests/torch each number runs the tests that are marked for it (`sizes`; 1 to 4 where nothing is said), unless --all,
--ranks, -k or a path asks for more.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = "mpizero.testing.mpi_pytest"
SHOWN = 30_000
RANKS = "1,2,3,4,5,7,8"


def pytest_generate_tests(metafunc):
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", list(map(int, (metafunc.config.getoption("--ranks") or RANKS).split(","))))


def test_world(ranks, selected, thinned, pytestconfig):
    limit = pytestconfig.getoption("--world-timeout")
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", str(ranks), "--timeout", str(limit), "-m", "pytest"]
    line += ["--with-mpi", "-q", "--color=no", "-p", PLUGIN, "-p", "no:cacheprovider", *selected]
    if thinned:
        line += ["--thin", str(ranks)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        output, _ = job.communicate(timeout=limit + 60)
    if job.returncode != 0:
        pytest.fail(f"{ranks} ranks: exit code {job.returncode}\n{output[-SHOWN:]}", pytrace=False)
    print(output)
