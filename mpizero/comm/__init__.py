"""Who we talk to, and over which wire. Knows no algorithms and no reductions; the only floor that imports mpi4py."""

from mpizero.comm.about import About
from mpizero.comm.board import CELL, WORDS
from mpizero.comm.communicator import Communicator, world
from mpizero.comm.device_heap import device_mappings
from mpizero.comm.heap import mappings
from mpizero.comm.loopback import LoopbackCommunicator, run_loopback
from mpizero.comm.messages import STRANDS
from mpizero.comm.progress import Work
from mpizero.comm.side import DeviceSide
from mpizero.comm.stats import Stats

__all__ = [
    "CELL",
    "STRANDS",
    "WORDS",
    "About",
    "Communicator",
    "DeviceSide",
    "LoopbackCommunicator",
    "Stats",
    "Work",
    "device_mappings",
    "mappings",
    "run_loopback",
    "world",
]
