"""Who we talk to, and over which wire. Knows no algorithms and no reductions; the only floor that imports mpi4py."""

from mpizero.comm.communicator import Communicator, world
from mpizero.comm.loopback import LoopbackCommunicator, run_loopback
from mpizero.comm.stats import Stats

__all__ = ["Communicator", "LoopbackCommunicator", "Stats", "run_loopback", "world"]
