"""Whether MPI takes GPU memory: the ladder, and what messages may rely on."""

import os
import subprocess
import sys

import pytest

from mpizero.comm import describe
from mpizero.comm.canary import Verdict
from mpizero.comm.describe import MpiFacts, gpu_awareness, launcher_rank, takes_device_memory

YES, NO = {"Query()": True}, {"Query()": False}
PASSED = Verdict(passed=True, why="the canary passed")
FAILED = Verdict(passed=False, why="the canary was ended by signal 11 (SIGSEGV)")


@pytest.mark.parametrize(
    ("kinds", "answers", "variables", "told"),
    [
        (None, {}, {}, (None, "does not tell", False)),
        (None, NO, {}, (False, "Query() of the library says no", True)),
        (None, YES, {}, (True, "compiled in, not tried", False)),
        (None, {"A()": False, "B()": True}, {}, (True, "B() of the library says yes", False)),
        ("mpi,system", {}, {}, (False, "no CUDA among them", True)),
        ("mpi,system,rocm:device", {}, {}, (False, "no CUDA among them", True)),
        ("mpi,system,cuda:device", NO, {}, (True, "mpi_memory_alloc_kinds=mpi,system,cuda:device", True)),
        ("mpi,system", NO, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, (True, "MPICH_GPU_SUPPORT_ENABLED=1: asked for", False)),
        (None, {}, {"MV2_USE_CUDA": "0", "OMPI_MCA_opal_cuda_support": "False"}, (None, "does not tell", False)),
    ],
)
def test_ladder(kinds, answers, variables, told):
    found = gpu_awareness(kinds, answers=answers, variables=variables)
    assert (found.aware, found.sure) == (told[0], told[2])
    assert told[1] in found.source


@pytest.mark.parametrize("kinds", [None, "mpi,system", "cuda"])
@pytest.mark.parametrize("answers", [{}, YES, NO])
def test_the_canary_beats_what_the_library_says_and_the_user_beats_both(kinds, answers):
    for canary in (PASSED, FAILED):
        told = gpu_awareness(kinds, answers=answers, variables={}, canary=canary)
        assert (told.aware, told.source, told.sure) == (canary.passed, canary.why, True)
        for override in (True, False):
            told = gpu_awareness(kinds, answers=answers, variables={}, canary=canary, override=override)
            assert told == (override, f"MPIZERO_CUDA_AWARE={int(override)} says so", True)


@pytest.mark.parametrize(
    ("told", "takes"),
    [
        ({"override": True}, True),
        ({"override": False, "canary": PASSED}, False),
        ({"canary": PASSED, "answers": NO}, True),
        ({"canary": FAILED, "answers": YES}, False),
        ({"kinds": "mpi,cuda"}, True),
        ({"answers": YES}, False),
        ({"answers": NO}, False),
        ({"variables": {"MPICH_GPU_SUPPORT_ENABLED": "1"}}, False),
        ({}, False),
    ],
)
def test_messages_rely_on_what_was_tried_or_promised_alone(told, takes):
    kinds = told.pop("kinds", None)
    aware, source, sure = gpu_awareness(kinds, **{"answers": {}, "variables": {}, **told})
    names = ("vendor", "name", "version", "text", "standard", "thread_level")
    facts = MpiFacts(**dict.fromkeys(names, ""), gpu_aware=aware, gpu_source=source, gpu_sure=sure)
    assert takes_device_memory(facts) is takes


class Library:
    """An MPI library that has the functions that are given it."""

    def __init__(self, **functions):
        vars(self).update(functions)


class Function:
    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        return self.call(*args)


NEVER = Function(lambda: 0)


def query_support(failed, supported):
    def query(kind, flag):
        assert kind == 0, "MPIX_GPU_SUPPORT_CUDA"
        flag._obj.value = supported
        return failed

    return Function(query)


@pytest.mark.parametrize(
    ("functions", "answers"),
    [
        ({}, []),
        ({"MPIX_Query_cuda_support": Function(lambda: 1)}, [True]),
        ({"MPIX_GPU_query_support": query_support(0, 1)}, [True]),
        ({"MPIX_GPU_query_support": query_support(0, 0)}, [False]),
        ({"MPIX_GPU_query_support": query_support(17, 1)}, [False]),
        (
            {"MPIX_Query_cuda_support": Function(lambda: 0), "MPIX_GPU_query_support": query_support(0, 1)},
            [False, True],
        ),
    ],
)
def test_both_functions_of_the_library_are_asked(functions, answers):
    assert [said for _, said in describe._asked(Library(**functions))] == answers


SHOW = """
from mpizero.comm import describe
from mpizero.comm.canary import Verdict
for canary in (None, Verdict(passed=True, why="the canary passed")):
    facts = describe.describe(canary)
    print(facts.gpu_aware, facts.gpu_sure, facts.gpu_source)
print(sorted(describe._answers()))
"""


def shown(**variables):
    env = {name: value for name, value in os.environ.items() if name != "MPIZERO_CUDA_AWARE"}
    line = [sys.executable, "-c", SHOW]
    return subprocess.run(line, env={**env, **variables}, capture_output=True, text=True, check=False, timeout=100)


def test_the_library_of_this_environment_is_asked():
    """The wheels of Open MPI, MPICH and Intel MPI all have the first function; the last two have the second."""
    none, canary, asked = shown().stdout.splitlines()
    assert "MPIX_Query_cuda_support()" in asked
    assert none.startswith(("False True", "True"))
    assert canary == "True True the canary passed"


def test_the_users_word_is_taken_and_a_wrong_one_refused():
    assert shown(MPIZERO_CUDA_AWARE="0").stdout.count("False True MPIZERO_CUDA_AWARE=0 says so") == 2
    assert "MPIZERO_CUDA_AWARE must be 0 or 1 (got 'yes')" in shown(MPIZERO_CUDA_AWARE="yes").stderr


def test_launcher_rank():
    assert launcher_rank({}) is None
    assert launcher_rank({"PMI_RANK": "3"}) == 3
