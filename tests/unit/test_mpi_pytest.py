"""The plugin for tests in several ranks: that a failure or a hang on one rank ends the job and says where."""

import subprocess
import sys
import textwrap

import pytest

PLUGIN = "mpizero.testing.mpi_pytest"
HEAD = """
import time
import pytest
from mpizero.comm.raw import mpi
pytestmark = pytest.mark.mpi
WORLD = mpi().COMM_WORLD
"""


@pytest.fixture
def run(tmp_path):
    """Run a test file in 3 ranks; return exit code and output."""

    def run(body, *args):
        (tmp_path / "test_generated.py").write_text(HEAD + textwrap.dedent(body))
        line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", "3", "--timeout", "60", "-m", "pytest", "--with-mpi"]
        line += ["-q", "--color=no", "-p", PLUGIN, "-p", "no:cacheprovider", *args, "test_generated.py"]
        done = subprocess.run(
            line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
        )
        return done.returncode, done.stdout

    return run


def test_passes_and_reports_once(run):
    code, output = run("""
        def test_sum():
            assert WORLD.allreduce(1) == WORLD.size == 3

        @pytest.mark.mpi(min_size=4)
        def test_four():
            raise AssertionError
    """)
    assert code == 0, output
    assert output.count("1 passed, 1 skipped") == 1


def test_failure_on_one_rank_is_a_failure_on_all_and_the_run_goes_on(run):
    code, output = run("""
        def test_soft():
            assert WORLD.rank != 2, "only here"

        def test_next():
            WORLD.barrier()

        def test_root():
            assert WORLD.rank != 0, "root alone"
    """)
    assert code == 1, output
    assert "2 failed, 1 passed" in output
    assert "[rank 2] rank 2: test_generated.py::test_soft failed in call" in output
    assert "failed on rank 2, whose traceback is in stderr" in output
    assert "rank 2: AssertionError: only here" in output
    assert "[rank 1] rank 1: test_generated.py" not in output


def test_failure_while_the_others_wait_ends_the_job_and_shows_where_they_are(run):
    code, output = run(
        """
        def test_earlier():
            assert WORLD.rank != 0, "said by rank 0"

        def test_hard():
            if WORLD.rank == 1:
                raise ValueError("left the others")
            WORLD.barrier()
        """,
        "--mpi-grace=2",
    )
    assert code not in {0, 124}, output
    assert "rank 1: test_generated.py::test_hard failed in call" in output
    assert "ValueError: left the others" in output
    assert "[rank 0] rank 0: test_generated.py::test_hard: a peer ends the job" in output
    assert "[rank 2]     WORLD.barrier()" in output
    assert "said by rank 0" in output


def test_hang_on_one_rank_names_test_and_rank_with_its_stack(run):
    code, output = run("""
        @pytest.mark.timeout_s(2)
        def test_hang():
            if WORLD.rank == 1:
                time.sleep(50)
    """)
    assert code not in {0, 124}, output
    assert "[rank 1] rank 1: test_generated.py::test_hang: took longer than its time-out" in output
    assert "[rank 1]     time.sleep(50)" in output
    assert "rank 0: test_generated.py::test_hang: took longer" not in output


def test_hang_of_all_ranks_names_each(run):
    code, output = run(
        """
        def test_lost_message():
            WORLD.recv(source=(WORLD.rank + 1) % 3)
        """,
        "--mpi-timeout=2",
    )
    assert code not in {0, 124}, output
    for rank in range(3):
        assert f"[rank {rank}] rank {rank}: test_generated.py::test_lost_message: " in output


def test_different_collections_end_the_run(run):
    code, output = run("""
        @pytest.mark.parametrize("rank", [WORLD.rank])
        def test_rank(rank):
            WORLD.barrier()
    """)
    assert code == 1, output
    assert "the ranks collected different tests" in output


def test_collection_error_on_one_rank_ends_the_run(run):
    code, output = run("""
        if WORLD.rank == 2:
            raise ImportError("missing here")

        def test_nothing():
            WORLD.barrier()
    """)
    assert code == 1, output
    assert "missing here" in output
    assert "the ranks collected different tests" in output
