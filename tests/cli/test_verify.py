"""mpizero verify: passes on what is right, and fails on results, ranks and jobs that are wrong on purpose."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers.pages import Left

from mpizero.cli import main
from mpizero.cli.compare import BOUNDS, Results, compare, read
from mpizero.cli.verify import PRECISIONS

ROOT = Path(__file__).parents[2]
PAGES = Left("tests/cli/test_verify.py")
LIMIT = 280


def verify(*args, timeout=LIMIT):
    line = [sys.executable, "-m", "mpizero", "verify", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)


@pytest.fixture
def verify_with(tmp_path):
    """Run verify with ranks that run another module: its body, after that of parity was imported."""

    def run(body, *args):
        (tmp_path / "other.py").write_text("import sys\nfrom mpizero.testing import parity\n" + textwrap.dedent(body))
        code = "import sys; from mpizero.cli import main, verify; verify.WORKER = 'other'; sys.exit(main(sys.argv[1:]))"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, "-c", code, "verify", *args]
        return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=tmp_path, env=env)

    return run


def test_stages_are_equal_and_close_to_one_process():
    done = verify(*PAGES.command("mpizero verify")[2:], "--stages", "0,3", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["schema_version"], found["passed"], found["failures"]) == (1, True, [])
    cases = [(row["ranks"], row["precision"], row["stage"]) for row in found["rows"]]
    assert cases == [(ranks, precision, stage) for ranks in (1, 2) for precision in PRECISIONS for stage in (0, 3)]
    for row in found["rows"]:
        assert (row["differs_from_stage"], row["differs_on_ranks"], row["compared_to"]) == ("", "", 0)
        assert set(row["one_process"]) == ({"AdamW", "SGD"} if row["precision"] == "fp32" else {"AdamW"})


@pytest.mark.slow
def test_all_that_the_command_promises():
    done = verify("--ranks", "2,4", "--stages", "0,1,2,3", "--precision", "fp32,bf16", timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed: 16 of 16 rows pass" in done.stdout


def test_one_bit_at_one_stage_or_rank_fails(verify_with):
    body = """
        import torch
        honest = parity.train

        def train(case, comm):
            found = honest(case, comm)
            if case.stage == 1 or (case.stage == 2 and comm.rank == 1):
                last = found["norm.bias"][-1:]
                last.copy_(torch.nextafter(last, last + 1))
            return found

        parity.train = train
        sys.exit(parity.main())
    """
    done = verify_with(body, "--ranks", "2", "--stages", "0,1,2", "--precision", "fp32", "--steps", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {line.split()[2]: line for line in done.stdout.splitlines() if " fp32 " in line and line.split()[0] == "2"}
    assert rows["0"].endswith("pass")
    assert rows["1"].endswith("FAIL")
    assert rows["2"].endswith("FAIL")
    assert "no: norm.bias (AdamW)" in rows["1"]
    assert "no: norm.bias (AdamW)" in rows["2"]
    assert "FAILED: 1 of 3 rows pass" in done.stdout


def test_a_job_that_dies_shows_its_output(verify_with):
    done = verify_with("if parity.mz.world().rank == 1: raise ValueError('boom')", "--ranks", "2", "--steps", "1")
    assert done.returncode == 1
    assert "The job on 2 ranks ended with exit code" in done.stdout
    assert "ValueError: boom" in done.stdout
    assert "1 of 1 jobs gave no results" in done.stdout


def test_a_job_that_ends_without_results_fails(verify_with):
    done = verify_with("print('nothing to do')", "--ranks", "1", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["passed"] is False
    assert found["failures"][0]["reason"] == "ended with exit code 0 and no results"
    assert "nothing to do" in found["failures"][0]["output"]


def test_a_job_that_hangs_is_ended(verify_with):
    done = verify_with("import time; time.sleep(200)", "--ranks", "1", "--timeout", "5")
    assert done.returncode == 1
    assert "The job on 1 rank took longer than --timeout 5 s" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stages", "0,4"], "--stages must be a list of 0, 1, 2, 3, joined by commas (got '4')"),
        (["--stages", ""], "--stages must be a list of 0, 1, 2, 3, joined by commas (got '')"),
        (["--stages", "zero"], "--stages must be a list of 0, 1, 2, 3, joined by commas (got 'zero')"),
        (["--precision", "fp32,fp8"], "--precision must be a list of fp32, bf16, joined by commas (got 'fp8')"),
        (
            ["--ranks", "2,0"],
            "--ranks must be a list of whole numbers, at least 1, joined by commas (got '0')",
        ),
        (["--ranks", "two"], "--ranks must be a list of whole numbers"),
        (["--steps", "0"], "--steps must be a whole number, at least 1 (got '0')"),
        (["--timeout", "inf"], "--timeout must be a number of seconds above 0 (got 'inf')"),
    ],
)
def test_bad_arguments(words, said, capsys):
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_worker_knows_what_the_command_offers():
    from mpizero.testing import parity

    assert tuple(parity.PRECISIONS) == PRECISIONS
    assert {optimizer for optimizer, _ in BOUNDS} == set(parity.OPTIMIZERS)


def results(**changed):
    """Results of two stages and both optimizers, in fp32, that are equal; `changed` names what stage 1 has instead."""

    def tensors():
        return {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.float32(1.5).reshape(()), "e": np.empty(0)}

    keys = [(optimizer, "fp32", stage) for optimizer in ("AdamW", "SGD") for stage in (0, 1)]
    made = Results(
        trained={key: tensors() for key in keys},
        differing={key: [] for key in keys},
        alone={"AdamW": tensors(), "SGD": tensors()},
    )
    made.trained["SGD", "fp32", 1].update(changed)
    return made


def rows(made):
    return compare(made, 2, ["fp32"], [0, 1])


def test_equal_results_pass():
    assert all(row.passed and row.one_process["SGD"].relative == 0 for row in rows(results()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"w": np.arange(6, dtype=np.float32).reshape(3, 2)},
        {"w": np.arange(6, dtype=np.float64).reshape(2, 3)},
        {"w": np.full((2, 3), np.nan, np.float32)},
        {"w": -np.arange(6, dtype=np.float32).reshape(2, 3)},
        {"another": np.zeros(1, np.float32)},
    ],
)
def test_any_difference_between_stages_fails(wrong):
    first, second = rows(results(**wrong))
    assert first.passed
    assert not second.passed
    assert second.differs_from_stage == f"{next(iter(wrong))} (SGD)"


def test_a_zero_of_the_other_sign_is_a_difference():
    made = results()
    made.trained["AdamW", "fp32", 1]["w"][0, 0] = -0.0
    assert rows(made)[1].differs_from_stage == "w (AdamW)"
    assert rows(made)[1].one_process["AdamW"].relative == 0


def test_a_missing_tensor_fails():
    made = results()
    del made.trained["SGD", "fp32", 1]["s"]
    row = rows(made)[1]
    assert (row.differs_from_stage, row.one_process["SGD"].name) == ("s (SGD)", "s")
    assert not row.one_process["SGD"].passed


def test_ranks_that_differ_fail():
    made = results()
    made.differing["AdamW", "fp32", 0].append("w")
    first, second = rows(made)
    assert not first.passed
    assert first.differs_on_ranks == "w (AdamW)"
    assert second.passed


@pytest.mark.parametrize(("optimizer", "factor"), [("SGD", 1e-5), ("AdamW", 1e-3)])
def test_one_process_bound(optimizer, factor):
    for times, passes in ((0.5, True), (2, False), (np.nan, False)):
        made = results()
        made.alone[optimizer]["w"] = (made.alone[optimizer]["w"].astype(np.float64)) * (1 + factor * times)
        row = rows(made)[0]
        assert row.passed is passes
        assert row.one_process[optimizer].name == "w"
        assert json.dumps(row.as_json(), allow_nan=False)


def test_without_stage_0_the_first_is_compared_with():
    made = results(w=np.zeros((2, 3), np.float32))
    (row,) = compare(made, 2, ["fp32"], [1])
    assert row.compared_to == 1
    assert row.differs_from_stage == ""


def test_read_parts_names(tmp_path):
    entries = {
        "one/SGD/a.b": np.ones(2),
        "stage/SGD/fp32/3/a.b": np.ones(2),
        "differ/SGD/fp32/3": np.array([], np.str_),
    }
    np.savez(tmp_path / "r.npz", **entries)
    with np.load(tmp_path / "r.npz") as file:
        found = read(file)
    assert list(found.alone["SGD"]) == list(found.trained["SGD", "fp32", 3]) == ["a.b"]
    assert found.differing == {("SGD", "fp32", 3): []}
