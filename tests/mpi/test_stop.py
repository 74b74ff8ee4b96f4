"""mz.stop_requested: one rank's signal is every rank's answer."""

import pytest

import mpizero as mz
from mpizero.collectives import stop
from mpizero.comm.signals import StopSignal

pytestmark = pytest.mark.mpi


def test_the_signal_of_one_rank_is_told_to_all_and_stays(world, monkeypatch):
    signal = StopSignal()
    monkeypatch.setattr(stop, "stop_signal", lambda: signal)
    comm = world.split(0)
    before = comm.stats.copy()
    assert [mz.stop_requested(comm) for _ in range(2)] == [False, False]
    signal.came = world.rank == world.size - 1
    assert mz.stop_requested(comm) is True
    signal.came = False
    assert mz.stop_requested(comm) is True
    assert comm.stats.since(before).bytes_moved <= 4 * 4 * 2 * world.size
    comm.close()
