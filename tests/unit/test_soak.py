"""What is drawn for the soak and for faults on purpose, and how jobs in which a rank failed are judged."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from mpizero.bench import soak, soak_faults
from mpizero.bench.soak_faults import Trial, named_in, signal_in
from mpizero.collectives import OPERATIONS
from mpizero.collectives.registry import names_of
from mpizero.testing.recipes import LAYOUTS, draw

TRIAL = Trial(fault="SIGKILL", victim=2, code=9, seconds=1.0, cause="rank 2 died", named=True, left=0, output="")


def test_all_there_is_is_drawn():
    pick = random.Random(1).choice
    drawn = [draw(pick, kinds=("numpy", "torch")) for _ in range(5000)]
    assert {recipe.operation for recipe in drawn} == set(OPERATIONS)
    assert {recipe.layout for recipe in drawn} == set(LAYOUTS)
    for operation in OPERATIONS:
        counted = Counter(recipe.algorithm for recipe in drawn if recipe.operation == operation)
        assert set(counted) == set(names_of(operation))
    assert any(recipe.dtype == "bfloat16" and recipe.library == "torch" for recipe in drawn)
    assert {recipe.operation for recipe in drawn if recipe.lengths} == {
        "reduce_scatter",
        "all_gather",
        "gather",
        "scatter",
        "all_to_all",
    }
    assert not any(recipe.symmetric and recipe.layout != "flat" for recipe in drawn)
    again = random.Random(1).choice
    assert [draw(again, kinds=("numpy", "torch")) for _ in range(100)] == drawn[:100]


@pytest.mark.parametrize(
    ("changes", "well", "passed"),
    [
        ({}, True, True),
        ({"cause": ""}, True, False),
        ({"code": 0}, False, False),
        ({"code": None, "seconds": float("inf")}, False, False),
        ({"seconds": 5.1}, False, False),
        ({"left": 1}, False, False),
        ({"fault": "SIGSTOP", "seconds": 7.9}, True, True),
        ({"fault": "SIGSTOP", "seconds": 8.1}, False, False),
        ({"fault": "delay", "code": 0, "cause": "", "seconds": 60.0}, True, True),
        ({"fault": "delay", "code": 1}, False, False),
    ],
)
def test_judgement(changes, well, passed):
    trial = replace(TRIAL, **changes)
    assert (trial.ended_well, trial.passed) == (well, passed)


def test_the_rank_that_is_named():
    text = "prterun noticed that process rank 2 with PID 7 exited\nmpizero: rank 2 of 4 on a raised\nrank 21 waits\n"
    assert named_in(text, 2) == "mpizero: rank 2 of 4 on a raised"
    assert named_in("= RANK 3 PID 7 RUNNING AT a", 3) == "= RANK 3 PID 7 RUNNING AT a"
    assert named_in(text, 1) == ""


def test_the_signal_that_is_named():
    assert (
        signal_in("x\nENDED WITH THE EXIT STRING: Killed (signal 9)\ny")
        == "ENDED WITH THE EXIT STRING: Killed (signal 9)"
    )
    assert signal_in("EXIT STRING: Terminated (signal 15)") == ""


def test_wrong_command_lines(capsys):
    assert soak_faults.main(["--faults", "SIGKILL,rain"]) == 2
    assert "--faults must be some of delay, raise, " in capsys.readouterr().err
    assert soak_faults.main(["--trials", "0"]) == 2
    assert soak.main(["--calls", "0"]) == 2


def test_resident_memory_sees_a_leak():
    before = soak.resident()
    if not before:
        pytest.skip("no /proc as Linux has it")
    held = bytearray(b"x") * (64 << 20)
    assert soak.resident() - before > 60 << 20
    del held
    assert soak.resident() - before < 30 << 20
