"""The canary inside a job: nested in it, and one verdict for all ranks."""

from types import SimpleNamespace

import pytest

from mpizero.comm.canary import Verdict, device_messages, run_canary, verdict_of_all
from mpizero.comm.describe import describe, takes_device_memory

pytestmark = pytest.mark.mpi
GOOD = Verdict(passed=True, why="the canary passed")


def hosts(world, ranks=1):
    """The communicator as it is with so many ranks on each host."""
    return SimpleNamespace(mpi=world.mpi, node=SimpleNamespace(rank=world.rank % ranks))


def test_it_runs_nested_in_a_job(world):
    if world.size > 2:
        pytest.skip("the ranks that wait take the cores from the children; 2 show it")
    verdict = verdict_of_all(world, lambda: run_canary("host", alone=world.size == 1), wanted=True)
    assert verdict.passed, verdict.why
    assert ("two processes" in verdict.why) is (world.size == 2)
    assert takes_device_memory(describe(verdict))


def test_only_the_first_rank_of_each_host_runs_it(world):
    ran = []
    assert verdict_of_all(hosts(world, 2), lambda: ran.append(1) or GOOD, wanted=True) == GOOD
    assert len(ran) == (world.rank % 2 == 0)


def test_one_host_that_fails_is_enough_and_named(world):
    last = world.size - 1
    mine = Verdict(passed=False, why=f"rank {world.rank} saw it hang") if world.rank == last else GOOD
    verdict = verdict_of_all(hosts(world), lambda: mine, wanted=True)
    assert not verdict.passed
    assert verdict.why.startswith(f"rank {last} saw it hang")
    assert (f", on {world.hosts[last]}" in verdict.why) is (world.size > 1)
    assert not takes_device_memory(describe(verdict))


def test_rank_0_says_whether_it_runs(world, monkeypatch):
    ran = []
    assert verdict_of_all(world, lambda: ran.append(1) or GOOD, wanted=world.rank != 0) is None
    monkeypatch.delenv("MPIZERO_CANARY", raising=False)
    assert verdict_of_all(world, lambda: ran.append(1) or GOOD) is None
    assert not ran
    monkeypatch.setenv("MPIZERO_CANARY", "1" if world.rank == 0 else "0")
    assert verdict_of_all(world, lambda: GOOD) == GOOD


def test_ranks_agree_on_messages_of_device_memory(world, monkeypatch):
    monkeypatch.delenv("MPIZERO_CUDA_AWARE", raising=False)
    monkeypatch.setenv("MPIZERO_CANARY", "1")
    assert device_messages(world, lambda: GOOD) == (True, "the canary passed")
    last = world.rank == world.size - 1
    monkeypatch.setenv("MPIZERO_CUDA_AWARE", "0" if last else "1")
    assert device_messages(world, lambda: pytest.fail("decided")) == (False, "MPIZERO_CUDA_AWARE=0 says so")
    monkeypatch.setenv("MPIZERO_CUDA_AWARE", "1")
    assert device_messages(world) == (True, "MPIZERO_CUDA_AWARE=1 says so")
